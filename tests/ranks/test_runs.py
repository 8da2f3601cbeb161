"""A run's folder, where ranks do not see the same."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep import checkpoint, engine, resume
from lockstep.checkpoint import write
from lockstep.cli.main import main
from lockstep.config import RunConfig
from lockstep.engine import train
from lockstep.errors import RequestError
from lockstep.options import leaves, override
from lockstep.record.base import Nothing
from lockstep.result import Scores
from lockstep.runs import run
from lockstep.world import World

from ..command import events, refusal
from ..curves import apart, curve
from ..pool import RankPool


def _load(world: World, folders: list[str]) -> str:
    config = override(RunConfig(), model="mlp", data="digits", output=folders[world.rank], resume="auto")
    try:
        state = resume.load(config, world)
    except RequestError as error:
        return str(error)
    return "none" if state is None else f"step {state.meta['step']}"


def test_ranks_that_see_different_checkpoints_are_refused(pool: RankPool, tmp_path: Path) -> None:
    curve(pool, tmp_path / "run", 1, model="mlp", data="digits", max_steps=2)
    here, nowhere, damaged = (str(tmp_path / name) for name in ("run", "nowhere", "damaged"))
    curve(pool, Path(damaged), 1, model="mlp", data="digits", max_steps=2)
    os.truncate(Path(damaged) / "checkpoints" / "last" / "model.safetensors", 100)

    assert pool.run(2, _load, [here, here]) == ["step 2"] * 2
    assert pool.run(2, _load, [nowhere, nowhere]) == ["none"] * 2
    (sentence,) = set(pool.run(2, _load, [here, nowhere]))
    assert "rank 0 step-00000002" in sentence
    assert "rank 1 none" in sentence
    (sentence,) = set(pool.run(2, _load, [here, damaged]))
    assert "model.safetensors" in sentence


def test_a_rank_that_sees_the_newest_checkpoint_later_waits_for_it(pool: RankPool, tmp_path: Path) -> None:
    here, stale, late = (tmp_path / name for name in ("here", "stale", "late"))
    for steps in (2, 4):
        curve(pool, here, 1, model="mlp", data="digits", max_steps=steps, resume="auto", epochs=1, schedule="constant")
    for folder in (stale, late):  # as a network's file system may show it some time after the save
        shutil.copytree(here, folder, symlinks=True)
        link = folder / "checkpoints" / "last"
        link.unlink()
        link.symlink_to("step-00000002")
    newest = Path("checkpoints") / "step-00000004"
    shutil.rmtree(late / newest)
    assert pool.run(2, _load, [str(here), str(stale)]) == ["step 4"] * 2
    assert pool.run(2, _load, [str(stale), str(here)]) == ["step 4"] * 2
    comes = threading.Timer(1.5, lambda: shutil.copytree(here / newest, late / newest))
    comes.start()
    assert pool.run(2, _load, [str(here), str(late)]) == ["step 4"] * 2
    comes.join()


def test_a_run_that_is_taken_up_has_no_end_until_it_ends_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "run" / "summary.json"
    _trains(tmp_path / "run", "--max-steps", 2)
    seen: list[Any] = []
    trained = engine._train_epoch

    def look(*given: Any) -> None:
        seen.append(json.loads(summary.read_text()))
        trained(*given)

    monkeypatch.setattr(engine, "_train_epoch", look)
    _trains(tmp_path / "run", "--max-steps", 4, "--resume", "auto")
    assert [(each["exit"], each["steps"]) for each in seen] == [(None, 2)]
    assert json.loads(summary.read_text())["exit"] == 0


def _refused(world: World, folder: Path) -> str:
    config = override(RunConfig(), model="mlp", data="digits", batch=50, output=folder, resume="auto", accumulate=20)
    try:
        train(config, world, Nothing())
    except RequestError as error:
        return str(error)
    return "went on"


def test_a_run_whose_micro_batches_are_too_small_for_the_ranks_is_refused(pool: RankPool, tmp_path: Path) -> None:
    curve(pool, tmp_path, 1, model="mlp", data="digits", batch=50, accumulate=20, max_steps=2)
    (sentence,) = set(pool.run(3, _refused, tmp_path))
    assert "begun with 20 global micro-batches of 2 samples or more" in sentence
    assert sentence.endswith("continue on 2 ranks or fewer.")


def _plans(folder: Path) -> list[tuple[int, int]]:
    """Return (ranks, global micro-batches) of each start."""
    return [(row["plan"]["ranks"], row["plan"]["accumulation"]) for row in events(folder, "start")]


def _trains(folder: Path, *words: object) -> None:
    flags = ("--model", "mlp", "--accelerator", "cpu", "--output", folder, *words)
    assert main(["train", "digits", *map(str, flags)]) == 0


def test_fewer_ranks_take_more_micro_batches_where_memory_forbids_larger_shares(pool: RankPool, tmp_path: Path) -> None:
    values = {"model": "mlp", "data": "digits", "batch": 60, "lr": 0.1}
    whole = curve(pool, tmp_path / "whole", 1, **values, max_steps=15)
    parts: dict[int, float] = {}
    for ranks, steps in ((3, 5), (2, 10), (3, 15)):
        asked = {"micro_batch": 20, "max_steps": steps, "resume": "auto", "checkpoint_every": 5}
        losses, held = curve(pool, tmp_path / "parts", ranks, **values, **asked)
        parts |= losses
    assert apart((parts, held), whole) < 1e-9


def _restarted(world: World, folder: Path, model: str, steps: int) -> None:
    flags = {"model": model, "data": "digits", "strategy": "ddp", "batch": 60, "micro_batch": 20, "ledger": True}
    config = override(RunConfig(), **flags, max_steps=steps, output=folder, resume="auto", epochs=1, precision="fp64")
    run(config, world)


def test_more_micro_batches_are_said_and_with_batch_statistics_make_another_model(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, code in (("mlp", 0), ("tests.models:Normed", 3)):
        folder = tmp_path / model.rpartition(":")[2]
        for ranks, steps in ((3, 5), (2, 24)):
            pool.run(ranks, _restarted, folder, model, steps)
        assert _plans(folder) == [(3, 1), (2, 2)]
        cut = "a batch is cut into 2 global micro-batches from here on, and was into 1"
        other = (
            f"{cut}, for --micro-batch 20 on 2 ranks: batch statistics are those of a micro-batch, so that this is "
            "another model than before"
        )
        assert (other if code else cut) in [line for row in events(folder, "start") for line in row["lines"]]
        capsys.readouterr()
        assert main(["verify", "run", str(folder)]) == code
        assert ("from step 6 on, batch statistics are those of one of 2" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(("strategy", "way"), [("ddp", "--batchnorm sync"), ("hybrid", "--strategy ddp")])
def test_a_model_that_depends_on_the_nodes_is_refused_where_they_may_change(strategy: str, way: str) -> None:
    flags = {"model": "resnet8", "data": "digits", "strategy": strategy, "batchnorm": "local", "accelerator": "cpu"}
    config = override(RunConfig(), **flags, nodes="1:2", devices=1, max_steps=1)
    with pytest.raises(RequestError, match=f"--nodes 1:2 lets the number of nodes change, .*; use {way}, a model"):
        train(config, World.alone(), Nothing())


MAY_CHANGE = {
    "data-dir", "download", "workers", "skip-corrupt", "on-device", "accumulate", "micro-batch", "eval-batch",
    "strategy", "devices", "gpus", "accelerator", "launcher", "nodes", "max-restarts", "init-method", "clear-meeting",
    "interface", "rank", "world-size", "timeout", "stall-timeout", "batchnorm", "collectives", "find-unused",
    "precision", "channels-last", "compile", "deterministic", "resume", "checkpoint-every", "output", "log-every",
    "verify-every", "ledger", "epochs", "max-steps",
}  # fmt: skip
"""Options that leave the run the one it was, or, like --accumulate and --batchnorm, are looked at by themselves."""


def test_every_option_either_makes_the_run_or_may_change() -> None:
    makes = set(resume.identity(RunConfig()))
    assert makes.isdisjoint(MAY_CHANGE)
    assert makes | MAY_CHANGE == {leaf.key for leaf in leaves()}


def test_a_complete_run_that_is_taken_up_again_says_so_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    _trains(run, "--max-steps", 3)
    before = json.loads((run / "summary.json").read_text())
    for folder, again in ((run, "auto"), (other, run)):
        capsys.readouterr()
        _trains(folder, "--max-steps", 3, "--resume", again)
        told = "".join(capsys.readouterr())
        assert "nothing is left to train" in told
        assert "warning" not in told
    assert json.loads((run / "summary.json").read_text()) == before
    assert checkpoint.load(other).meta["step"] == checkpoint.load(other / "checkpoints" / "best").meta["step"] == 3


def test_the_config_of_ranks_started_by_hand_is_the_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meeting = ("--world-size", "1", "--rank", "0", "--init-method", f"file://{tmp_path / 'meet'}")
    _trains(tmp_path / "first", "--max-steps", 1, *meeting)
    again = ("train", "--config", str(tmp_path / "first" / "config.toml"), "--output", str(tmp_path / "second"))
    assert main([*again]) == 0
    first, second = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("first", "second"))
    assert (first["chosen"]["launcher"], second["chosen"]["launcher"]) == ("manual", "inline")
    assert checkpoint.load(tmp_path / "first").meta["config"] == checkpoint.load(tmp_path / "second").meta["config"]


def test_a_continuation_that_is_refused_leaves_the_run_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--output", tmp_path / "run")
    _trains(tmp_path / "run", "--max-steps", 5, "--ledger")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.suffix in (".toml", ".bin")}
    assert {*before} == {"config.toml", "ledger.bin"}
    assert "would end at step 3" in refusal(capsys, *words, "--max-steps", 3, "--resume", "auto")
    assert all((tmp_path / "run" / name).read_bytes() == data for name, data in before.items())
    # A complete run that is taken up again has nothing to prove, and keeps what it has proved.
    _trains(tmp_path / "run", "--max-steps", 5, "--resume", "auto")
    proved = json.loads((tmp_path / "run" / "summary.json").read_text())["proof"]
    assert proved["ledger"]["found"] == "0 whole epochs and 1 evaluation were asked"
    assert main(["verify", "run", str(tmp_path / "run")]) == 0


def test_another_number_of_epochs_that_makes_another_schedule_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for steps, epochs in ((1, 2), (2, 2), (3, 3)):
        _trains(tmp_path, "--resume", "auto", "--schedule", "cosine", "--max-steps", steps, "--epochs", epochs)
        told.append("the steps behind had other learning rates" in capsys.readouterr().out)
    assert told == [False, False, True]


def test_best_is_the_best_of_what_could_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.5, 0.9, 0.8, 0.7, 0.85])
    writes, write_folder = iter(range(100)), write._write_folder

    def scored(*_: object, **__: object) -> Scores:
        return Scores(top1=next(scores), top5=1.0, loss=1.0, samples=360)

    def written(part: Path, *rest: Any) -> None:
        if next(writes) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_folder(part, *rest)

    monkeypatch.setattr(engine, "evaluate", scored)
    monkeypatch.setattr(write, "_write_folder", written)
    values = {"data": "digits", "model": "mlp", "batch": 1437, "output": tmp_path}
    best = tmp_path / "checkpoints" / "best"
    for epochs, step in ((4, 3), (5, 5)):
        config = override(RunConfig(), epochs=epochs, resume="auto", **values)
        assert train(config, World.alone(), Nothing()).best_top1 == 0.9
        assert checkpoint.load(best).meta["step"] == step

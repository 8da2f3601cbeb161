"""A run's folder: what it is continued from, what may change meanwhile, and what a complete run keeps."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep import checkpoint
from lockstep import trainer as engine
from lockstep.checkpoint import resume
from lockstep.cli.main import main
from lockstep.config.options import leaves, override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.record.base import Nothing
from lockstep.runs import remote
from lockstep.trainer import run, train
from lockstep.world.topology import Topology
from lockstep.world.world import World

from ..command import events
from ..curves import apart, curve, of_run
from ..pool import RankPool

MLP = {"model": "mlp", "data": "digits"}


def _flags(folder: Path, *words: object) -> list[str]:
    return ["train", "digits", "--model", "mlp", "--accelerator", "cpu", "--output", str(folder), *map(str, words)]


def _load(world: World, folders: list[Path]) -> str:
    try:
        state = resume.load(override(RunConfig(), **MLP, output=folders[world.rank], resume="auto"), world)
    except RequestError as error:
        return str(error)
    return "none" if state is None else f"step {state.meta['step']}"


def test_ranks_go_on_from_the_same_checkpoint_or_are_refused(pool: RankPool, tmp_path: Path) -> None:
    here, late, damaged, nowhere = (tmp_path / name for name in ("here", "late", "damaged", "nowhere"))
    old, new = (Path("checkpoints") / f"step-{step:08}" for step in (2, 4))
    for steps in (2, 4):
        curve(pool, here, 1, **MLP, max_steps=steps, resume="auto")
    for folder in (late, damaged):
        shutil.copytree(here, folder, symlinks=True)
    shutil.rmtree(damaged / old)
    os.truncate(damaged / new / "model.safetensors", 100)
    (late / "checkpoints" / "last").unlink()  # as a network's file system may show it some time after the save
    (late / "checkpoints" / "last").symlink_to(old.name)
    shutil.rmtree(late / new)

    def heard(*folders: Path) -> str:
        (told,) = set(pool.run(2, _load, list(folders)))
        return str(told)

    assert heard(nowhere, nowhere) == "none"
    told = heard(here, nowhere)
    assert "rank 0 step-00000004" in told
    assert "rank 1 none" in told
    assert "model.safetensors" in heard(here, damaged)
    shutil.copytree(here / new, late / "hidden")
    comes = threading.Timer(0.5, lambda: (late / "hidden").rename(late / new))
    comes.start()
    assert heard(here, late) == "step 4"
    comes.join()


def _copied(world: World, folder: Path, url: str) -> None:
    run(override(RunConfig(), **MLP, output=folder, remote=url, strategy="ddp", batch=60, max_steps=3), world)


def _restored(world: World, folders: list[Path], url: str) -> tuple[int, list[str]]:
    """Continue as two hosts do that share no disk."""
    host = dataclasses.replace(world, topology=Topology(rank=world.rank, size=2, node=world.rank, nodes=2))
    folder = folders[world.rank]
    config = override(RunConfig(), **MLP, batch=60, output=folder, remote=url, resume="auto")
    remote.restore(config, host, is_restart=False, must_exist=True)
    state = resume.load(config, host)
    assert state is not None
    return state.meta["step"], sorted(path.name for path in folder.iterdir())


def test_hosts_without_a_common_disk_go_on_from_a_store(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    url, folders = f"file://{tmp_path}/store/run", [tmp_path / "here", tmp_path / "there"]
    pool.run(2, _copied, tmp_path / "first", url)
    found = pool.run(2, _restored, folders, url)
    assert [step for step, _ in found] == [3, 3]
    assert {"steps.jsonl", "summary.json", "checkpoints"} <= {*found[0][1]}
    assert found[1][1] == ["checkpoints"]
    assert [(folder / "checkpoints" / "best").exists() for folder in folders] == [True, False]
    assert pool.run(2, _restored, [tmp_path / "one"] * 2, url) == [found[0]] * 2
    # Killed before the last upload: what only one of them has is of no use.
    checkpoints = folders[0] / "checkpoints"
    shutil.copytree(checkpoints / "step-00000003", checkpoints / "step-00000009")
    (checkpoints / "last").unlink()
    (checkpoints / "last").symlink_to("step-00000009")
    assert [step for step, _ in pool.run(2, _restored, folders, url)] == [3, 3]


def test_a_run_that_is_taken_up_has_no_end_until_it_ends_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.json"
    assert main(_flags(tmp_path, "--max-steps", 2)) == 0
    seen: list[Any] = []
    trained = engine.train_share

    def look(*given: Any) -> None:
        seen.append(json.loads(summary.read_text()))
        trained(*given)

    monkeypatch.setattr(engine, "train_share", look)
    assert main(_flags(tmp_path, "--max-steps", 4, "--resume", "auto")) == 0
    assert [(each["exit"], each["steps"]) for each in seen] == [(None, 2)] * 2
    assert json.loads(summary.read_text())["exit"] == 0


def test_the_config_of_ranks_started_by_hand_is_the_run_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    rendezvous = ("--world-size", 1, "--rank", 0, "--init-method", f"file://{tmp_path / 'meet'}")
    assert main(_flags(first, "--max-steps", 1, *rendezvous)) == 0
    assert main(["train", "--config", str(first / "config.toml"), "--output", str(second)]) == 0
    chosen = [json.loads((folder / "manifest.json").read_text())["chosen"]["launcher"] for folder in (first, second)]
    assert chosen == ["manual", "inline"]
    assert checkpoint.load(first).meta["config"] == checkpoint.load(second).meta["config"]


def _went_on(world: World, folder: Path, flags: dict[str, Any]) -> None:
    asked = {"data": "digits", "strategy": "ddp", "batch": 60, "epochs": 1, "precision": "fp64", "ledger": True}
    run(override(RunConfig(), **asked | flags, output=folder, resume="auto"), world)


@pytest.mark.parametrize(("model", "is_another"), [("mlp", False), ("tests.models:Normed", True)])
def test_fewer_ranks_take_more_micro_batches_where_memory_forbids_larger_shares(
    pool: RankPool, tmp_path: Path, model: str, is_another: bool
) -> None:
    """Which is said, and is another model where there are batch statistics."""
    asked = {"model": model, "micro_batch": 20}
    for ranks, steps in ((3, 5), (2, 24)):
        pool.run(ranks, _went_on, tmp_path / "run", asked | {"max_steps": steps})
    starts = events(tmp_path / "run", "start")
    assert [(row["plan"]["ranks"], row["plan"]["accumulation"]) for row in starts] == [(3, 1), (2, 2)]
    (line,) = [line for line in starts[1]["lines"] if "a batch has 2 global micro-batches from here on" in line]
    assert ("the model changes" in line) == is_another
    if not is_another:
        whole = curve(pool, tmp_path / "whole", 1, **MLP, batch=60, epochs=1, max_steps=24)
        assert apart(of_run(tmp_path / "run"), whole) < 1e-9


@pytest.mark.parametrize(("strategy", "way"), [("ddp", "--batchnorm sync"), ("hybrid", "--strategy ddp")])
def test_a_model_that_depends_on_the_nodes_is_refused_where_they_may_change(strategy: str, way: str) -> None:
    flags = {"model": "resnet8", "data": "digits", "strategy": strategy, "batchnorm": "local", "accelerator": "cpu"}
    with pytest.raises(RequestError, match=f"--nodes 1:2 .* use {way}"):
        train(override(RunConfig(), **flags, nodes="1:2", devices=1, max_steps=1), World.alone(), Nothing())


MAY_CHANGE = """
data-dir download workers skip-corrupt on-device accumulate micro-batch eval-batch strategy devices gpus accelerator
launcher nodes max-restarts init-method interface rank world-size timeout stall-timeout batchnorm
collectives shard-modules shard-size shard-reshard exchange exchange-every powersgd-rank powersgd-start precision
channels-last compile cuda-graphs deterministic checkpoint-activations resume checkpoint-every output log-every quiet
keep remote track profile verify-every ledger epochs max-steps eval-every patience metric
"""
"""Options that leave the run the one it was, or, like --accumulate and --batchnorm, are looked at by themselves."""


def test_every_option_either_makes_the_run_or_may_change() -> None:
    makes, may_change = {*resume.identity(RunConfig())}, {*MAY_CHANGE.split()}
    assert makes.isdisjoint(may_change)
    assert makes | may_change == {leaf.key for leaf in leaves()}


def test_another_number_of_epochs_that_makes_another_schedule_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, epochs in ((1, 2), (2, 2), (3, 3)):
        asked = ("--resume", "auto", "--schedule", "cosine", "--max-steps", steps, "--epochs", epochs)
        assert main(_flags(tmp_path, *asked)) == 0
        assert ("had other learning rates" in capsys.readouterr().out) == (epochs == 3)

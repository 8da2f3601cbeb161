"""Law 4 under --ledger: samples are counted, and one that comes twice or never stops the run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from lockstep.checks import samples
from lockstep.checks.samples import SampleCounts
from lockstep.cli.main import main
from lockstep.config.options import override, recipe
from lockstep.data.order import Order
from lockstep.data.resident import Data
from lockstep.data.source import Indices
from lockstep.errors import ProofError
from lockstep.record.base import Recorder
from lockstep.trainer import train
from lockstep.world.world import World

from .. import loops
from ..command import command, events
from ..loops import images, session
from ..pool import RankPool
from ..real.test_script import LOOP

TRAINED, TESTED = 1437, 360
"""Samples of the digits."""


# ---- counts


def _violation(world: World, shares: list[list[int]], size: int, due: int) -> str:
    counts = SampleCounts(size)
    counts.add(np.array(shares[world.rank], np.int64))
    return counts.violation(world, due)


VIOLATIONS: list[tuple[list[list[int]], int, str]] = [
    ([[0, 1, 2], [3, 4]], 5, ""),
    ([[0, 1, 2, 3, 4], []], 5, ""),
    ([[0, 1], [4]], 3, ""),
    ([[0, 1, 2], [3, 2, 4]], 5, "sample 2 came more than once (sample 2 on rank 0 and rank 1)"),
    ([[0, 1, 2], [4, 4]], 5, "sample 4 came more than once (sample 4 on rank 1), and sample 3 did not come"),
    ([[], []], 5, "samples 0, 1, 2, 3 and 1 more did not come"),
    ([[0], [1]], 3, "2 of 3 samples came"),
    ([[0, 1, 2], [3, 5]], 5, "sample 4 did not come, and 1 number beyond the 5 samples came"),
    ([[0, 1, 2, 3], [4, *256 * [4]]], 5, "261 samples came in place of 5"),
]


@pytest.mark.parametrize(("shares", "due", "clause"), VIOLATIONS, ids=[clause or "none" for *_, clause in VIOLATIONS])
def test_counts_name_what_came_twice_or_never(pool: RankPool, shares: list[list[int]], due: int, clause: str) -> None:
    assert pool.run(2, _violation, shares, 5, due) == [clause] * 2


def test_counts_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_CHUNK", 7)
    order = Order(100, seed=0, epoch=0).indices(0, 100)
    assert _violation(World.alone(), [order.tolist()], 100, 100) == ""
    assert _violation(World.alone(), [order[:-1].tolist()], 100, 100) == f"sample {order[-1]} did not come"


# ---- lockstep train


def _patch(patch: pytest.MonkeyPatch, part: str) -> None:
    """Replace a batch's samples by those of another, in training or evaluation."""
    stream = Data.stream

    def faulty(self: Data, shares: Iterable[Indices], *, epoch: int) -> Any:
        planned = list(shares)
        if part == "training" and len(self) == TRAINED:
            planned[4] = planned[3]
        elif part == "evaluation" and len(self) == TESTED:
            planned = [np.array([share[0], *share[:-1]]) for share in planned]
        return stream(self, iter(planned), epoch=epoch)

    patch.setattr(Data, "stream", faulty)


class Proof(Recorder):
    """Keeps the outcomes of the run's checks."""

    def __init__(self) -> None:
        self.checks: dict[str, Any] = {}

    def record(self, event: str, **fields: Any) -> None:
        if event == "proof":
            self.checks = fields["checks"]


def _train(world: World, values: dict[str, Any], faulty: str) -> tuple[str, dict[str, Any]]:
    """Train, with a fault on the last rank; return the run's error, "" for none, and the check's outcome."""
    torch.set_num_threads(1)
    options = {"model": "mlp", "batch": 100, "precision": "fp32", "augment": [], "ledger": True, "epochs": 2}
    error, proof = "", Proof()
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == world.size - 1:
            _patch(patch, faulty)
        try:
            train(override(recipe("digits"), **options | values), world, proof)
        except ProofError as failure:
            error = str(failure)
    return error, proof.checks["samples"]


def _trained(pool: RankPool, ranks: int, faulty: str = "", **values: Any) -> tuple[str, dict[str, Any]]:
    """Return the run's error, the same on all ranks, and the check's outcome."""
    (error, proof), *others = pool.run(ranks, _train, values, faulty)
    assert [each for each, _ in others] == [error] * (ranks - 1)
    return error, proof


def _proof(folder: Path) -> dict[str, Any]:
    """Return the check's outcome in the run's records."""
    proof: dict[str, Any] = events(folder, "proof")[-1]["checks"]["samples"]
    return proof


TEXT = {"model": "tests.judged:Transformer", "data": "tests.judged:texts", "batch": 11, "lr": 0.01}
"""45 samples: the last batch has one, and one of two ranks none."""
CLEAN: list[tuple[int, dict[str, Any], int]] = [
    (1, {}, 4),
    (3, {"accumulate": 3, "drop_last": True}, 4),
    (2, {"holdout": 0.1}, 5),  # and the test set
    (2, TEXT, 4),
    (2, {"max_steps": 20}, 3),  # an epoch and a part of one
]


@pytest.mark.parametrize(("ranks", "values", "times"), CLEAN)
def test_a_clean_run_holds_each_sample_once(
    pool: RankPool, tmp_path: Path, ranks: int, values: dict[str, Any], times: int
) -> None:
    error, proof = _trained(pool, ranks, output=tmp_path, **values)
    assert (error, proof["outcome"], proof["times"]) == ("", "holds", times), proof


@pytest.mark.parametrize(
    ("part", "place"), [("training", "in epoch 0, "), ("evaluation", "in the evaluation after step 15, ")]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_that_come_twice_or_never_stop_the_run(
    pool: RankPool, tmp_path: Path, ranks: int, part: str, place: str
) -> None:
    error, proof = _trained(pool, ranks, part, output=tmp_path)
    assert place in error
    assert re.search(r"samples? \d+.* came more than once \(sample \d+ on .*rank", error), error
    assert re.search(r"samples? \d+.* did not come", error), error
    assert proof["outcome"] == "fails"


def test_a_resumed_epoch_counts_what_came_before_by_its_order(pool: RankPool, tmp_path: Path) -> None:
    """On another number of ranks, too; and a fault after the resume is found."""
    _trained(pool, 2, output=tmp_path, max_steps=19)
    error, proof = _trained(pool, 3, output=tmp_path / "copy", resume=str(tmp_path))
    assert error == ""
    assert proof["found"] == (
        "1 epoch and 1 evaluation ended, and were counted; 400 samples of an epoch came before the resume, by its order"
    )
    error, _ = _trained(pool, 2, "training", output=tmp_path, resume="auto")
    assert "in epoch 1, " in error


def test_the_outcome_is_on_the_runs_page_and_in_its_summary(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--epochs", "1", "--ledger")
    assert main([*words, "--output", str(run)]) == 0
    assert f"| {samples.CLAIM} | **holds** | 2 | exactly |" in (run / "proof.md").read_text()
    assert '"samples": {\n      "name": "samples"' in (run / "summary.json").read_text()


# ---- loops of a user's own


class Backwards(Sampler[int]):
    """Yields the last sample first."""

    def __len__(self) -> int:
        return 61

    def __iter__(self) -> Any:
        return iter(range(60, -1, -1))


class Repeating(Backwards):
    """Yields the first sample in place of the last one."""

    def __iter__(self) -> Any:
        return iter([0, *range(60)])


LOADERS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "dropped": {"shuffle": True, "drop_last": True},
    "sampled": {"sampler": Backwards()},
    "repeating": {"sampler": Repeating()},
}


def _loop(world: World, folder: Path, how: str, stop_at: int | None = None, resume: str = "") -> str:
    """Train and evaluate; return the error, "" for none."""
    options = {"ledger": True, "accumulate": 2, "seed": 3, "checkpoint_every": 1, "resume": resume}
    try:
        with session(world, output=str(folder), **options) as ours:
            model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(images(), batch_size=20, **LOADERS[how])
            model, optimizer, loader = ours.prepare(model, optimizer, loader)
            for epoch in ours.epochs(2):
                for x, y in loader:
                    if ours.step == stop_at:
                        return ""
                    ours.backward(nn.functional.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                for x, _ in ours.evaluating(DataLoader(images(), batch_size=20)):
                    model(x)
                ours.score(-epoch)
    except ProofError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", LOADERS)
def test_the_samples_of_a_loop_are_counted(pool: RankPool, tmp_path: Path, how: str) -> None:
    errors = pool.run(3, _loop, tmp_path / "run", how)
    proof = _proof(tmp_path / "run")
    if how == "repeating":
        assert all("sample 0 came more than once" in error and "sample 60 did not come" in error for error in errors)
        assert proof["outcome"] == "fails"
    else:
        assert errors == [""] * 3
        assert (proof["outcome"], proof["times"]) == ("holds", 4), proof


@pytest.mark.parametrize("how", ["shuffled", "sampled"])
def test_a_loop_that_is_resumed_within_an_epoch_counts_it(pool: RankPool, tmp_path: Path, how: str) -> None:
    stop_at = 6  # an epoch has four steps
    assert pool.run(2, _loop, tmp_path, how, stop_at) == [""] * 2
    assert pool.run(1, _loop, tmp_path, how, None, "auto") == [""]
    assert _proof(tmp_path)["found"] == (
        "1 epoch and 1 evaluation ended, and were counted; 40 samples of an epoch came before the resume, by its order"
    )


def _left(world: World, at: int) -> None:
    with session(world, ledger=True, accumulate=2) as ours:
        model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = ours.prepare(model, optimizer, DataLoader(images(), batch_size=20))
        for _ in ours.epochs(2):
            for number, (x, y) in enumerate(loader):
                if number == at:
                    break
                ours.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        checks = ours.loop.checks.outcomes()
    assert checks["samples"]["times"] == 2


@pytest.mark.parametrize("at", [2, 3])  # the micro-batches of the second batch
def test_samples_of_a_batch_that_a_loop_leaves_do_not_count(pool: RankPool, at: int) -> None:
    pool.run(2, _left, at)


def test_a_script_of_a_users_own_is_counted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    ended = command(tmp_path, "run", "--accelerator", "cpu", "--devices", 2, "--ledger", "train.py", "run")
    assert ended.code == 0, ended
    proof = _proof(tmp_path / "run")
    assert (proof["outcome"], proof["times"]) == ("holds", 3), proof


def test_runs_without_a_number_of_steps_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, options in (("a", {}), ("b", {}), ("c", {"seed": 7})):
        loops.streamed(World.alone(), output=str(tmp_path / folder), **options)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["diff", "--all", str(tmp_path / "a"), str(tmp_path / "c")]) == 3
    assert "model/0.weight" in capsys.readouterr().out

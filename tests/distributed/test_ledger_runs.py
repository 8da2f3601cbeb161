"""The ledger of real runs: it holds over restarts and other worlds, and names the rank whose samples were others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config import RunConfig
from lockstep.data.order import Order
from lockstep.data.resident import ResidentTensors
from lockstep.engine import train
from lockstep.errors import ProofError, RequestError
from lockstep.options import override, recipe
from lockstep.proof import Check
from lockstep.verify import exactly_once, pages
from lockstep.verify.planned import Planned
from lockstep.world import World

from ..command import command
from ..curves import Losses
from ..pool import RankPool

SAMPLES, BATCH = 1437, 100


def _config(**values: Any) -> RunConfig:
    asked = {"model": "mlp", "batch": BATCH, "precision": "fp32", "augment": [], "ledger": True, "epochs": 2}
    return override(recipe("digits"), **asked | values)


def _other_order(rank_seed: int) -> None:
    right = Order.__init__

    def wrong(self: Order, samples: int, *, seed: int, epoch: int) -> None:
        right(self, samples, seed=seed + rank_seed, epoch=epoch)

    Order.__init__ = wrong  # type: ignore[method-assign]


def _other_batches(change: Any, *, trains: bool = True) -> None:
    right = ResidentTensors.stream

    def wrong(self: ResidentTensors, shares: Any, *, epoch: int) -> Any:
        # An evaluation that lacks samples does not get as far as its ledger.
        return right(self, change(shares) if (len(self) == SAMPLES) == trains else shares, epoch=epoch)

    ResidentTensors.stream = wrong  # type: ignore[method-assign]


def _twice(shares: Any) -> Any:
    before = None
    for number, share in enumerate(shares):
        yield before if number == 4 else share
        before = share


def _first_twice(shares: Any) -> Any:
    for share in shares:
        yield np.array([share[0], *share[:-1]])


def _swapped(shares: Any) -> Any:
    held = None
    for number, share in enumerate(shares):
        if number == 2:
            held = share
            continue
        yield share
        if number == 3:
            yield held


FAULTS: dict[str, Any] = {
    "": lambda: None,
    "another seed": lambda: _other_order(1),
    "a batch twice, one dropped": lambda: _other_batches(_twice),
    "an evaluated sample twice": lambda: _other_batches(_first_twice, trains=False),
    "two batches swapped": lambda: _other_batches(_swapped),
}


def _trained(world: World, values: dict[str, Any], fault: str, faulty_rank: int) -> str:
    """Train, with a fault on one rank; return what the run says of it, "" for nothing."""
    torch.set_num_threads(1)
    kept = Order.__init__, ResidentTensors.stream
    if world.rank == faulty_rank:
        FAULTS[fault]()
    try:
        config = _config(**values)
        train(config, world, Losses())
    except ProofError as error:
        return str(error)
    finally:
        Order.__init__, ResidentTensors.stream = kept  # type: ignore[method-assign]
    return ""


def judged(folder: Path, **values: Any) -> Check:
    asked = {"global_batch": BATCH, "seed": 0} | values
    return exactly_once.check(folder / pages.NAME, Planned(**asked))


@pytest.mark.parametrize("values", [{}, {"accumulate": 3}, {"drop_last": True}, {"batch": 64}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_clean_run_holds_each_sample_once(pool: RankPool, tmp_path: Path, ranks: int, values: dict[str, Any]) -> None:
    assert pool.run(ranks, _trained, values | {"output": tmp_path}, "", -1) == [""] * ranks
    found = judged(tmp_path, global_batch=values.get("batch", BATCH), drop_last=values.get("drop_last", False))
    assert found.outcome == Check.HOLDS, found
    assert found.times == 4  # two epochs, two evaluations


def test_restarts_in_other_worlds_leave_one_whole_account(pool: RankPool, tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    for ranks, steps in ((2, 7), (3, 19), (1, 22)):
        # --ledger only at first: a run that has a ledger keeps it.
        values = {"output": run, "max_steps": steps, "resume": "auto", "ledger": ranks == 2}
        pool.run(ranks, _trained, values | {"checkpoint_every": 3}, "", -1)
    pool.run(3, _trained, {"output": copy, "resume": str(run)}, "", -1)
    found = judged(copy, steps=30)
    assert found.outcome == Check.HOLDS, found
    ranks_of = [page.ranks for page in pages.read(copy / pages.NAME) if page.kind == pages.TRAIN]
    assert list(dict.fromkeys(ranks_of)) == [2, 3, 1]
    assert ranks_of[-1] == 3
    places = pages.where(pages.read(copy / pages.NAME), 17)
    assert [epoch for epoch, _, _ in places] == [0, 1]


def test_a_run_that_is_taken_up_at_an_older_checkpoint_forgets_what_came_after(pool: RankPool, tmp_path: Path) -> None:
    values = {"output": tmp_path, "checkpoint_every": 3}
    pool.run(2, _trained, values | {"max_steps": 20}, "", -1)
    older = next((tmp_path / "checkpoints").glob("step-*"))
    pool.run(2, _trained, values | {"resume": str(older)}, "", -1)
    assert judged(tmp_path, steps=30).outcome == Check.HOLDS


@pytest.mark.parametrize("fault", ["another seed", "a batch twice, one dropped"])
@pytest.mark.parametrize(("ranks", "faulty_rank"), [(2, 1), (3, 0), (4, 2)])
def test_samples_that_come_twice_or_never_stop_the_run(
    pool: RankPool, tmp_path: Path, fault: str, ranks: int, faulty_rank: int
) -> None:
    told = pool.run(ranks, _trained, {"output": tmp_path}, fault, faulty_rank)
    assert len(set(told)) == 1
    assert told[0].startswith("Not each sample was trained on exactly once, by ledger.bin: epoch 0: ")
    assert "came that had come before" in told[0]
    assert "never came" in told[0]
    found = judged(tmp_path)
    assert found.outcome == Check.FAILS
    assert re.search(rf"; rank {faulty_rank} computed|of rank {faulty_rank} alone", found.found)
    for other in set(range(ranks)) - {faulty_rank}:
        assert not re.search(rf"; rank {other} computed|of rank {other} alone", found.found)


def test_an_evaluation_that_takes_a_sample_twice_stops_the_run(pool: RankPool, tmp_path: Path) -> None:
    told = pool.run(3, _trained, {"output": tmp_path}, "an evaluated sample twice", 1)
    assert len(set(told)) == 1
    begins = "The evaluation did not take each sample exactly once, as planned, by ledger.bin: the evaluation after "
    assert told[0].startswith(f"{begins}step 15: ")
    assert "rank 1 computed sample" in told[0]
    assert judged(tmp_path).outcome == Check.FAILS


def test_batches_in_another_order_are_found_afterwards(pool: RankPool, tmp_path: Path) -> None:
    # Each sample comes exactly once, and yet not where the plan has it.
    assert pool.run(2, _trained, {"output": tmp_path}, "two batches swapped", 1) == ["", ""]
    found = judged(tmp_path)
    assert found.outcome == Check.FAILS
    assert "planned" in found.claim
    assert "rank 1" in found.found
    assert "step 3" in found.found


def test_a_transformer_on_text_is_accounted_for_and_compared(pool: RankPool, tmp_path: Path) -> None:
    values = {"model": "tests.judged:DroppingTransformer", "data": "tests.judged:texts", "batch": 10, "verify_every": 1}
    assert pool.run(2, _trained, values | {"output": tmp_path, "lr": 0.01}, "", -1) == ["", ""]
    assert judged(tmp_path, global_batch=10).outcome == Check.HOLDS


def test_the_command_keeps_the_account_and_says_so(tmp_path: Path) -> None:
    words = ("--model", "mlp", "--epochs", 1, "--ledger", "--accelerator", "cpu", "--output", "run")
    done = command(tmp_path, "train", "digits", *words)
    assert done.code == 0, done
    assert "ledger at 2 checks" in done.out
    assert "ledger.bin" in done.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    own = summary["proof"]["ledger"]
    assert (own["outcome"], own["times"]) == ("holds", 2)
    assert "planned" not in own["claim"], "where each sample was computed, lockstep verify run asks"
    assert "each sample exactly once" in (tmp_path / "run" / "proof.md").read_text()


def test_a_damaged_ledger_is_refused_when_the_run_goes_on(tmp_path: Path) -> None:
    assert _trained(World.alone(), {"output": tmp_path, "max_steps": 5}, "", -1) == ""
    path = tmp_path / pages.NAME
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(RequestError, match=r"ledger\.bin"):
        _trained(World.alone(), {"output": tmp_path, "resume": "auto"}, "", -1)

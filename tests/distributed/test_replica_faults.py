"""Replicas in the loop that trains: whatever flips is found within K steps and named; clean runs raise no alarm."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep import engine
from lockstep.config import RunConfig
from lockstep.errors import ProofError, RunError
from lockstep.job import Job, assemble
from lockstep.kinds import KINDS
from lockstep.options import override
from lockstep.precision import Precision
from lockstep.proof import Check, from_json
from lockstep.world import World

from .. import curves
from ..pool import RankPool

TRAINED = {"data": "digits", "batch": 24, "lr": 0.05, "precision": "fp32", "epochs": 1000, "clip": None}
WEIGHT = "classifier.weight"


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one step, on one rank or on all (None)."""

    name: str
    """As in a `State`; gradient/NAME for a parameter's gradient, after the exchange."""
    step: int
    rank: int | None
    bit: int | None
    """Which one flips, in the largest element; None to make that element no number at all."""

    def occur(self, tensor: Tensor) -> None:
        """Let it happen to `tensor`."""
        flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
        at = int(flat.abs().argmax())
        if self.bit is None:
            flat[at] = math.nan
        else:
            flat.view(torch.int32)[at] ^= 1 << self.bit

    def arm(self, patch: pytest.MonkeyPatch) -> None:
        """Have it happen in this process's run."""
        jobs: list[Job] = []
        steps, step = count(1), Precision.step

        def assembling(*given: Any, **options: Any) -> Job:
            jobs.append(assemble(*given, **options))
            return jobs[-1]

        def stepping(precision: Precision, optimizers: Sequence[Optimizer], *, clip: float | None) -> Tensor | None:
            now = next(steps) == self.step
            group, _, name = self.name.partition("/")
            if now and group == "gradient":
                gradient = jobs[-1].model.get_parameter(name).grad
                assert gradient is not None
                self.occur(gradient)
            norm = step(precision, optimizers, clip=clip)
            if now and group != "gradient":
                self.occur(jobs[-1].replicated()[self.name])
            return norm

        patch.setattr(engine, "assemble", assembling)
        patch.setattr(Precision, "step", stepping)


class Proved:
    """A recorder that keeps what a run proved."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def record(self, event: str, **fields: Any) -> None:
        if event == "proof":
            self.checks = from_json(fields["checks"])

    def close(self) -> None:
        pass


def _trained(world: World, values: dict[str, Any], fault: Fault | None = None) -> tuple[str, list[Check]]:
    """Train; return what the run ended with, "" where it did not fail, and what it proved."""
    torch.set_num_threads(1)
    proved, said = Proved(), ""
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None and fault.rank in (None, world.rank):
            fault.arm(patch)
        try:
            engine.train(override(RunConfig(), **TRAINED | values), world, proved)
        except (ProofError, RunError) as error:
            said = f"{type(error).__name__}: {error}"
    return said, proved.checks


FAULTS: dict[str, dict[str, Any]] = {
    f"gradient/{WEIGHT}": {},
    "model/stem.0.weight": {},
    f"optimizer/{WEIGHT}/momentum_buffer": {},
    f"optimizer/{WEIGHT}/exp_avg_sq": {"optimizer": "adamw", "lr": 1e-3},
    f"ema/{WEIGHT}": {"ema": 0.9},
    "model/stem.1.running_var": {"batchnorm": "sync"},
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_one_bit_that_flips_while_training_is_found(pool: RankPool, name: str, every: int, ranks: int) -> None:
    values = {"model": "resnet8", "strategy": "ddp", "verify_every": every, "max_steps": 9} | FAULTS[name]
    told = pool.run(ranks, _trained, values, Fault(name, step=4, rank=1, bit=18))
    assert len({said for said, _ in told}) == 1, told
    said, (proof, *_) = told[0]
    found_at = -(-4 // every) * every
    who = "rank 1 differs from the others" if ranks > 2 else "rank 0 and rank 1 differ"
    assert said.startswith(f"ProofError: The replicas are not the same bits after step {found_at}: {who} in "), said
    named = re.findall(r"(\S+) by up to", said)
    if name.startswith("gradient/"):
        assert {*named} == {f"model/{WEIGHT}", f"optimizer/{WEIGHT}/momentum_buffer"}
    else:
        assert name in named
        assert all(name.split("/")[1] in each for each in named), "no tensor but that one and what is made of it"
    assert f"they were the same after step {found_at - every}." in said
    assert proof.outcome == Check.FAILS
    assert f"ProofError: {proof.found}." == said
    assert proof.times == found_at // every


@pytest.mark.parametrize("bit", [30, None], ids=["exponent", "nan"])
@pytest.mark.parametrize("every", [1, 3, None])
@pytest.mark.parametrize("name", ["model/stem.0.weight", f"optimizer/{WEIGHT}/momentum_buffer"])
def test_a_replica_that_ruins_the_others_is_never_said_to_hold(
    pool: RankPool, name: str, every: int | None, bit: int | None
) -> None:
    values = {"model": "resnet8", "strategy": "ddp", "verify_every": every, "max_steps": 9}
    told = pool.run(3, _trained, values, Fault(name, step=4, rank=1, bit=bit))
    assert len({said for said, _ in told}) == 1, told
    said, (proof, *_) = told[0]
    if every == 1:
        assert said.startswith("ProofError: The replicas are not the same bits after step 4: rank 1 differs"), said
        assert f" in {name} by " in said
    if said.startswith("ProofError"):
        assert "rank 1 differs from the others in " in said
        assert proof.outcome == Check.FAILS
    else:  # before the next comparison, all are alike again: none of them is a number
        assert "--verify-every 1 tells, from a checkpoint of before." in said
        assert proof.outcome != Check.HOLDS


def _replicated(world: World, values: dict[str, Any]) -> set[str]:
    return {*assemble(override(RunConfig(), **TRAINED | values), world).replicated()}


def test_statistics_beside_averaged_weights_are_compared_where_they_are_synchronised(pool: RankPool) -> None:
    values = {"model": "resnet8", "strategy": "ddp", "ema": 0.9}
    names = "model/stem.1.running_var", "ema/stem.1.running_var"
    for batchnorm in ("sync", "local"):
        for found in pool.run(2, _replicated, values | {"batchnorm": batchnorm}):
            assert found.issuperset(names) == (batchnorm == "sync")
            assert found.isdisjoint(names) == (batchnorm == "local")


@pytest.mark.parametrize("name", [f"optimizer/{WEIGHT}/momentum_buffer", "model/stem.1.running_mean", f"ema/{WEIGHT}"])
def test_the_same_number_that_is_none_on_all_ranks_is_found(pool: RankPool, name: str) -> None:
    values = {"model": "resnet8", "strategy": "ddp", "verify_every": 1, "max_steps": 9, "ema": 0.9}
    told = pool.run(2, _trained, values, Fault(name, step=4, rank=None, bit=None))
    assert len({said for said, _ in told}) == 1, told
    said, (proof, *_) = told[0]
    assert re.match(
        rf"RunError: .* after step 4 are not finite numbers \([^)]*\b{re.escape(name)}\), though the loss was", said
    )
    assert proof.outcome == Check.FAILS
    one, other = (said for said, _ in pool.run(2, _trained, values, Fault(name, step=4, rank=1, bit=None)))
    assert one == other
    assert "ProofError: The replicas are not the same bits after step 4: rank 0 and rank 1 differ in " in one
    assert f" {name} by" in one
    assert "by a value that is not finite" in one


def test_a_loss_that_is_none_is_told_before_the_weights_that_it_ruins(pool: RankPool) -> None:
    values = {"model": "tests.models:Exploding", "strategy": "ddp", "verify_every": 3, "max_steps": 9}
    for said, (proof, *_) in pool.run(2, _trained, values):
        # Of the passes before the fourth, whose outputs are not numbers, one is a rehearsal.
        assert said.startswith("RunError: The loss at step 3 is not a finite number on rank 0 and rank 1.")
        assert (proof.outcome, proof.times) == (Check.OPEN, 0)


def test_what_would_be_saved_is_judged_alike_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    values = {"model": "resnet8", "strategy": "ddp", "verify_every": 0, "max_steps": 4, "output": tmp_path}
    fault = Fault(f"model/{WEIGHT}", step=4, rank=1, bit=None)
    for said, (proof, *_) in pool.run(2, _trained, values, fault):
        assert said.startswith(
            "RunError: The weights, statistics or optimizer state after step 4 are not finite numbers"
        )
        assert f"(model/{WEIGHT}), though the loss was; they were not saved. Lower --lr" in said
        assert (proof.outcome, proof.found) == (Check.OPEN, "switched off by --verify-every 0")


CLEAN: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (2, 600, {"model": "mlp"}),
    (3, 250, {"model": "mlp", "optimizer": "adamw", "lr": 1e-3, "accumulate": 2, "clip": 1.0}),
    (2, 150, {"model": "resnet8", "ema": 0.9, "augment": ["crop", "flip"]}),
)
"""Replicas, steps and options of runs that make a thousand checks together."""


@pytest.mark.parametrize("strategy", KINDS)
def test_a_thousand_clean_checks_raise_no_alarm(pool: RankPool, strategy: str) -> None:
    times = 0
    for replicas, steps, options in CLEAN:
        ranks, how = curves.spread(strategy, replicas)
        told = pool.run(ranks, _trained, how | options | {"verify_every": 1, "max_steps": steps if ranks > 1 else 3})
        assert {said for said, _ in told} == {""}, told
        proof, *others = told[0][1]
        found = Check.MEASURED if ranks > 1 else Check.OPEN  # dp's, of each replica, lie in one process
        assert all(each.name == "buffers" and each.outcome == found for each in others)
        if ranks > 1:
            assert proof.outcome == Check.HOLDS
            assert proof.found == f"compared first after step 1 and last after step {steps}; every step on average"
        else:
            assert (proof.outcome, proof.found) == (Check.OPEN, "one process, one set of weights")
        times += proof.times
    assert times == (1000 if KINDS[strategy].has_ranks else 0)


def test_a_run_with_local_statistics_tells_how_far_they_lie_apart(pool: RankPool) -> None:
    values = {"model": "resnet8", "strategy": "ddp", "batchnorm": "local", "verify_every": 4, "max_steps": 9}
    said, (replicas, buffers) = pool.run(2, _trained, values)[0]
    assert not said
    assert (replicas.outcome, replicas.times) == (Check.HOLDS, 3)
    assert (buffers.outcome, buffers.times) == (Check.MEASURED, 1), "before the evaluation"
    apart = re.fullmatch(
        r"\d+ BatchNorm statistics are each rank's own \(local\), and differ by up to (\S+) \(model/\S+\.running_\w+\)"
        "; an evaluation uses rank 0's",
        buffers.found,
    )
    assert apart, buffers.found
    assert 0 < float(apart[1]) < math.inf

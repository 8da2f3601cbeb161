"""Replicas that are the same bits pass every check; one bit on one rank is found within K steps and named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

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
from lockstep.verify.replicas import SHARE, ReplicaCheck
from lockstep.world import World

from .. import curves
from ..pool import RankPool

Tensors = dict[str, Tensor]


def _replica() -> Tensors:
    """Return two tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(shape, generator=generator) for name, shape in (("stem", (16, 3)), ("head", (10, 64)))}


def _flip(tensor: Tensor, bit: int) -> Tensor:
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return tensor


def _reversed(held: Tensors) -> Tensors:
    for name in reversed([*held]):
        held[name] = held.pop(name)
    return held


CHANGES: dict[str, tuple[int, Callable[[Tensors, int], object], str]] = {
    "one of three": (3, lambda held, rank: rank or _flip(held["head"], 5), "rank 0 differs from the others in head by"),
    "one of two": (2, lambda held, rank: rank and _flip(held["head"], 319), "rank 0 and rank 1 differ in head by"),
    "each its own": (
        3,
        lambda held, rank: rank and held[("stem", "head")[rank - 1]][0].add_(rank),
        "rank 2 differs from the others in head by up to 2; rank 1 differs from the others in stem by up to 1; ",
    ),
    "all apart": (3, lambda held, rank: held["head"][0].add_(rank), "rank 0 and rank 1 and rank 2 differ in head by"),
    "NaN": (
        3,
        lambda held, rank: rank == 1 and held["head"].fill_(math.nan),
        "rank 1 differs from the others in head by a value that is not finite; ",
    ),
    "large": (2, lambda held, rank: held["head"].fill_(1e30), ""),  # the square is not finite
    "another order": (2, lambda held, rank: rank and _reversed(held), ""),
}


def _checked(world: World, name: str) -> tuple[str, int | None]:
    """Change something before the fourth of seven steps; return what the check says, and when it last agreed."""
    tensors = _replica()
    check = ReplicaCheck(world, lambda: tensors, 3)
    for step in range(1, 8):
        for each in tensors.values():
            each.add_(0.125)
        if step == 4:
            CHANGES[name][1](tensors, world.rank)
        if check.due(step):
            try:
                check.check(step, 0.1)
            except ProofError as error:
                return str(error), check.agreed_at
    return "", check.agreed_at


@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_is_told_with_its_rank(pool: RankPool, name: str) -> None:
    size, _, told = CHANGES[name]
    (said, agreed_at), *others = pool.run(size, _checked, name)
    assert others == [(said, agreed_at)] * (size - 1)
    assert agreed_at == (3 if told else 6)
    assert bool(said) == bool(told)
    if told:
        assert f"after step 6: {told}" in said
        assert "the same after step 3." in said


def _paid(world: World) -> tuple[float, list[int]]:
    tensors = _replica()
    times_s = count(step=0.002)  # so long does each check take
    check = ReplicaCheck(world, lambda: tensors, None, lambda: float(next(times_s)))
    due = []
    for step in range(1, 2001):
        if check.due(step):
            check.check(step, 0.01)
            due.append(step)
        if step % 500 == 0:
            check.confirm(step, 0.01)  # as before a checkpoint: paid for out of the same budget
    return check.cost_s, due


def test_by_default_all_checks_together_keep_to_the_budget(pool: RankPool) -> None:
    (cost_s, due), other = pool.run(2, _paid)
    assert due == other[1]
    assert due[:2] == [1, 2]  # what a check costs is known after the first
    budget_s = SHARE * 2000 * 0.01
    assert 0.9 * budget_s < cost_s < budget_s + 2 * 0.002  # the first check, and one that a checkpoint asked for


def test_a_copy_on_another_device_is_compared_too() -> None:
    tensors, copy = _replica(), _replica()
    check = ReplicaCheck(World.alone(), lambda: tensors, 1, copies=lambda: [copy])
    check.check(1, 0.1)
    _flip(copy["head"], 40)
    with pytest.raises(ProofError, match=r"rank 0's weights on cpu are not .* after step 2: they differ in head"):
        check.check(2, 0.1)
    (proof,) = check.proof()
    assert (proof.outcome, proof.times) == (Check.FAILS, 2)


# ---- in the loop that trains

TRAINED = {"data": "digits", "batch": 24, "lr": 0.05, "precision": "fp32", "epochs": 1000, "clip": None, "max_steps": 6}
WEIGHT = "classifier.weight"
MOMENTUM = f"optimizer/{WEIGHT}/momentum_buffer"


class Fault(NamedTuple):
    """What goes wrong after the fourth step, on one rank or on all (None)."""

    name: str
    """As in a `State`."""
    rank: int | None = 1
    bit: int | None = None
    """Which one flips, in the largest element; None to make that element NaN."""

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
            norm = step(precision, optimizers, clip=clip)
            if next(steps) == 4:
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


def _train(world: World, values: dict[str, Any], fault: Fault | None) -> tuple[str, list[Check]]:
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


def _trained(pool: RankPool, ranks: int, fault: Fault | None = None, **values: Any) -> tuple[str, list[Check]]:
    """Return how a run ended, on all its ranks alike, and what it proved."""
    told = pool.run(ranks, _train, {"model": "resnet8", "strategy": "ddp"} | values, fault)
    assert len({said for said, _ in told}) == 1, told
    said, checks = told[0]
    return said, checks


@pytest.mark.parametrize(
    ("name", "ranks", "every", "options"),
    [
        (MOMENTUM, 4, 3, {}),
        ("model/stem.0.weight", 2, 1, {}),
        (f"optimizer/{WEIGHT}/exp_avg_sq", 3, 3, {"optimizer": "adamw", "lr": 1e-3}),
        (f"ema/{WEIGHT}", 3, 1, {"ema": 0.9}),
        ("model/stem.1.running_var", 3, 1, {"batchnorm": "sync"}),
    ],
)
def test_one_bit_that_flips_while_training_is_found(
    pool: RankPool, name: str, ranks: int, every: int, options: dict[str, Any]
) -> None:
    said, (proof, *_) = _trained(pool, ranks, Fault(name, bit=18), verify_every=every, **options)
    found_at = -(-4 // every) * every
    which = "rank 1 differs from the others" if ranks > 2 else "rank 0 and rank 1 differ"
    assert said.startswith(f"ProofError: The replicas are not the same bits after step {found_at}: {which} in "), said
    named = {*re.findall(r"(\S+) by up to", said)}
    assert name in named
    assert all(name.split("/")[1] in each for each in named), "no tensor but that one and what is made of it"
    assert f"they were the same after step {found_at - every}." in said
    assert (proof.outcome, proof.times) == (Check.FAILS, found_at // every)


def test_a_replica_that_ruins_the_others_is_never_said_to_hold(pool: RankPool) -> None:
    said, (proof, *_) = _trained(pool, 3, Fault("model/stem.0.weight", bit=30), verify_every=1)
    assert said.startswith("ProofError: The replicas are not the same bits after step 4: rank 1 differs"), said
    assert proof.outcome == Check.FAILS
    # Before the next comparison, all are alike again: none of them is a number.
    said, (proof, *_) = _trained(pool, 3, Fault("model/stem.0.weight"), verify_every=3)
    assert said.startswith("RunError: The loss at step "), said
    assert "--verify-every 1 tells, from a checkpoint of before." in said
    assert proof.outcome == Check.OPEN


@pytest.mark.parametrize("name", [MOMENTUM, "model/stem.1.running_mean"])
def test_a_number_that_is_not_finite_on_any_rank_is_found(pool: RankPool, name: str) -> None:
    said, (proof, *_) = _trained(pool, 2, Fault(name, rank=None), verify_every=1)
    named = rf"RunError: .* after step 4 are not finite numbers \([^)]*\b{re.escape(name)}\), though the loss was"
    assert re.match(named, said), said
    assert proof.outcome == Check.FAILS


def test_a_loss_that_is_not_finite_is_told_before_the_weights_that_it_ruins(pool: RankPool) -> None:
    said, (proof, *_) = _trained(pool, 2, model="tests.models:Exploding", verify_every=3)
    # Of the passes before the fourth, whose outputs are not numbers, one is a rehearsal.
    assert said.startswith("RunError: The loss at step 3 is not a finite number on rank 0 and rank 1.")
    assert (proof.outcome, proof.times) == (Check.OPEN, 0)


def test_what_would_be_saved_is_judged_alike_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    fault = Fault(f"model/{WEIGHT}")
    said, (proof, *_) = _trained(pool, 2, fault, verify_every=0, max_steps=4, output=tmp_path)
    assert f"after step 4 are not finite numbers (model/{WEIGHT}), though the loss was; they were not saved" in said
    assert " Lower --lr" in said
    assert (proof.outcome, proof.found) == (Check.OPEN, "switched off by --verify-every 0")
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("strategy", KINDS)
def test_clean_checks_raise_no_alarm(pool: RankPool, strategy: str) -> None:
    for replicas, steps, options in (
        (3, 20, {"model": "mlp", "optimizer": "adamw", "lr": 1e-3, "accumulate": 2, "clip": 1.0}),
        (2, 10, {"model": "resnet8", "ema": 0.9, "augment": ["crop", "flip"]}),
    ):
        ranks, how = curves.spread(strategy, replicas)
        steps = steps if ranks > 1 else 3
        said, (proof, *others) = _trained(pool, ranks, **how | options | {"verify_every": 1, "max_steps": steps})
        assert not said
        found = Check.MEASURED if ranks > 1 else Check.OPEN  # dp's, of each replica, lie in one process
        assert all(each.name == "buffers" and each.outcome == found for each in others)
        assert (proof.outcome, proof.times) == ((Check.HOLDS, steps) if ranks > 1 else (Check.OPEN, 0))


def test_a_run_with_local_statistics_tells_how_far_they_lie_apart(pool: RankPool) -> None:
    said, (replicas, buffers) = _trained(pool, 2, batchnorm="local", verify_every=4)
    assert not said
    assert (replicas.outcome, replicas.times) == (Check.HOLDS, 2)
    assert (buffers.outcome, buffers.times) == (Check.MEASURED, 1), "before the evaluation"
    apart = re.search(r"differ by up to (\S+) \(model/\S+\.running_\w+\); an evaluation uses rank 0's", buffers.found)
    assert apart, buffers.found
    assert 0 < float(apart[1]) < math.inf

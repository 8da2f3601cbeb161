"""Replicas that are the same bits pass, at every check; one bit on one rank is found, and told by name."""

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
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import engine
from lockstep.config import RunConfig
from lockstep.errors import ProofError, RunError
from lockstep.job import Job, assemble
from lockstep.kinds import KINDS
from lockstep.meter import Meter
from lockstep.models import table
from lockstep.options import override
from lockstep.precision import Precision
from lockstep.proof import Check, from_json
from lockstep.record.base import Nothing
from lockstep.verify.digest import compare, spread
from lockstep.verify.replicas import SHARE, ReplicaCheck
from lockstep.world import World

from .. import curves
from ..pool import RankPool

MOMENT = "optimizer/classifier.weight/momentum_buffer"


def _replica() -> dict[str, Tensor]:
    """Return parameters and momentum, the same on every rank."""
    torch.manual_seed(3)
    net: nn.Module = table.build("resnet8", classes=10, in_channels=1, image_size=8)
    named = {f"model/{name}": each.detach() for name, each in net.named_parameters()}
    generator = torch.Generator().manual_seed(4)
    momentum = {
        f"optimizer/{name.removeprefix('model/')}/momentum_buffer": torch.randn(each.shape, generator=generator)
        for name, each in named.items()
    }
    return named | momentum


def _flip(tensor: Tensor, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def _checked(world: World, rank: int, name: str, bit: int, every: int | None) -> tuple[str, int | None, int]:
    """Flip a bit on one rank after the third of ten steps; return what the check says and when it last agreed."""
    tensors = _replica()
    check = ReplicaCheck(world, lambda: tensors, every)
    for step in range(1, 11):
        for each in tensors.values():
            each.add_(0.125)
        if step == 4 and world.rank == rank:
            _flip(tensors[name], bit)
        if check.due(step):
            try:
                check.check(step, 0.1)
            except ProofError as error:
                return str(error), check.agreed_at, step
    return "", check.agreed_at, 0


@pytest.mark.parametrize(
    ("size", "rank", "name", "bit"),
    [
        (3, 2, "model/stem.0.weight", 23),  # the last bit of a mantissa
        (3, 0, "model/classifier.bias", 319),
        (2, 1, MOMENT, 5),
        (3, 1, MOMENT, 30),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_one_bit_on_one_rank_is_found_and_told(
    pool: RankPool, size: int, rank: int, name: str, bit: int, every: int
) -> None:
    told = pool.run(size, _checked, rank, name, bit, every)
    assert len(set(told)) == 1, told
    said, agreed_at, found_at = told[0]
    assert 4 <= found_at < 4 + every
    assert agreed_at == found_at - every
    who = f"rank {rank} differs from the others" if size > 2 else "rank 0 and rank 1 differ"
    words = rf"after step {found_at}: {who} in {re.escape(name)} by (up to [\d.e+-]+|a value that is not finite); "
    words += rf"before, they were the same after step {agreed_at}\."
    assert re.search(words, said), said


def _turned(world: World) -> int:
    tensors = _replica()
    order = list(tensors)[:: 1 - 2 * (world.rank % 2)]
    check = ReplicaCheck(world, lambda: {name: tensors[name] for name in order}, 1)
    check.check(1, 0.1)
    return check.checks


def test_the_order_in_which_a_rank_names_its_tensors_is_its_own(pool: RankPool) -> None:
    assert pool.run(3, _turned) == [1, 1, 1]


def _differing(world: World) -> list[tuple[str, tuple[int, ...], bool]]:
    tensors = {"a": torch.zeros(9), "b": torch.zeros(4), "c": torch.zeros(2, dtype=torch.int64), "d": torch.ones(0)}
    if world.rank == 1:
        tensors["b"][2] = -0.0  # another bit, the same number
        tensors["c"][0] = 5
    if world.rank == 2:
        tensors["c"][0] = 7
        tensors["a"][0] = float("nan")
    return [(each.name, each.ranks, each.gap == each.gap) for each in compare(world, tensors)]


def test_each_tensor_is_judged_by_what_most_ranks_have(pool: RankPool) -> None:
    found = pool.run(3, _differing)
    assert found == [[("a", (2,), False), ("b", (1,), True), ("c", (0, 1, 2), True)]] * 3


def _spaced(world: World) -> list[int]:
    tensors = _replica()
    check = ReplicaCheck(world, lambda: tensors, None)
    seen = []
    for step in range(1, 2000):
        if check.due(step):
            check.check(step, 0.002)
            seen.append(step)
    return seen


def test_by_default_checks_are_as_rare_as_they_are_dear(pool: RankPool) -> None:
    told = pool.run(2, _spaced)
    assert told[0] == told[1]
    assert told[0][:2] == [1, 2]  # what a check costs is known after the first
    assert len(told[0]) < 1000


def _paid(world: World) -> tuple[float, int]:
    tensors = _replica()
    times_s = count(step=0.002)  # so long does each check take
    check = ReplicaCheck(world, lambda: tensors, None, lambda: float(next(times_s)))
    due = 0
    for step in range(1, 2001):
        if check.due(step):
            check.check(step, 0.01)
            due += 1
        if step % 500 == 0:
            check.confirm(step, 0.01)  # as before a checkpoint: paid for out of the same budget
    return check.cost_s, due


def test_all_checks_together_keep_to_the_budget(pool: RankPool) -> None:
    (cost_s, due), other = pool.run(2, _paid)
    assert due == other[1]
    budget_s = SHARE * 2000 * 0.01
    assert 0.9 * budget_s < cost_s < budget_s + 2 * 0.002  # the first check, and one that a checkpoint asked for


def test_one_rank_and_no_interval_are_never_due() -> None:
    alone, off = ReplicaCheck(World.alone(), dict, 1), ReplicaCheck(World.alone(), dict, 0)
    assert not alone.due(10**9)
    assert not off.due(10**9)
    assert [(each.outcome, each.found) for each in (*alone.proof(), *off.proof())] == [
        (Check.OPEN, "one process, one set of weights"),
        (Check.OPEN, "switched off by --verify-every 0"),
    ]


def test_a_copy_on_another_device_is_compared_too() -> None:
    tensors = _replica()
    copy = {name: each.clone(memory_format=torch.contiguous_format) for name, each in tensors.items()}
    check = ReplicaCheck(World.alone(), lambda: tensors, 1, copies=lambda: [copy])
    assert check.due(1)
    check.check(1, 0.1)
    _flip(copy["model/classifier.weight"], 40)
    with pytest.raises(ProofError, match=r"rank 0's weights on cpu are not .* after step 2: they differ in model/clas"):
        check.check(2, 0.1)
    (proof,) = check.proof()
    assert (proof.outcome, proof.times) == (Check.FAILS, 2)


# ---- in the loop that trains

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


@pytest.mark.parametrize("ranks", [2, 3])
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


@pytest.mark.parametrize("name", [f"optimizer/{WEIGHT}/momentum_buffer", "model/stem.1.running_mean", f"ema/{WEIGHT}"])
def test_the_same_number_that_is_none_on_all_ranks_is_found(pool: RankPool, name: str) -> None:
    values = {"model": "resnet8", "strategy": "ddp", "verify_every": 1, "max_steps": 9, "ema": 0.9}
    told = pool.run(2, _trained, values, Fault(name, step=4, rank=None, bit=None))
    assert len({said for said, _ in told}) == 1, told
    said, (proof, *_) = told[0]
    assert re.match(
        rf"RunError: .* after step 4 are not finite numbers \({re.escape(name)}\), though the loss was", said
    )
    assert proof.outcome == Check.FAILS
    one, other = (said for said, _ in pool.run(2, _trained, values, Fault(name, step=4, rank=1, bit=None)))
    assert one == other
    assert f"ProofError: The replicas are not the same bits after step 4: rank 0 and rank 1 differ in {name}" in one
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
        (proof,) = told[0][1]
        if ranks > 1:
            assert proof.outcome == Check.HOLDS
            assert proof.found == f"compared first after step 1 and last after step {steps}; every step on average"
        else:
            assert (proof.outcome, proof.found) == (Check.OPEN, "one process, one set of weights")
        times += proof.times
    assert times == (1000 if KINDS[strategy].has_ranks else 0)


# ---- numbers that are no fault


def _large(world: World) -> int:
    tensors = _replica()
    tensors["model/classifier.bias"][3] = 1e30  # its square is not finite
    check = ReplicaCheck(world, lambda: tensors, 1)
    for step in (1, 2):
        check.check(step, 0.1)
    return check.checks


def test_large_numbers_are_finite(pool: RankPool) -> None:
    assert pool.run(2, _large) == [2, 2]


def _known_better(world: World) -> str:
    tensors = {"model/weight": torch.tensor([math.inf])}

    def remedy() -> str:
        raise RunError("It was the loss.")

    with pytest.raises(RunError) as error:
        ReplicaCheck(world, lambda: tensors, 1, remedy=remedy).check(1, 0.1)
    return str(error.value)


def test_a_caller_that_knows_a_better_error_raises_it(pool: RankPool) -> None:
    assert pool.run(2, _known_better) == ["It was the loss."] * 2


# ---- buffers that each rank keeps for itself


def _kept_apart(world: World) -> tuple[list[list[Check]], dict[str, list[float]]]:
    values = TRAINED | {"model": "resnet8", "strategy": "ddp", "batchnorm": "local"}
    job = assemble(override(RunConfig(), **values), world)
    meter = Meter(world, Nothing(), log_every=100, total_steps=job.total_steps)
    local = {f"model/{name}": each for name, each in job.model.named_buffers() if each.is_floating_point()}
    local["model/mask"] = torch.tensor([0.0, -math.inf])
    check = ReplicaCheck(world, job.replicated, 1, local=lambda: local)
    proofs = [check.proof()]
    check.confirm(0, 0.1)
    proofs.append(check.proof())
    for step, batch in zip(range(3), job.batches(0), strict=False):
        engine.advance(job, step, batch, meter)
    check.check(3, 0.1)  # what was compared is not compared again; the buffers are measured all the same
    check.confirm(3, 0.1)
    check.confirm(3, 0.1)
    proofs.append(check.proof())
    return proofs, {name: each.tolist() for name, each in local.items()}


def test_local_buffers_are_measured_and_not_judged(pool: RankPool) -> None:
    told = pool.run(3, _kept_apart)
    values = [own for _, own in told]
    gaps = {
        name: max(abs(a - b) for theirs in values[1:] for a, b in zip(theirs[name], own, strict=True))
        for name, own in values[0].items()
        if name != "model/mask"
    }
    name = max(gaps, key=lambda each: gaps[each])
    statistics = len(gaps)
    before, same, after = told[0][0]
    are = f"{statistics} BatchNorm statistics and 1 other buffer are each rank's own (local)"
    use = "; an evaluation uses rank 0's"
    assert [(each.name, each.outcome, each.times) for each in before] == [
        ("replicas", Check.OPEN, 0),
        ("buffers", Check.OPEN, 0),
    ]
    assert before[1].found == are + use
    assert (same[1].found, same[1].times) == (f"{are}, and the same on all{use}", 1)
    assert (after[1].outcome, after[1].times) == (Check.HOLDS, 2)
    assert after[1].found == f"{are}, and differ by up to {gaps[name]:.3g} ({name}){use}"
    assert (after[0].outcome, after[0].times) == (Check.HOLDS, 2)


def test_a_run_with_local_statistics_tells_how_far_they_lie_apart(pool: RankPool) -> None:
    values = {"model": "resnet8", "strategy": "ddp", "batchnorm": "local", "verify_every": 4, "max_steps": 9}
    said, (replicas, buffers) = pool.run(2, _trained, values)[0]
    assert not said
    assert (replicas.outcome, replicas.times) == (Check.HOLDS, 3)
    assert (buffers.outcome, buffers.times) == (Check.HOLDS, 1), "before the evaluation"
    apart = re.fullmatch(
        r"\d+ BatchNorm statistics are each rank's own \(local\), and differ by up to (\S+) \(model/\S+\.running_\w+\)"
        "; an evaluation uses rank 0's",
        buffers.found,
    )
    assert apart, buffers.found
    assert 0 < float(apart[1]) < math.inf


def _spread(world: World) -> dict[str, float]:
    half = torch.full((2, 3), 1.5, dtype=torch.float16)
    mask, hole = torch.tensor([-math.inf, 0.0, float(world.rank)]), torch.tensor([math.nan, 0.0])
    if world.rank == 2:
        half[1, 2] = -2
        hole[1] = math.inf
    return spread(world, {"same": torch.ones(4), "half": half, "mask": mask, "hole": hole, "none": torch.ones(0)})


def test_the_spread_is_that_of_the_rank_farthest_from_rank_0(pool: RankPool) -> None:
    assert pool.run(3, _spread) == [{"half": 3.5, "mask": 2.0, "hole": math.inf}] * 3

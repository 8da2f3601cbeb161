"""Replicas that are the same bits pass at every check; one bit on one rank is found within K steps, told by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from lockstep.models import table
from lockstep.options import override
from lockstep.precision import Precision
from lockstep.proof import Check, from_json
from lockstep.verify.digest import compare, spread
from lockstep.verify.replicas import SHARE, ReplicaCheck
from lockstep.world import World

from .. import curves
from ..pool import RankPool

Tensors = dict[str, Tensor]
MOMENT = "optimizer/classifier.weight/momentum_buffer"


def _replica() -> Tensors:
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


def _flip_one(on: int, name: str, bit: int, tensors: Tensors, rank: int) -> None:
    if rank == on:
        _flip(tensors[name], bit)


def _each_its_own(tensors: Tensors, rank: int) -> None:
    if rank:
        tensors[("model/stem.0.weight", "model/classifier.bias")[rank - 1]][0] += rank


def _all_bits_set(tensors: Tensors, rank: int) -> None:
    if rank == 1:
        tensors[MOMENT].view(torch.int32).fill_(-1)


def _large(tensors: Tensors, rank: int) -> None:
    tensors["model/classifier.bias"][3] = 1e30  # its square is not finite


def _in_another_order(tensors: Tensors, rank: int) -> None:
    for name in list(tensors)[:: -1 if rank == 1 else 1]:
        tensors[name] = tensors.pop(name)


def _checked(
    world: World, change: Callable[[Tensors, int], None], every: int | None
) -> tuple[str, int | None, int | None]:
    """Change something after the third of seven steps; return what the check says, when it last agreed, and when."""
    tensors = _replica()
    check = ReplicaCheck(world, lambda: tensors, every)
    for step in range(1, 8):
        for each in tensors.values():
            each.add_(0.125)
        if step == 4:
            change(tensors, world.rank)
        if check.due(step):
            try:
                check.check(step, 0.1)
            except ProofError as error:
                return str(error), check.agreed_at, step
    return "", check.agreed_at, None


@pytest.mark.parametrize(
    ("size", "change", "told"),
    [
        (3, partial(_flip_one, 0, "model/classifier.bias", 319), "rank 0 differs from the others in {}classifier.bias"),
        (2, partial(_flip_one, 1, MOMENT, 5), f"rank 0 and rank 1 differ in {MOMENT} by #"),
        (
            3,
            _each_its_own,
            "rank 2 differs from the others in {}classifier.bias by up to 2; "
            "rank 1 differs from the others in {}stem.0.weight by up to 1; ",
        ),
        (3, _all_bits_set, f"rank 1 differs from the others in {MOMENT} by a value that is not finite; "),
        (2, _large, None),
        (3, _in_another_order, None),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_what_differs_is_told_with_its_rank(
    pool: RankPool, size: int, change: Callable[[Tensors, int], None], told: str | None, every: int
) -> None:
    (found, *others) = pool.run(size, _checked, change, every)
    assert others == [found] * (size - 1)
    said, agreed_at, found_at = found
    if told is None:
        assert (said, agreed_at, found_at) == ("", 7 if every == 1 else 6, None)
    else:
        assert found_at == (4 if every == 1 else 6)
        assert agreed_at == found_at - every
        words = re.escape(told.replace("{}", "model/")).replace(r"\#", r"up to [\d.e+-]+")
        assert re.search(rf"after step {found_at}: {words}.*the same after step {agreed_at}\.", said), said


def _compared(world: World) -> tuple[object, ...]:
    tensors = {"a": torch.zeros(9), "b": torch.zeros(4), "c": torch.zeros(2, dtype=torch.int64), "d": torch.ones(0)}
    if world.rank == 1:
        tensors["b"][2] = -0.0  # another bit, the same number
        tensors["c"][0] = 5
    if world.rank == 2:
        tensors["c"][0] = 7
        tensors["a"][0] = float("nan")
    lacking = dict.fromkeys(("b", "a") if world.rank else ("a",), torch.ones(3))
    half = torch.full((2, 3), 1.5, dtype=torch.float16)
    mask, hole = torch.tensor([-math.inf, 0.0, float(world.rank)]), torch.tensor([math.nan, 0.0])
    if world.rank == 2:
        half[1, 2] = -2
        hole[1] = math.inf
    return (
        [(each.name, each.ranks, each.gap == each.gap) for each in compare(world, tensors)],
        [(each.name, each.ranks, each.gap) for each in compare(world, lacking)],
        spread(world, {"same": torch.ones(4), "half": half, "mask": mask, "hole": hole, "none": torch.ones(0)}),
    )


def test_tensors_are_judged_by_what_most_ranks_have_and_the_farthest_from_rank_0_is_told(pool: RankPool) -> None:
    for differ, lack, apart in pool.run(3, _compared):
        assert differ == [("a", (2,), False), ("c", (0, 1, 2), True), ("b", (1,), True)]
        assert lack == [("b", (0,), None)]
        assert apart == {"half": 3.5, "mask": 2.0, "hole": math.inf}


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


def test_a_copy_whose_difference_one_turn_does_not_see_is_named_by_the_next() -> None:
    own = torch.randn(31, 1025, dtype=torch.float64)
    copy = own[[1, 0, *range(2, 31)]]  # rows as long as a layer is deep
    check = ReplicaCheck(World.alone(), lambda: {"a": own}, 1, copies=lambda: [{"a": copy}])
    check.check(1, 0.1)
    with pytest.raises(ProofError, match=r"are not the same bits as its own after step 2: they differ in a by up to"):
        check.check(2, 0.1)


def _local(world: World) -> list[Check]:
    mean, mask = torch.ones(4), torch.tensor([0.0, -math.inf])
    local = {"model/norm.running_mean": mean, "model/mask": mask}
    check = ReplicaCheck(world, lambda: {"a": torch.ones(3)}, 1, local=lambda: local)
    proofs = check.proof()
    for step in (1, 1, 2):  # what was compared or measured is not again
        mean[2] += (step - 1) * world.rank
        check.confirm(step, 0.1)
        proofs += check.proof()
    return proofs


def test_buffers_that_each_rank_keeps_for_itself_are_measured_and_not_judged(pool: RankPool) -> None:
    for replicas, buffers, _, same, _, again, compared, apart in pool.run(3, _local):
        assert [(each.name, each.outcome) for each in (replicas, buffers)] == [
            ("replicas", Check.OPEN),
            ("buffers", Check.OPEN),
        ]
        assert "1 BatchNorm statistic and 1 other buffer are each rank's own (local)" in buffers.found
        assert ", and the same on all" in same.found
        assert (same.times, again.times, apart.times, compared.times) == (1, 1, 2, 2)
        assert (apart.outcome, compared.outcome) == (Check.MEASURED, Check.HOLDS)
        assert ", and differ by up to 2 (model/norm.running_mean); an evaluation uses rank 0's" in apart.found


# ---- in the loop that trains

TRAINED = {"data": "digits", "batch": 24, "lr": 0.05, "precision": "fp32", "epochs": 1000, "clip": None, "max_steps": 9}
WEIGHT = "classifier.weight"


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one step, on one rank or on all (None)."""

    name: str
    """As in a `State`; gradient/NAME for a parameter's gradient, after the exchange."""
    rank: int | None = 1
    bit: int | None = None
    """Which one flips, in the largest element; None to make that element no number at all."""
    step: int = 4

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
        (f"gradient/{WEIGHT}", 4, 3, {}),
        ("model/stem.0.weight", 2, 1, {}),
        (f"optimizer/{WEIGHT}/momentum_buffer", 2, 3, {}),
        (f"optimizer/{WEIGHT}/exp_avg_sq", 3, 3, {"optimizer": "adamw", "lr": 1e-3}),
        (f"ema/{WEIGHT}", 4, 1, {"ema": 0.9}),
        ("model/stem.1.running_var", 3, 1, {"batchnorm": "sync"}),
    ],
)
def test_one_bit_that_flips_while_training_is_found(
    pool: RankPool, name: str, ranks: int, every: int, options: dict[str, Any]
) -> None:
    said, (proof, *_) = _trained(pool, ranks, Fault(name, bit=18), verify_every=every, **options)
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
    assert (proof.outcome, proof.times) == (Check.FAILS, found_at // every)
    assert f"ProofError: {proof.found}." == said


@pytest.mark.parametrize(
    ("name", "every", "bit"),
    [
        ("model/stem.0.weight", 1, 30),
        ("model/stem.0.weight", 3, None),
        (f"optimizer/{WEIGHT}/momentum_buffer", 3, None),
        (f"ema/{WEIGHT}", 1, None),
    ],
)
def test_a_replica_that_ruins_the_others_is_never_said_to_hold(
    pool: RankPool, name: str, every: int, bit: int | None
) -> None:
    said, (proof, *_) = _trained(pool, 3, Fault(name, bit=bit), verify_every=every, ema=0.9)
    if every == 1:
        assert said.startswith("ProofError: The replicas are not the same bits after step 4: rank 1 differs"), said
        assert f" {name} by " in said
        assert proof.outcome == Check.FAILS
    else:  # before the next comparison, all are alike again: none of them is a number
        assert said.startswith("RunError: The loss at step "), said
        assert "--verify-every 1 tells, from a checkpoint of before." in said
        assert proof.outcome == Check.OPEN


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
    said, (proof, *_) = _trained(pool, 2, Fault(name, rank=None), verify_every=1, ema=0.9)
    named = rf"RunError: .* after step 4 are not finite numbers \([^)]*\b{re.escape(name)}\), though the loss was"
    assert re.match(named, said), said
    assert proof.outcome == Check.FAILS


def test_a_loss_that_is_none_is_told_before_the_weights_that_it_ruins(pool: RankPool) -> None:
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


CLEAN: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (2, 45, {"model": "mlp"}),
    (3, 20, {"model": "mlp", "optimizer": "adamw", "lr": 1e-3, "accumulate": 2, "clip": 1.0}),
    (2, 10, {"model": "resnet8", "ema": 0.9, "augment": ["crop", "flip"]}),
)
"""Replicas, steps and options."""


@pytest.mark.parametrize("strategy", KINDS)
def test_clean_checks_raise_no_alarm(pool: RankPool, strategy: str) -> None:
    for replicas, steps, options in CLEAN:
        ranks, how = curves.spread(strategy, replicas)
        steps = steps if ranks > 1 else 3
        said, (proof, *others) = _trained(pool, ranks, **how | options | {"verify_every": 1, "max_steps": steps})
        assert not said
        found = Check.MEASURED if ranks > 1 else Check.OPEN  # dp's, of each replica, lie in one process
        assert all(each.name == "buffers" and each.outcome == found for each in others)
        if ranks > 1:
            assert (proof.outcome, proof.times) == (Check.HOLDS, steps)
            assert proof.found == f"compared first after step 1 and last after step {steps}; every step on average"
        else:
            assert (proof.outcome, proof.times) == (Check.OPEN, 0)
            assert proof.found == "one process, one set of weights"


def test_a_run_with_local_statistics_tells_how_far_they_lie_apart(pool: RankPool) -> None:
    said, (replicas, buffers) = _trained(pool, 2, batchnorm="local", verify_every=4)
    assert not said
    assert (replicas.outcome, replicas.times) == (Check.HOLDS, 3)
    assert (buffers.outcome, buffers.times) == (Check.MEASURED, 1), "before the evaluation"
    apart = re.search(r"differ by up to (\S+) \(model/\S+\.running_\w+\); an evaluation uses rank 0's", buffers.found)
    assert apart, buffers.found
    assert 0 < float(apart[1]) < math.inf

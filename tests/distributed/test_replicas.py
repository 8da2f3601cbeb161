"""Replicas that are the same bits pass, at every check; one bit on one rank is found, and told by name."""

from __future__ import annotations

import math
import re
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from lockstep import engine
from lockstep.config import RunConfig
from lockstep.errors import ProofError, RunError
from lockstep.job import assemble
from lockstep.meter import Meter
from lockstep.models import table
from lockstep.options import override
from lockstep.proof import Check
from lockstep.record.base import Nothing
from lockstep.verify.digest import compare, spread
from lockstep.verify.replicas import SHARE, ReplicaCheck
from lockstep.world import World

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
    assert found == [[("a", (2,), False), ("c", (0, 1, 2), True), ("b", (1,), True)]] * 3


def _lacking(world: World) -> list[tuple[str, tuple[int, ...], float | None]]:
    names = ("b", "a") if world.rank else ("a",)
    return [(each.name, each.ranks, each.gap) for each in compare(world, dict.fromkeys(names, torch.ones(3)))]


def test_a_tensor_that_a_rank_lacks_is_named(pool: RankPool) -> None:
    assert pool.run(3, _lacking) == [[("b", (0,), None)]] * 3


def _apart(world: World, kind: str) -> str:
    tensors = {"a": torch.zeros(40, 40), "b": torch.ones(3)}
    if kind == "each its own" and world.rank:
        tensors["ab"[world.rank - 1]][0] = world.rank
    if kind == "all bits set" and world.rank == 1:
        tensors["a"].view(torch.int32).fill_(-1)
    try:
        ReplicaCheck(world, lambda: tensors, 1).check(1, 0.1)
    except ProofError as error:
        return str(error)
    return ""


def test_each_rank_is_named_with_what_differs_there(pool: RankPool) -> None:
    for said in pool.run(3, _apart, "each its own"):
        assert (
            "rank 1 differs from the others in a by up to 1; rank 2 differs from the others in b by up to 1; " in said
        )


def test_memory_that_reads_as_ones_is_seen(pool: RankPool) -> None:
    for said in pool.run(3, _apart, "all bits set"):
        assert "rank 1 differs from the others in a by a value that is not finite; " in said


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


def test_a_copy_whose_difference_one_turn_does_not_see_is_named_by_the_next() -> None:
    own = torch.randn(31, 1025, dtype=torch.float64)
    copy = own[[1, 0, *range(2, 31)]]  # rows as long as a layer is deep
    check = ReplicaCheck(World.alone(), lambda: {"a": own}, 1, copies=lambda: [{"a": copy}])
    check.check(1, 0.1)
    with pytest.raises(ProofError, match=r"are not the same bits as its own after step 2: they differ in a by up to"):
        check.check(2, 0.1)


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
    values = {"model": "resnet8", "strategy": "ddp", "batchnorm": "local", "data": "digits", "batch": 24}
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
    assert (after[1].outcome, after[1].times) == (Check.MEASURED, 2)
    assert after[1].found == f"{are}, and differ by up to {gaps[name]:.3g} ({name}){use}"
    assert (after[0].outcome, after[0].times) == (Check.HOLDS, 2)


def _spread(world: World) -> dict[str, float]:
    half = torch.full((2, 3), 1.5, dtype=torch.float16)
    mask, hole = torch.tensor([-math.inf, 0.0, float(world.rank)]), torch.tensor([math.nan, 0.0])
    if world.rank == 2:
        half[1, 2] = -2
        hole[1] = math.inf
    return spread(world, {"same": torch.ones(4), "half": half, "mask": mask, "hole": hole, "none": torch.ones(0)})


def test_the_spread_is_that_of_the_rank_farthest_from_rank_0(pool: RankPool) -> None:
    assert pool.run(3, _spread) == [{"half": 3.5, "mask": 2.0, "hole": math.inf}] * 3

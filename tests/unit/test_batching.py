"""The batch plan: each position once, evenly, and the model's part of it independent of the world."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.batching import BatchPlan
from lockstep.errors import RequestError

sizes = st.integers(1, 300)


@st.composite
def plans(draw: st.DrawFn, most_devices: int = 4) -> BatchPlan:
    ranks, devices = draw(st.integers(1, 9)), draw(st.integers(1, most_devices))
    fewest = (ranks - 1) * devices + 1
    size = draw(st.integers(fewest, 300))
    return BatchPlan.solve(size, ranks, accumulation=draw(st.integers(1, size // fewest)), devices=devices)


def _positions(plan: BatchPlan, start: int, stop: int) -> list[list[list[int]]]:
    """Return the positions by micro-batch and rank."""
    by_rank = [plan.split(start, stop, rank) for rank in range(plan.ranks)]
    return [[list(range(share.start, share.stop)) for share in micro] for micro in zip(*by_rank, strict=True)]


def _of_devices(count: int, devices: int) -> list[int]:
    """Return how many of a rank's `count` samples each of its devices takes, as the strategies split them."""
    return [len(part) for part in torch.arange(count).tensor_split(devices)]


@given(plans(), sizes, st.booleans())
def test_each_position_is_computed_exactly_once(plan: BatchPlan, samples: int, drop_last: bool) -> None:
    batches = [plan.batch(step, samples) for step in range(plan.steps(samples, drop_last=drop_last))]
    seen = [at for batch in batches for micro in _positions(plan, *batch) for share in micro for at in share]
    assert seen == list(range(samples // plan.global_size * plan.global_size if drop_last else samples))


@given(plans(), sizes)
def test_shares_are_even_and_as_many_on_every_rank(plan: BatchPlan, count: int) -> None:
    count = min(count, plan.global_size)
    shares = [plan.split(1000, 1000 + count, rank) for rank in range(plan.ranks)]
    assert len({len(own) for own in shares}) == 1
    for micro in zip(*shares, strict=True):
        held = [size for share in micro for size in _of_devices(len(share), plan.devices)]
        assert max(held) - min(held) <= 1
    micros = [sum(len(share) for share in micro) for micro in zip(*shares, strict=True)]
    assert max(micros) - min(micros) <= 1
    assert min(micros) >= 1  # whoever has no sample is a rank, never a whole micro-batch


@given(plans(), sizes)
def test_a_device_has_what_it_would_have_as_a_rank(plan: BatchPlan, count: int) -> None:
    count = min(count, plan.global_size)
    apart = dataclasses.replace(plan, ranks=plan.ranks * plan.devices, devices=1)
    for micro, alone in zip(_positions(plan, 0, count), _positions(apart, 0, count), strict=True):
        held = [part for share in micro for part in _parts(share, plan.devices)]
        assert held == alone


def _parts(share: list[int], devices: int) -> list[list[int]]:
    ends = np.cumsum(_of_devices(len(share), devices))
    return [share[start:end] for start, end in pairwise([0, *ends])]


@given(plans(), st.integers(1, 9), sizes)
def test_global_micro_batches_do_not_depend_on_the_world(plan: BatchPlan, ranks: int, count: int) -> None:
    other = BatchPlan(global_size=plan.global_size, ranks=ranks, accumulation=plan.accumulation)
    count = min(count, plan.global_size)

    def joined(each: BatchPlan) -> list[list[int]]:
        return [[at for share in micro for at in share] for micro in _positions(each, 0, count)]

    assert joined(plan) == joined(other)


@given(plans(), st.integers(1, 40))
def test_a_micro_size_is_kept_to_with_the_fewest_micro_batches(plan: BatchPlan, micro: int) -> None:
    try:
        found = BatchPlan.solve(plan.global_size, plan.ranks, micro_size=micro, devices=plan.devices)
    except RequestError:
        assert micro < max(2, plan.devices * plan.ranks)  # the parts of one such micro-batch leave a rank without
        return
    assert found.largest_share <= micro
    assert max(len(share) for rank in range(found.ranks) for share in found.split(0, found.global_size, rank)) <= micro
    if found.accumulation > 1:
        fewer = dataclasses.replace(found, accumulation=found.accumulation - 1)
        assert max(len(share) for share in fewer.split(0, fewer.global_size, 0)) > micro


def test_the_plan_in_a_line() -> None:
    plans_by_line = {
        "global batch 10 = 4 ranks × 1 micro-batch × 2 or 3": BatchPlan.solve(10, 4),
        "global batch 7 = 1 rank × 1 micro-batch × 7": BatchPlan.solve(7, 1),
        "global batch 256 = 2 ranks × 3 devices × 2 micro-batches × 21 or 22": BatchPlan.solve(
            256, 2, accumulation=2, devices=3
        ),
    }
    assert [str(plan) for plan in plans_by_line.values()] == [*plans_by_line]


def test_a_batch_that_leaves_ranks_without_work_is_refused() -> None:
    with pytest.raises(RequestError, match="use --batch 3 or more, or at most 2 ranks"):
        BatchPlan.solve(2, 3)
    with pytest.raises(RequestError, match="use --accumulate 3 or less, or --batch 12 or more"):
        BatchPlan.solve(10, 3, accumulation=4)
    with pytest.raises(RequestError, match=r"; use --batch 8 or 12, or --micro-batch 2 or more\.$"):
        BatchPlan.solve(10, 4, micro_size=1)
    assert [len(BatchPlan.solve(3, 2, devices=2).split(0, 3, rank)[0]) for rank in range(2)] == [2, 1]
    with pytest.raises(RequestError, match=r"into 2 ranks of 2 devices: .* use --batch 3 or more, or at most 1 "):
        BatchPlan.solve(2, 2, devices=2)
    with pytest.raises(RequestError, match=r"on 2 ranks of 3 devices: .* use --micro-batch 3 or more"):
        BatchPlan.solve(10, 2, micro_size=2, devices=3)


@given(plans(), st.integers(1, 40))
def test_what_is_advised_for_a_micro_size_works(plan: BatchPlan, micro: int) -> None:
    ranks, devices = plan.ranks, plan.devices
    try:
        BatchPlan.solve(plan.global_size, ranks, micro_size=micro, devices=devices)
    except RequestError as error:
        advice = str(error).partition("; use ")[2]
        *batches, larger = [int(word.strip(",")) for word in advice.split() if word[0].isdigit()]
        assert len(batches) == (2 if "--batch" in advice else 0)
        assert batches or devices > 1
        for size in batches:
            BatchPlan.solve(size, ranks, micro_size=micro, devices=devices)
        if batches:
            assert batches[0] < plan.global_size < batches[1]
        BatchPlan.solve(plan.global_size, ranks, micro_size=larger, devices=devices)
        with pytest.raises(RequestError):
            BatchPlan.solve(plan.global_size, ranks, micro_size=larger - 1, devices=devices)


@given(plans(), sizes, st.booleans())
def test_it_is_known_whether_a_share_is_empty(plan: BatchPlan, samples: int, drop_last: bool) -> None:
    batches = [plan.batch(step, samples) for step in range(plan.steps(samples, drop_last=drop_last))]
    shares = [share for batch in batches for rank in range(plan.ranks) for share in plan.split(*batch, rank)]
    assert plan.leaves_ranks_empty(samples, drop_last=drop_last) == any(len(share) == 0 for share in shares)

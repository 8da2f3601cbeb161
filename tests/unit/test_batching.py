"""The batch plan: each position once, evenly, and the model's part of it independent of the world."""

from __future__ import annotations

import dataclasses
from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.batching import BatchPlan
from lockstep.errors import RequestError

sizes = st.integers(1, 300)


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    ranks, devices = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    parts = ranks * devices
    size = draw(st.integers(parts, 300))
    return BatchPlan.solve(size, ranks, accumulation=draw(st.integers(1, size // parts)), devices=devices)


def _positions(plan: BatchPlan, start: int, stop: int) -> list[list[list[int]]]:
    """Return the positions by micro-batch and rank, of which all have as many shares."""
    by_rank = [plan.split(start, stop, rank) for rank in range(plan.ranks)]
    return [[list(range(share.start, share.stop)) for share in micro] for micro in zip(*by_rank, strict=True)]


@given(plans(), sizes, st.booleans())
def test_each_position_is_computed_exactly_once(plan: BatchPlan, samples: int, drop_last: bool) -> None:
    batches = [plan.batch(step, samples) for step in range(plan.steps(samples, drop_last=drop_last))]
    shares = [share for batch in batches for micro in _positions(plan, *batch) for share in micro]
    computed = samples // plan.global_size * plan.global_size if drop_last else samples
    assert [*chain(*shares)] == list(range(computed))
    for rank in range(plan.ranks):
        mine = [(share, begin) for begin, stop in batches for share in plan.split(begin, stop, rank)]
        told = plan.shares(samples, rank, drop_last=drop_last)
        for (share, begin), (start, stop, size, *_) in zip(mine, told, strict=True):
            assert size == len(share)
            assert range(start, stop) == (share or range(begin, begin + 1)), "the batch's first one stands in"


@given(plans(), sizes, st.integers(1, 9))
def test_shares_are_even_and_micro_batches_those_of_any_world(plan: BatchPlan, count: int, ranks: int) -> None:
    stop = 1000 + min(count, plan.global_size)
    found = _positions(plan, 1000, stop)
    apart = _positions(dataclasses.replace(plan, ranks=plan.ranks * plan.devices, devices=1), 1000, stop)
    for ours, theirs in zip(found, apart, strict=True):  # a device has what it would have as a rank
        # as the strategies cut a rank's share
        assert [part.tolist() for share in ours for part in torch.tensor(share).tensor_split(plan.devices)] == theirs
        held = [len(share) for share in theirs]
        assert max(held) - min(held) <= 1
    whole = [[*chain(*micro)] for micro in found]
    held = [len(micro) for micro in whole]
    assert max(held) - min(held) <= 1 <= min(held)  # whoever has no sample is a rank, never a whole micro-batch
    other = _positions(dataclasses.replace(plan, ranks=ranks, devices=1), 1000, stop)
    assert [[*chain(*micro)] for micro in other] == whole


@given(plans(), st.integers(1, 40))
def test_a_micro_size_is_kept_to_with_the_fewest_micro_batches(plan: BatchPlan, micro: int) -> None:
    """Or refused, where a device would be without a sample: not those of two or more."""

    def largest(plan: BatchPlan) -> int:
        return max(len(share) for rank in range(plan.ranks) for share in plan.split(0, plan.global_size, rank))

    try:
        found = BatchPlan.solve(plan.global_size, plan.ranks, micro_size=micro, devices=plan.devices)
    except RequestError:
        assert micro < 2 * plan.devices
        return
    assert largest(found) == found.largest_share <= micro
    if found.accumulation > 1:
        assert largest(dataclasses.replace(found, accumulation=found.accumulation - 1)) > micro

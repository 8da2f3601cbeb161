"""The batch plan: each position once, evenly, and the model's part of it independent of the world."""

from __future__ import annotations

import dataclasses
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.batching import BatchPlan
from lockstep.errors import RequestError

sizes = st.integers(1, 300)


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    ranks, devices = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    fewest = (ranks - 1) * devices + 1
    size = draw(st.integers(fewest, 300))
    return BatchPlan.solve(size, ranks, accumulation=draw(st.integers(1, size // fewest)), devices=devices)


def _positions(plan: BatchPlan, start: int, stop: int) -> list[list[list[int]]]:
    """Return the positions by micro-batch and rank, of which all have as many shares."""
    by_rank = [plan.split(start, stop, rank) for rank in range(plan.ranks)]
    return [[list(range(share.start, share.stop)) for share in micro] for micro in zip(*by_rank, strict=True)]


@given(plans(), sizes, st.booleans())
def test_each_position_is_computed_exactly_once(plan: BatchPlan, samples: int, drop_last: bool) -> None:
    batches = [plan.batch(step, samples) for step in range(plan.steps(samples, drop_last=drop_last))]
    shares = [share for batch in batches for micro in _positions(plan, *batch) for share in micro]
    computed = samples // plan.global_size * plan.global_size if drop_last else samples
    assert [at for share in shares for at in share] == list(range(computed))
    assert plan.leaves_ranks_empty(samples, drop_last=drop_last) == (not all(shares))


@given(plans(), sizes)
def test_shares_are_even_and_a_device_has_what_it_would_have_as_a_rank(plan: BatchPlan, count: int) -> None:
    count = min(count, plan.global_size)
    apart = dataclasses.replace(plan, ranks=plan.ranks * plan.devices, devices=1)
    micros = _positions(apart, 1000, 1000 + count)
    for ours, theirs in zip(_positions(plan, 1000, 1000 + count), micros, strict=True):
        # as the strategies cut a rank's share
        assert [part.tolist() for share in ours for part in torch.tensor(share).tensor_split(plan.devices)] == theirs
        held = [len(share) for share in theirs]
        assert max(held) - min(held) <= 1
    held = [sum(map(len, micro)) for micro in micros]
    assert max(held) - min(held) <= 1
    assert min(held) >= 1  # whoever has no sample is a rank, never a whole micro-batch


@given(plans(), st.integers(1, 9), sizes)
def test_global_micro_batches_do_not_depend_on_the_world(plan: BatchPlan, ranks: int, count: int) -> None:
    other = BatchPlan(global_size=plan.global_size, ranks=ranks, accumulation=plan.accumulation)
    ours, theirs = (_positions(each, 0, min(count, plan.global_size)) for each in (plan, other))
    assert [[*chain(*micro)] for micro in ours] == [[*chain(*micro)] for micro in theirs]


@given(plans(), st.integers(1, 40))
def test_a_micro_size_is_kept_to_with_the_fewest_micro_batches(plan: BatchPlan, micro: int) -> None:
    """Or refused, and then what is advised works, and nothing less."""

    def solve(batch: int, micro: int) -> BatchPlan:
        return BatchPlan.solve(batch, plan.ranks, micro_size=micro, devices=plan.devices)

    def largest(plan: BatchPlan) -> int:
        return max(len(share) for rank in range(plan.ranks) for share in plan.split(0, plan.global_size, rank))

    try:
        found = solve(plan.global_size, micro)
    except RequestError as error:
        assert micro < max(2, plan.devices * plan.ranks)  # the parts of one such micro-batch leave a rank without
        advice = str(error).partition("; use ")[2]
        *batches, larger = [int(word.strip(",")) for word in advice.split() if word[0].isdigit()]
        assert (len(batches) == 2) == ("--batch" in advice)
        assert batches or plan.devices > 1
        for size in batches:
            solve(size, micro)
        assert not batches or batches[0] < plan.global_size < batches[1]
        solve(plan.global_size, larger)
        with pytest.raises(RequestError):
            solve(plan.global_size, larger - 1)
        return
    assert largest(found) == found.largest_share <= micro
    if found.accumulation > 1:
        assert largest(dataclasses.replace(found, accumulation=found.accumulation - 1)) > micro


def test_the_plan_in_a_line() -> None:
    assert str(BatchPlan.solve(10, 4)) == "global batch 10 = 4 ranks × 1 micro-batch × 2 or 3"
    plan = BatchPlan.solve(256, 2, accumulation=2, devices=3)
    assert str(plan) == "global batch 256 = 2 ranks × 3 devices × 2 micro-batches × 21 or 22"


@pytest.mark.parametrize(
    ("batch", "ranks", "asked", "advice"),
    [
        (2, 3, {}, "--batch 3 or more, or at most 2 ranks"),
        (10, 3, {"accumulation": 4}, "--accumulate 3 or less, or --batch 12 or more"),
        (2, 2, {"devices": 2}, "--batch 3 or more, or at most 1 rank of 2 devices"),
    ],
)
def test_a_batch_that_leaves_ranks_without_work_is_refused(
    batch: int, ranks: int, asked: dict[str, int], advice: str
) -> None:
    with pytest.raises(RequestError, match=advice):
        BatchPlan.solve(batch, ranks, **asked)

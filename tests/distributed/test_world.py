"""The world's methods on one, two and three ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.errors import RequestError
from lockstep.world import World

from ..pool import RankPool


def _talk(world: World) -> Any:
    summed = world.sum(torch.tensor([1.0, float(world.rank)]))
    most = world.max(torch.tensor(world.rank))
    shared = torch.full((3,), float(world.rank) + 5)
    world.broadcast([shared])
    gathered = world.gather({"rank": world.rank, "text": "é" * world.rank})
    world.barrier()
    return summed.tolist(), int(most), shared.tolist(), gathered


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_hears_the_same(pool: RankPool, size: int) -> None:
    answers = pool.run(size, _talk)
    expected = (
        [float(size), float(sum(range(size)))],
        size - 1,
        [5.0] * 3,
        [{"rank": rank, "text": "é" * rank} for rank in range(size)],
    )
    assert answers == [expected] * size


def _attempt(world: World, refusing: list[int]) -> Any:
    def attempt() -> int:
        if world.rank in refusing:
            raise RequestError(f"Rank {world.rank} has no file.")
        return world.rank * 10

    try:
        answer: Any = world.together(attempt)
    except RequestError as error:
        answer = str(error)
    return answer, int(world.sum(torch.tensor(1)))  # and afterwards they still talk


@pytest.mark.parametrize("size", [1, 3])
def test_an_attempt_succeeds_on_all_ranks_or_is_refused_on_all(pool: RankPool, size: int) -> None:
    assert pool.run(size, _attempt, []) == [(rank * 10, size) for rank in range(size)]
    assert pool.run(size, _attempt, [size - 1]) == [(f"Rank {size - 1} has no file.", size)] * size
    assert pool.run(size, _attempt, list(range(size))) == [("Rank 0 has no file.", size)] * size


def test_a_bug_in_an_attempt_is_no_refusal() -> None:
    def attempt() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        World.alone().together(attempt)

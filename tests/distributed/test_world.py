"""The world's methods on one, two and three ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.world import World

from ..pool import RankPool


def _talk(world: World) -> Any:
    summed = world.sum(torch.tensor([1.0, float(world.rank)]))
    most = world.max(torch.tensor(world.rank))
    shared = torch.full((3,), float(world.rank) + 5)
    world.broadcast([shared])
    gathered = world.gather({"rank": world.rank, "text": "é" * world.rank})
    with world.local_main_first():
        pass
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

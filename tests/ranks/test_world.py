"""The world's methods on one and three ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.world.world import World

from ..pool import RankPool


def _talk(world: World) -> Any:
    with torch.inference_mode():  # what is kept for the next exchange of this size can be written to outside of it
        for _ in range(2):
            world.sum(torch.zeros(2))
    shared = torch.full((3,), float(world.rank) + 5)
    transposed, expanded = torch.full((2, 3), float(world.rank)).t(), torch.full((2, 1), world.rank + 1).expand(2, 4)
    world.broadcast([shared, transposed, expanded])
    assert transposed.tolist() == [[0.0, 0.0]] * 3
    assert expanded.tolist() == [[1] * 4] * 2
    world.barrier()
    summed = world.sum(torch.tensor([1.0, float(world.rank)]))
    most = world.max(torch.tensor(world.rank))
    return summed.tolist(), int(most), shared.tolist(), world.gather({"rank": world.rank, "text": "é" * world.rank})


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_hears_the_same(pool: RankPool, size: int) -> None:
    gathered = [{"rank": rank, "text": "é" * rank} for rank in range(size)]
    expected = [float(size), float(sum(range(size)))], size - 1, [5.0] * 3, gathered
    for collectives in ("gloo", "auto"):
        assert pool.run(size, _talk, collectives=collectives) == [expected] * size

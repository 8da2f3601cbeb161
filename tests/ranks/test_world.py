"""The world's methods on one and three ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from lockstep import _torch
from lockstep.world.topology import Topology
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


def test_a_group_under_detailed_debugging_waits_as_long_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[timedelta] = []

    def make(backend: str, timeout: timedelta, **options: Any) -> None:
        made.append(timeout)
        raise ConnectionError

    monkeypatch.setattr("torch.distributed.init_process_group", make)
    for level in (_torch.DebugLevel.OFF, _torch.DebugLevel.DETAIL):  # a group's limit cannot be changed under DETAIL
        monkeypatch.setattr(_torch, "get_debug_level", lambda level=level: level)
        with pytest.raises(ConnectionError):
            World.join(Topology(), torch.device("cpu"), _torch.HashStore(), timeout_s=90.0, form_s=12.0)
    assert [limit.total_seconds() for limit in made] == [12.0, 90.0]


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_hears_the_same(pool: RankPool, size: int) -> None:
    gathered = [{"rank": rank, "text": "é" * rank} for rank in range(size)]
    expected = [float(size), float(sum(range(size)))], size - 1, [5.0] * 3, gathered
    for collectives in ("gloo", "auto"):
        assert pool.run(size, _talk, collectives=collectives) == [expected] * size

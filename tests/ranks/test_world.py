"""The world's methods on one, two and three ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore

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


def _stall(world: World, path: str) -> tuple[float, str]:
    """Form the group anew with other limits; rank 1 does not come to the collective."""
    world.close()
    store = FileStore(path, world.size)
    world = World.join(world.topology, world.device, store, timeout_s=1.5, form_s=60)
    begun_s = time.monotonic()
    try:
        if world.rank == 0:
            world.barrier()
        else:
            time.sleep(4)
    except RuntimeError as error:
        return time.monotonic() - begun_s, str(error)
    return time.monotonic() - begun_s, ""


def test_a_collective_has_its_own_limit_once_the_group_is_formed(pool: RankPool, tmp_path: Path) -> None:
    (waited_s, error), _ = pool.run(2, _stall, str(tmp_path / "store"))
    assert re.search(r"1500 ?ms", error)
    assert 1 < waited_s < 4


def test_forming_the_group_has_a_limit_of_its_own(tmp_path: Path) -> None:
    alone = (
        "import sys, torch, torch.distributed as dist; from lockstep.topology import Topology; "
        "from lockstep.world import World; "
        "World.join(Topology(size=2, local_size=2), torch.device('cpu'), dist.FileStore(sys.argv[1], 2), "
        "timeout_s=600, form_s=1)"
    )
    command = [sys.executable, "-c", alone, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert re.search(r"[Tt]ime(d )?out", ended.stderr)


def test_a_bug_in_an_attempt_is_no_refusal() -> None:
    def attempt() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        World.alone().together(attempt)

"""Ranks of one host that exchange through memory: sums in rank order, and no wait for the dead."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep._torch import FileStore
from lockstep.errors import RequestError, UnmatchedError
from lockstep.monitor.failures import is_echo
from lockstep.world.topology import Topology
from lockstep.world.world import World

from ..needs import need
from ..pool import RankPool

NOBODY = 65534


def _rejoined(
    world: World, folder: str, *, nodes: int = 1, timeout_s: float = 30, collectives: str = "shared-memory"
) -> World:
    """Form the group anew, with memory that the ranks share."""
    world.close()
    here = world.topology
    topology = Topology(rank=here.rank, size=here.size, local_rank=here.rank, local_size=here.size, nodes=nodes)
    store = FileStore(str(Path(folder) / "again"), here.size)
    return World.join(topology, world.device, store, timeout_s=timeout_s, collectives=collectives)


def _mixed(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 10.0 ** (rank * 3)).to(dtype)


def _exchanged(world: World, folder: str) -> bool:
    world = _rejoined(world, folder)
    assert world.memory is not None
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        for count in (0, 1, 7, 131_072, 400_001):  # up to several slots
            each = [_mixed(rank, count, dtype) for rank in range(world.size)]
            mine, total = each[world.rank].clone(), each[0].clone()
            for other in each[1:]:
                total = total + other
            assert torch.equal(world.sum(mine), total), (dtype, count)
            assert torch.equal(world.stack(mine), torch.stack(each)), (dtype, count)
            assert torch.equal(mine, each[world.rank])
    assert torch.equal(world.sum(torch.ones(4, 6).T), torch.full((6, 4), float(world.size)))
    assert world.sum(torch.ones(3, requires_grad=True)).tolist() == 3 * [world.size]
    world.close()
    return True


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_taken_in_the_order_of_the_ranks(pool: RankPool, tmp_path: Path, size: int) -> None:
    assert all(pool.run(size, _exchanged, str(tmp_path)))


def _read_slowly(world: World, folder: str) -> list[float]:
    """Return sums of which rank 1 reads the others' numbers long after rank 0 has gone on to the next one."""
    world, add = _rejoined(world, folder), torch.add

    def slow_add(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        time.sleep(0.1 * (world.rank == 1))
        add(a, b, out=out)

    found = [torch.full((4,), float(number)) for number in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "add", slow_add)
        for each in found:
            world.sum_(each)
    world.close()
    return [float(each.min()) for each in found]


def test_a_rank_that_reads_slowly_reads_what_was_written(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(3, _read_slowly, str(tmp_path)) == [[0.0, 3.0, 6.0, 9.0, 12.0]] * 3


def _crossed(world: World, folder: str, how: str) -> tuple[str, bool]:
    """Exchange something else than the other ranks do."""
    world = _rejoined(world, folder)
    exchanges: dict[str, Callable[[], object]] = {
        "sum": lambda: world.sum(torch.ones(5)),
        "another type": lambda: world.sum(torch.ones(5, dtype=torch.float64)),
        "more": lambda: world.sum(torch.ones(200_000)),
        "another operation": lambda: world.stack(torch.ones(5)),
    }
    with pytest.raises(UnmatchedError, match="exchanges something else than rank") as caught:
        exchanges["sum" if world.rank else how]()
    found = str(caught.value), is_echo(caught.value)
    world.close()
    return found


@pytest.mark.parametrize("how", ["another type", "more", "another operation"])
def test_what_does_not_match_is_not_taken_for_what_is_asked(pool: RankPool, tmp_path: Path, how: str) -> None:
    for told, echoes in pool.run(2, _crossed, str(tmp_path), how):
        assert "every rank has to take the same path" in told
        assert not echoes, "a cause, not another rank's loss"


def _left_alone(world: World, folder: str, how: str) -> tuple[float, str, bool]:
    """Return how long rank 0 waited for a rank that does not come, what it was told, and whether that is an echo."""
    world.close()  # whose threads a child would lack
    child = os.fork() if how == "dies" and world.rank else 0
    if child:
        os.waitpid(child, 0)
        return 0.0, "", False
    world = _rejoined(world, folder, timeout_s=1.0 if how == "sleeps" else 15.0)
    if world.rank:
        time.sleep(3 * (how == "sleeps"))
        if how == "dies":
            os.kill(os.getpid(), 9)
        world.close()
        return 0.0, "", False
    begun_s = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        world.barrier()
    waited_s = time.monotonic() - begun_s
    world.close()
    return waited_s, str(caught.value), is_echo(caught.value)


@pytest.mark.parametrize(
    ("how", "told"),
    [("leaves", "remote process exited"), ("dies", "remote process exited"), ("sleeps", "timed out after 1000 ms")],
)
def test_nobody_waits_for_a_rank_that_does_not_come(pool: RankPool, tmp_path: Path, how: str, told: str) -> None:
    (waited_s, said, echo), _ = pool.run(2, _left_alone, str(tmp_path), how)
    assert said == f"rank 1: {told}"
    assert echo
    assert waited_s < 2.9


def _refused(world: World, folder: str, how: str) -> str:
    """Return with what words rank 0 is refused `--collectives shared-memory` where one rank has another `how`."""
    user, limits = os.geteuid(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if how == "memory" and world.is_main:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        if how == "user" and not world.is_main:
            os.seteuid(NOBODY)
        asked = "gloo" if how == "option" and world.rank else "shared-memory"
        _rejoined(world, folder, nodes=1 + (how == "host"), collectives=asked).close()
    except RequestError as error:
        return str(error)
    finally:
        os.seteuid(user)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("host", "the ranks are on 2 hosts"),
        ("memory", "shared memory cannot be allocated (File too large)"),
        ("user", "rank 1 cannot see the other ranks' processes (Permission denied)"),
        ("option", "a rank was started with --collectives gloo"),
    ],
)
def test_where_no_memory_can_be_shared_every_rank_says_why(pool: RankPool, how: str, why: str) -> None:
    if how == "user":
        need([] if os.geteuid() == 0 else ["root"])
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to other users
        Path(folder).chmod(0o777)
        store = Path(folder) / "again"
        store.touch()
        store.chmod(0o666)
        said = pool.run(2, _refused, folder, how)
    told = f"--collectives shared-memory: {why}; take --collectives gloo, or auto."
    assert said == [told, "" if how == "option" else told]

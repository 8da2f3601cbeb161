"""What comes of computing together: whether a group forms, what its sums are, and how fast.

Bandwidth is that of the bus, 2 (N − 1) / N × bytes ÷ time: what each link of a ring has to carry, which does not depend
on the number of ranks (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from .._torch import PrefixStore, Store
from ..launchers import rank
from ..monitor import bounded
from ..monitor.failures import is_echo, one_line
from ..world.topology import Topology
from ..world.world import World
from .board import Board
from .finding import KIB, MIB, RED, Finding, found, shown

_SIZES = {
    "cpu": {512: 100, 64 * KIB: 30, MIB: 9, 16 * MIB: 5, 64 * MIB: 3},
    "cuda": {512: 50, MIB: 20, 16 * MIB: 10, 128 * MIB: 7, 512 * MIB: 5},
}
"""{bytes: how often}; of the times the mean is taken: in a training, too, some messages wake a rank late, and count."""
_GATHERED_BYTES, _GATHERS = 512, 100
"""Of each rank, as BatchNorm's statistics of some channels, and how often."""
_BESIDE = {"cpu": (MIB, 256), "cuda": (16 * MIB, 2048)}
"""(bytes, size of square matrices) of an all-reduce and of the computation beside it."""
_BESIDE_RUNS = 7
_MOST_S = 1.0  # for one size: as often as that allows; where once would be too long, it and those above are left out
_PATTERN, _WEIGHTS = 127, 64  # small enough that the sum over 4,000 ranks is a whole number that float32 holds


def compute(topology: Topology, device: torch.device, store: Store, board: Board, collectives: str) -> dict[int, Any]:
    """Return what each rank found when computing together, for `judge` (*collective*).

    `collectives` says how CPU tensors are to be exchanged.
    """
    worlds: list[World] = []
    limit_s, group = board.patience_s, PrefixStore("group", store)

    def work() -> dict[str, Any]:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # which each thread has its own of
        # torch's own limit, which on a GPU ends the process, comes after ours.
        worlds.append(world := World.join(topology, device, group, timeout_s=2 * limit_s, collectives=collectives))
        few = torch.zeros(_GATHERED_BYTES, dtype=torch.uint8, device=device)
        measured = {"rows": _measure(world), "gather_s": _slowest_s(world, lambda: world.stack(few), _GATHERS)}
        return {"way": _way(world), **measured, "beside": _beside(world), "changed": _changed(world)}

    mine: dict[str, Any]
    try:
        mine = bounded.within(limit_s, work, "all-reduce")
    except Exception as error:  # a rank that waits for another, or has lost it, knows less than that one
        mine = {"error": one_line(error), "is_echo": isinstance(error, bounded.Late) or is_echo(error)}
    told = board.all("all-reduce", mine)
    for world in worlds:
        rank.close_soon(world)
    return told


def _way(world: World) -> str:
    """Return by which way the ranks of a run like this one add up."""
    if world.device.type == "cuda":
        return "by NCCL"
    if world.memory is not None:
        return "through shared memory"
    return f"by gloo ({world.apart})" if world.apart else "by gloo"


def _measure(world: World) -> list[tuple[int, float, int]]:
    """Return (bytes, slowest rank's mean s, wrong elements here) by size (*collective*)."""
    measured: list[tuple[int, float, int]] = []
    weight = sum(rank % _WEIGHTS + 1 for rank in range(world.size))
    for size_bytes, runs in _SIZES[world.device.type].items():
        if size_bytes > MIB:
            runs = min(runs, int(_MOST_S / (measured[-1][1] * size_bytes / measured[-1][0])))
        if not runs:
            break
        pattern = torch.arange(size_bytes // 4, dtype=torch.float32, device=world.device) % _PATTERN + 1
        total = world.sum(pattern * (world.rank % _WEIGHTS + 1))
        wrong = int((total != pattern * weight).sum())
        total.zero_()
        measured.append((size_bytes, _slowest_s(world, lambda total=total: world.sum_(total), runs), wrong))  # type: ignore[misc]
    return measured


def _beside(world: World) -> float | None:
    """Return the seconds that a second of computation and of an all-reduce at once cost beyond that one (*collective*).

    0 where each goes on as if it were alone; 1 where nothing is gained, as where both need the same processor. None
    where ranks share memory, and do not compute meanwhile.
    """
    if world.device.type == "cpu" and world.memory is not None:
        return None
    size_bytes, width = _BESIDE[world.device.type]
    tensor = torch.zeros(size_bytes // 4, device=world.device)
    matrix = torch.zeros(width, width, device=world.device)

    def compute(times: int) -> None:
        for _ in range(times):
            matrix @ matrix

    def both(times: int) -> None:
        work = dist.all_reduce(tensor, group=world.group, async_op=True)
        compute(times)
        work.wait()

    def measured_s(work: Callable[[], object]) -> float:
        return _slowest_s(world, work, _BESIDE_RUNS)

    both(1)
    exchange_s, once_s = measured_s(lambda: both(0)), measured_s(lambda: compute(1))
    times = max(1, round(exchange_s / once_s))
    compute_s, both_s = measured_s(lambda: compute(times)), measured_s(lambda: both(times))
    return min(1.0, max(0.0, both_s - max(exchange_s, compute_s)) / min(exchange_s, compute_s))


def _changed(world: World) -> list[int]:
    """Return the ranks whose bytes arrived here changed (*collective*)."""
    count = min(16 * MIB, 512 * MIB // world.size)  # to each, and to all together

    def sent_by(rank: int) -> torch.Tensor:
        drawn = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))
        return drawn.to(world.device)

    mine = sent_by(world.rank).repeat(world.size)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=world.group)
    return [rank for rank, each in enumerate(theirs.view(world.size, -1)) if not torch.equal(each, sent_by(rank))]


def _slowest_s(world: World, work: Callable[[], object], runs: int) -> float:
    """Return the slowest rank's mean seconds of `work` (*collective*)."""
    times = []
    for _ in range(runs):
        since_s = time.perf_counter()
        work()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - since_s)
    return float(world.max(torch.tensor(fmean(times), device=world.device)))


def judge(told: Mapping[int, Mapping[str, Any]], names: Sequence[str]) -> Iterator[Finding]:
    """Yield what it means that `compute` returned `told`; `names` are the ranks' hosts."""
    failures = {at: each for at, each in told.items() if "error" in each}
    causes = {at: each for at, each in failures.items() if not each["is_echo"]} or failures
    for at, each in causes.items():
        fix = "see what that rank printed; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL make it say more"
        yield found("collectives", "all-reduce", f"rank {at} ({names[at]}): {each['error']}", fix, bad=RED)
    if failures:
        return
    yield found("collectives", "all-reduce", told[0]["way"])
    for index, (size_bytes, time_s, _) in enumerate(told[0]["rows"]):
        words, fix = shown(time_s, "s"), ""
        if size_bytes >= KIB:
            words += f", bus {shown(2 * (len(told) - 1) / len(told) * size_bytes / time_s, 'bytes/s')}"
        if wrong := {at: each["rows"][index][2] for at, each in told.items() if each["rows"][index][2]}:
            named = ", ".join(f"{count:,} on rank {at} ({names[at]})" for at, count in wrong.items())
            words = f"elements of the sum are wrong: {named}"
            fix = "let no job run with these: test the hosts' memory and network cards, GPUs by nvidia-smi -q -d ECC"
        name = f"all-reduce {shown(size_bytes, 'bytes')}"
        yield found("collectives", name, words, fix, bad=RED, value=time_s, unit="s")
    name, gather_s = f"all-gather {shown(_GATHERED_BYTES, 'bytes')}", told[0]["gather_s"]
    yield found("collectives", name, shown(gather_s, "s"), value=gather_s, unit="s")
    if (beside := told[0]["beside"]) is not None:
        words = f"{1 - beside:.0%} of the shorter one's time is gained"
        yield found("collectives", "computation beside all-reduce", words, value=beside, unit="s/s")
    words, fix = "they arrive unchanged at each rank", ""
    if pairs := [
        f"rank {source} to rank {at} ({names[at]})" for at, each in told.items() for source in each["changed"]
    ]:
        words = f"they arrive with other bits: {', '.join(pairs)}"
        fix = "let no job run there: dmesg (Xid) and nvidia-smi -q tell more of a faulty card, seat or IOMMU (PCIe ACS)"
    yield found("collectives", "bytes sent", words, fix, bad=RED)

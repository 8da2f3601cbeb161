"""What comes of computing together: whether a group forms, what its sums are, and how fast beside what carries them.

Bandwidth is that of the bus, 2 (N − 1) / N × bytes ÷ time: what each link of a ring has to carry, which does not depend
on the number of ranks (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from .. import bounded, hardware
from ..failures import is_echo, one_line
from ..launchers import rank
from ..topology import Topology
from .devices import CORRUPTS, link, random_bytes, seconds
from .finding import KIB, MIB, RED, YELLOW, Finding, found, shown
from .network import Wire

if TYPE_CHECKING:
    import torch

    from .._torch import Store
    from ..world import World
    from .board import Board

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

_LEAST = {"a copy in memory": 0.005, "NVLink": 0.3, "PCIe": 0.15}
_LEAST_OF_LINKS = 0.25
"""The part of what carries it below which the largest all-reduce is yellow.

Seen: 0.4 of a copy in memory between two ranks that share memory, 0.04 by gloo on two busy cores, 0.41 of 10 Gbit/s by
gloo. Of NVLink and PCIe, copies both in and out share what is rated one way.
"""
_GLOO_FILLS_BYTES_PER_S = 1.25e9  # of a faster link no more, with its one connection a pair


def compute(
    topology: Topology, device: torch.device, store: Store, board: Board, held: tuple[str, float], collectives: str
) -> dict[int, Any]:
    """Return what each rank found when computing together, for `judge` (*collective*).

    `held` is what `carrier` says, `collectives` how CPU tensors are to be exchanged.
    """
    import torch

    from .._torch import PrefixStore
    from ..world import World

    worlds: list[World] = []
    limit_s, group = board.patience_s, PrefixStore("group", store)

    def work() -> dict[str, Any]:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # which each thread has its own of
        # torch's own limit, which on a GPU ends the process, comes after ours.
        worlds.append(world := World.join(topology, device, group, timeout_s=2 * limit_s, collectives=collectives))
        measured = {
            "rows": _measure(world),
            "gather_s": _gather_s(world),
            "beside": _beside(world),
            "changed": _changed(world),
        }
        return {"way": _way(world), "held": held, **measured}

    mine: dict[str, Any]
    try:
        mine = bounded.within(limit_s, work, "all-reduce")
    except Exception as error:  # who waits for another rank, or has lost it, knows less than that one
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


def carrier(topology: Topology, device: torch.device, wire: Wire, gpus: Sequence[hardware.Gpu]) -> tuple[str, float]:
    """Return what this rank's all-reduces go through, and its bytes/s (0: unknown)."""
    if topology.nodes == 1 and device.type == "cpu":  # one rank at a time
        return "a copy in memory", 0.0 if topology.local_rank else _memory_bytes_per_s()
    if topology.nodes == 1:
        return link(gpus[device.index])
    if device.type == "cpu":
        return wire.interface, min(wire.bytes_per_s, _GLOO_FILLS_BYTES_PER_S)
    ports = [path.read_text() for path in Path("/sys/class/infiniband").glob("*/ports/*/rate")]  # 100 Gb/sec (4X EDR)
    fastest = max((float(text.split()[0]) * 1e9 / 8 for text in ports), default=0.0)
    return ("InfiniBand", fastest) if fastest else (wire.interface, wire.bytes_per_s)


def _memory_bytes_per_s() -> float:
    import torch

    source = torch.ones(64 * MIB, dtype=torch.uint8)
    target = torch.empty_like(source)
    return source.numel() / median(seconds(source.device, lambda: target.copy_(source)) for _ in range(5))


def _measure(world: World) -> list[tuple[int, float, int]]:
    """Return (bytes, slowest rank's mean s, wrong elements here) by size (*collective*)."""
    import torch

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
        times = [seconds(world.device, lambda total=total: world.sum_(total)) for _ in range(runs)]  # type: ignore[misc]
        slowest_s = float(world.max(torch.tensor(fmean(times), device=world.device)))
        measured.append((size_bytes, slowest_s, wrong))
    return measured


def _gather_s(world: World) -> float:
    """Return the slowest rank's mean seconds of bringing a few bytes of each to all (*collective*)."""
    import torch

    mine = torch.zeros(_GATHERED_BYTES, dtype=torch.uint8, device=world.device)
    times = [seconds(world.device, lambda: world.stack(mine)) for _ in range(_GATHERS)]
    return float(world.max(torch.tensor(fmean(times), device=world.device)))


def _beside(world: World) -> float | None:
    """Return the seconds that a second of computation and of an all-reduce at once cost beyond that one (*collective*).

    0 where each goes on as if it were alone; 1 where nothing is gained, as where both need the same processor. None
    where ranks share memory, and do not compute meanwhile.
    """
    import torch
    import torch.distributed as dist

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

    def slowest_s(work: Callable[[], object]) -> float:
        taken = [seconds(world.device, work) for _ in range(_BESIDE_RUNS)]
        return float(world.max(torch.tensor(fmean(taken), device=world.device)))

    both(1)
    exchange_s, once_s = slowest_s(lambda: both(0)), slowest_s(lambda: compute(1))
    times = max(1, round(exchange_s / once_s))
    compute_s, both_s = slowest_s(lambda: compute(times)), slowest_s(lambda: both(times))
    return min(1.0, max(0.0, both_s - max(exchange_s, compute_s)) / min(exchange_s, compute_s))


def _changed(world: World) -> list[int]:
    """Return the ranks whose bytes arrived here changed (*collective*)."""
    import torch
    import torch.distributed as dist

    count = min(16 * MIB, 512 * MIB // world.size)  # to each, and to all together
    mine = random_bytes(world.rank, count).to(world.device).repeat(world.size)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=world.group)
    arrived = enumerate(theirs.view(world.size, count))
    return [rank for rank, each in arrived if not torch.equal(each, random_bytes(rank, count).to(world.device))]


def judge(told: Mapping[int, Mapping[str, Any]], names: Sequence[str]) -> Iterator[Finding]:
    """Yield what it means that `compute` returned `told`; `names` are the ranks' hosts."""
    failures = {at: each for at, each in told.items() if "error" in each}
    causes = {at: each for at, each in failures.items() if not each["is_echo"]} or failures
    for at, each in causes.items():
        fix = "see what that rank printed; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL make it say more"
        yield found("collectives", "all-reduce", f"rank {at} ({names[at]}): {each['error']}", fix, bad=RED)
    if failures:
        return
    carrier, rated = min((each["held"] for each in told.values()), key=lambda held: held[1] or math.inf)
    against = f"{carrier}, {shown(rated, 'bytes/s')}" if rated else "no rate: the system knows none"
    yield found("collectives", "all-reduce", f"{told[0]['way']}, held against {against}")
    for index, (size_bytes, time_s, _) in enumerate(rows := told[0]["rows"]):
        bus_bytes_per_s = 2 * (len(told) - 1) / len(told) * size_bytes / time_s
        part, is_largest = bus_bytes_per_s / (rated or math.nan), index == len(rows) - 1
        words, fix, bad = shown(time_s, "s"), "", YELLOW
        if size_bytes >= KIB:
            words += f", bus {shown(bus_bytes_per_s, 'bytes/s')}" + (f", {part:.2g} of {carrier}" if rated else "")
        if is_largest and part < _LEAST.get(carrier, _LEAST_OF_LINKS):
            words += ": far below it"
            fix = "see what else uses that, and the processors; NCCL_DEBUG=INFO tells NCCL's path"
        if wrong := {at: each["rows"][index][2] for at, each in told.items() if each["rows"][index][2]}:
            named = ", ".join(f"{count:,} on rank {at} ({names[at]})" for at, count in wrong.items())
            words, bad = f"elements of the sum are wrong: {named}", RED
            fix = "let no job run with these: test the hosts' memory and network cards, GPUs by nvidia-smi -q -d ECC"
        name = f"all-reduce {shown(size_bytes, 'bytes')}"
        yield found("collectives", name, words, fix, bad=bad, value=time_s, unit="s")
    name = f"all-gather {shown(_GATHERED_BYTES, 'bytes')}"
    yield found("collectives", name, shown(told[0]["gather_s"], "s"), value=told[0]["gather_s"], unit="s")
    if (beside := told[0]["beside"]) is not None:
        words = f"{1 - beside:.0%} of the shorter one's time is gained"
        yield found("collectives", "computation beside all-reduce", words, value=beside, unit="s/s")
    pairs = [f"rank {source} to rank {at} ({names[at]})" for at, each in told.items() for source in each["changed"]]
    words = f"they arrive with other bits: {', '.join(pairs)}" if pairs else "they arrive unchanged at each rank"
    yield found("collectives", "bytes sent", words, CORRUPTS if pairs else "", bad=RED)

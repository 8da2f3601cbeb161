"""All-reduce: whether its sum is right, how long it takes by size, and how that compares with what carries it.

Bandwidth is that of the bus, 2 (N − 1) / N × bytes ÷ time: what each link of a ring has to carry, which does not depend
on the number of ranks (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from .finding import Finding, Subject
from .units import KIB, MIB, rate, size, span

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..world import World

_SIZES = {
    "cpu": {8: 30, 64 * KIB: 15, MIB: 9, 16 * MIB: 5, 64 * MIB: 3},
    "cuda": {8: 50, MIB: 20, 16 * MIB: 10, 128 * MIB: 7, 512 * MIB: 5},
}
"""{bytes: how often}; of the times the median is taken."""
_MOST_S = 1.0  # for one size; where the next would take longer, it and those above are left out
_PATTERN, _WEIGHTS = 127, 64  # small enough that the sum over 4,000 ranks is a whole number that float32 holds
_LEAST = {"memory": 0.01, "link": 0.25, "fast link": 0.0, "NVLink": 0.3, "PCIe": 0.15}
"""Below this part of what carries it, the largest all-reduce is yellow.

memory: gloo sends through loopback sockets and adds up in one thread. On two busy cores it was seen at 0.04 to 0.28 of
the rate of a copy; a hundredth is neither, but ranks that wait for a processor or a loopback that is shaped.
link: of 10 Gbit/s, gloo was seen to fill 0.41 between two busy cores; a quarter is a link that others use, or that
has fallen back to a lower rate. A fast link is one that gloo, which keeps one connection a pair, does not fill.
NVLink, PCIe: copies both in and out share what is rated one way; below this NCCL has fallen back on a slower path.
"""

GLOO_FILLS_BYTES_PER_S = 1.25e9
"""10 Gbit/s: only up to here is gloo held against a link."""
_NCCL_FIX = "see NCCL_DEBUG=INFO for the path that NCCL takes, and"
_FIXES = {
    "memory": "start fewer ranks than processors, and see what else runs on this host",
    "link": "see that the ranks use the fast network (--interface) and nobody else does",
    "NVLink": f"{_NCCL_FIX} nvidia-smi nvlink -s for links that are down",
    "PCIe": f"{_NCCL_FIX} nvidia-smi topo -m for where the GPUs sit",
}


@dataclass(frozen=True)
class Carrier:
    """What the all-reduce is held against."""

    kind: str
    """A key of `_LEAST`."""
    name: str
    """In words: memory copy, eth0, NVLink, PCIe."""
    bytes_per_s: float


@dataclass(frozen=True)
class Measured:
    """All-reduces of one size."""

    size_bytes: int
    time_s: float
    """The median, of the slowest rank's times."""
    wrong: int
    """Elements of the sum that are wrong on this rank."""

    def bus_bytes_per_s(self, ranks: int) -> float:
        """Return the bandwidth of the bus."""
        return 2 * (ranks - 1) / ranks * self.size_bytes / self.time_s


def memory_bytes_per_s() -> float:
    """Return how many bytes a second this process copies in the host's memory."""
    import torch

    source = torch.ones(64 * MIB, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        since_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - since_s)
    return source.numel() / median(times)


def all_reduces(world: World, limit_s: float) -> list[Measured]:
    """Return what was measured and checked, by size (*collective*).

    Raises where a rank does not come, after `limit_s` seconds on a GPU, where torch itself would end the process.
    """
    import torch
    import torch.distributed as dist

    measured: list[Measured] = []
    sizes = list(_SIZES[world.device.type].items())
    for index, (count_bytes, runs) in enumerate(sizes):
        total = world.sum(_pattern(count_bytes // 4, world.rank % _WEIGHTS + 1, world.device))
        _settle(world.device, limit_s)
        weight = sum(rank % _WEIGHTS + 1 for rank in range(world.size))
        wrong = int((total != _pattern(count_bytes // 4, weight, world.device)).sum())
        total.zero_()
        times = [_seconds(world.device, lambda total=total: dist.all_reduce(total)) for _ in range(runs)]  # type: ignore[misc]
        slowest = world.max(torch.tensor(times, device=world.device))
        measured.append(Measured(count_bytes, median(slowest.tolist()), wrong))
        if count_bytes >= KIB and index + 1 < len(sizes):
            more, often = sizes[index + 1]
            if measured[-1].time_s * more / count_bytes * often > _MOST_S:
                break
    return measured


def judge(told: Mapping[int, Sequence[Measured]], carrier: Carrier | None, hosts: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each size: {rank: what it measured}."""
    if len(told) < 2:
        why = "one rank: nothing to reduce; lockstep doctor --devices 2 starts two"
        yield Subject("collectives", "all-reduce").unchecked(why)
        return
    if carrier is None:
        why = "the system does not know the link's rate, so that all-reduce is held against nothing"
        yield Subject("collectives", "link").unchecked(why)
    else:
        yield Subject("collectives", carrier.name, carrier.bytes_per_s, "bytes/s").green(
            f"{rate(carrier.bytes_per_s)}, what all-reduce is held against"
        )
    sizes = [each.size_bytes for each in next(iter(told.values()))]
    for index, size_bytes in enumerate(sizes):
        name = f"all-reduce {size(size_bytes)}"
        if faulty := {rank: rows[index].wrong for rank, rows in told.items() if rows[index].wrong}:
            named = ", ".join(f"{count:,} on rank {rank} ({hosts[rank]})" for rank, count in faulty.items())
            fix = (
                "let no job run with these: test the hosts' memory and network cards, the GPUs by nvidia-smi -q -d ECC"
            )
            yield Subject("collectives", name, ranks=tuple(faulty)).red(f"elements of the sum are wrong: {named}", fix)
        else:
            measured = next(iter(told.values()))[index]
            yield _judge_speed(name, measured, len(told), carrier, is_largest=index == len(sizes) - 1)


def _judge_speed(name: str, each: Measured, ranks: int, carrier: Carrier | None, *, is_largest: bool) -> Finding:
    """Return what the speed at one size means; only the largest is held against the carrier."""
    took = f"{span(each.time_s):>8}"
    if each.size_bytes < KIB:
        return Subject("collectives", name, each.time_s, "s").green(took)
    bus = each.bus_bytes_per_s(ranks)
    about = Subject("collectives", name, bus, "bytes/s")
    words = f"{took}  bus {rate(bus):>9}"
    if carrier is None:
        return about.green(words)
    part = bus / carrier.bytes_per_s
    words += f"  {part:.2g} of {carrier.name}"
    if not is_largest or part >= _LEAST[carrier.kind]:
        return about.green(words)
    return about.yellow(f"{words}: far below it", _FIXES[carrier.kind])


def _pattern(count: int, weight: int, device: torch.device) -> Tensor:
    """Return whole numbers (count,), all different from their neighbours, times `weight`."""
    import torch

    base = torch.arange(1, _PATTERN + 1, dtype=torch.float32, device=device) * weight
    return base.repeat(-(-count // _PATTERN))[:count]


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    import torch

    since_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - since_s


def _settle(device: torch.device, limit_s: float) -> None:
    """Return once the device has done what was asked of it; raise where it has not within `limit_s` seconds."""
    import torch

    if device.type != "cuda":
        return
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + limit_s
    while not done.query():  # type: ignore[no-untyped-call]
        if time.monotonic() >= deadline:
            raise TimeoutError(f"it was not done within {limit_s:g} s: another rank does not come, or NCCL hangs")
        time.sleep(0.001)

"""Whether bytes arrive as they were sent: between a host and its devices, between devices, between ranks.

Some hardware corrupts copies without a word, and the model is then another one on that rank. Random bytes are copied
and compared with what was sent: by checksum between ranks, where the receiver knows the seed and so the bytes; one by
one between a host and its devices, and where they arrive between devices. A device whose copies do not come back right
is told as such, and tried with no other one.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..errors import counted
from .finding import Finding, Subject
from .units import MIB, rate, size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..world import World

SEED = 1
"""Of the first rank's numbers."""
_DEVICE_BYTES = 64 * MIB
_PAIR_BYTES = 16 * MIB
_PAIR_S = 0.25
"""More time for each pair of devices: the first copy between two has the driver join them, the first to each start."""
_RANK_BYTES = {"cpu": 4 * MIB, "cuda": 64 * MIB}
_ALL_BYTES = 512 * MIB
"""What one rank sends to all others together, at most."""
_FIX = "let no job run there: another run of lockstep doctor, dmesg (Xid) and nvidia-smi -q tell more; the hardware, \
its seat or the IOMMU (PCIe ACS) is at fault"


def random_bytes(seed: int, count: int) -> Tensor:
    """Return `count` bytes (count,) on the host that depend on nothing but the seed."""
    import torch

    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def checksum(values: Tensor) -> int:
    """Return the CRC-32 of bytes (n,), wherever they lie."""
    return zlib.crc32(values.cpu().numpy().data)


def limit_s(devices: int, least_s: float, most_s: float) -> float:
    """Return how long copies to so many devices, and between each two of them, may take: the more, the longer."""
    return max(least_s, min(least_s + _PAIR_S * devices * (devices - 1), most_s))


def host_and_devices(devices: Sequence[torch.device], seed: int, limit_s: float) -> Iterator[Finding]:
    """Yield whether bytes come back from each device of this process as they went, and pass between its devices.

    After `limit_s` seconds no further copy is begun.
    """
    if not any(device.type == "cuda" for device in devices):
        words = "no GPU to copy to"
        yield Subject("devices", "copies").unchecked(words)
        return
    sent = random_bytes(seed, _DEVICE_BYTES)
    yield copied(devices, {"pageable": sent, "pinned": sent.pin_memory()}, limit_s)


def copied(
    devices: Sequence[torch.device],
    sources: Mapping[str, Tensor],
    limit_s: float,
    *,
    copy: Callable[[Tensor, torch.device], tuple[Tensor, float]] | None = None,
    move: Callable[[Tensor, torch.device], Tensor] | None = None,
) -> Finding:
    """Return what comes of copying the same bytes (n,) from each source to each device, and from there to the others.

    `sources` are kinds of the host's memory, `copy` gives the copy and its rate in bytes a second, `move` takes bytes
    from one device to another.
    """
    import torch

    rates: list[float] = []
    kept: dict[torch.device, Tensor] = {}

    def comes_back(kind: str, source: Tensor, device: torch.device) -> bool:
        there, bytes_per_s = (copy or _timed_copy)(source, device)
        rates.append(bytes_per_s)
        is_same = torch.equal(there.cpu(), source)
        if is_same:
            kept[device] = there[:_PAIR_BYTES]
        return is_same

    def passes(a: torch.device, b: torch.device) -> bool:
        # Compared where it arrives, with what is known to be right there: a checksum on the host takes far longer.
        return a not in kept or b not in kept or torch.equal((move or _moved)(kept[a], b), kept[b])

    trials: list[tuple[str, Callable[[], bool]]] = [
        (f"host to {device} and back ({kind} memory)", partial(comes_back, kind, source, device))
        for device in devices
        for kind, source in sources.items()
    ]
    trials += [(f"{a} to {b}", partial(passes, a, b)) for a, b in itertools.permutations(devices, 2)]
    wrong: list[str] = []
    deadline = time.monotonic() + limit_s
    for index, (name, arrives) in enumerate(trials):
        if index and time.monotonic() >= deadline:
            left = f"{len(trials) - index} of {len(trials)} copies were not tried: no time was left after {limit_s:g} s"
            return judge_copies(wrong, min(rates), left)
        if not arrives():
            wrong.append(name)
    return judge_copies(wrong, min(rates))


def judge_copies(wrong: Sequence[str], bytes_per_s: float, left: str = "") -> Finding:
    """Return what came of copies on this rank: which of them changed the bytes, and the slowest rate to a device.

    `left` says which were not tried, where there was no time for all.
    """
    about = Subject("devices", "copies", value=bytes_per_s, unit="bytes/s")
    if wrong:
        words = f"copies arrive with other bits: {', '.join(wrong)}"
        return about.red(words, _FIX)
    words = f"{size(_DEVICE_BYTES)} come back from the device with the same bits; {rate(bytes_per_s)} to it"
    if left:
        return about.yellow(f"{words}; {left}", "give it more time: lockstep doctor --stall-timeout 120")
    return about.green(words)


def _moved(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device)


def _timed_copy(source: Tensor, device: torch.device) -> tuple[Tensor, float]:
    import torch

    there = torch.empty_like(source, device=device)
    there.copy_(source)  # the first one sets things up
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        there.zero_()
        begin.record()
        there.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
    return there, source.numel() / (begin.elapsed_time(end) / 1000)


def between_ranks(world: World, seed: int) -> list[int]:
    """Return the ranks whose bytes arrived here other than they were sent, over the job's own network (*collective*).

    In round k each rank sends to the one k places on, so that every pair is tried, both ways.
    """
    import torch
    import torch.distributed as dist

    count = min(_RANK_BYTES[world.device.type], _ALL_BYTES // max(1, world.size - 1))
    wrong = []
    for shift in range(1, world.size):
        to, source = (world.rank + shift) % world.size, (world.rank - shift) % world.size
        mine = random_bytes(seed + world.rank, count).to(world.device)
        theirs = torch.empty_like(mine)
        operations = [
            dist.P2POp(dist.isend, mine, to, group=world.group),
            dist.P2POp(dist.irecv, theirs, source, group=world.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if checksum(theirs) != checksum(random_bytes(seed + source, count)):
            wrong.append(source)
    return wrong


def judge_between(wrong: Mapping[int, Sequence[int]], hosts: Sequence[str], on_cuda: bool) -> Finding:
    """Return what came of sending bytes between all ranks: {receiving rank: the ranks whose bytes arrived changed}."""
    name = "device to device" if on_cuda else "rank to rank"
    about = Subject("collectives", name)
    if len(wrong) < 2:
        return about.unchecked("one rank: nobody to send to")
    pairs = [
        f"rank {source} ({hosts[source]}) to rank {rank} ({hosts[rank]})"
        for rank, each in wrong.items()
        for source in each
    ]
    if pairs:
        more = f" and {counted(len(pairs) - 4, 'pair')} more" if len(pairs) > 4 else ""
        ranks = tuple(sorted({rank for rank, each in wrong.items() if each} | {s for e in wrong.values() for s in e}))
        words = f"bytes arrive with other bits: {', '.join(pairs[:4])}{more}"
        return replace(about, ranks=ranks).red(words, _FIX)
    count = len(wrong) * (len(wrong) - 1) // 2
    return about.green(f"bytes arrive unchanged between {counted(count, 'pair')}, both ways")

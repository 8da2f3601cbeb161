"""Whether bytes arrive as they were sent: between a host and its devices, between devices, between ranks.

Some hardware corrupts copies without a word, and the model is then another one on that rank. Random bytes are copied,
and their checksum is compared with that of what was sent; the receiver knows the seed, so it knows the bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import counted
from .finding import Finding, Subject
from .units import MIB, rate, size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..world import World

_DEVICE_BYTES = 64 * MIB
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
    return zlib.crc32(values.cpu().numpy().tobytes())


def host_and_devices(devices: Sequence[torch.device], seed: int) -> Iterator[Finding]:
    """Yield whether bytes come back from each device of this process as they went, and pass between its devices."""
    if not any(device.type == "cuda" for device in devices):
        words = "no devices to copy between"
        yield Subject("devices", "copies").unchecked(words)
        return
    sent = random_bytes(seed, _DEVICE_BYTES)
    expected = checksum(sent)
    wrong: list[str] = []
    rates: list[float] = []
    for device in devices:
        for kind, source in (("pageable", sent), ("pinned", sent.pin_memory())):
            there, bytes_per_s = _timed_copy(source, device)
            if checksum(there) != expected:
                wrong.append(f"host to {device} and back ({kind} memory)")
            rates += [bytes_per_s] if kind == "pinned" else []
    for a in devices:
        for b in devices:
            if a != b and checksum(sent.to(a).to(b)) != expected:
                wrong.append(f"{a} to {b}")
    yield judge_copies(wrong, min(rates))


def judge_copies(wrong: Sequence[str], bytes_per_s: float) -> Finding:
    """Return what came of copies on this rank: which of them changed the bytes, and the slowest rate to a device."""
    about = Subject("devices", "copies", value=bytes_per_s, unit="bytes/s")
    if wrong:
        words = f"{size(_DEVICE_BYTES)} arrive with other bits: {', '.join(wrong)}"
        return about.red(words, _FIX)
    words = f"{size(_DEVICE_BYTES)} come back from the device with the same bits; {rate(bytes_per_s)} to it"
    return about.green(words)


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

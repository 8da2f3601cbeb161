"""Shared-memory collectives of CPU tensors between the ranks of one host.

A collective over loopback takes at least a millisecond, and a net with BatchNorm makes two per layer and step. Here
each rank copies its values into its own slot, publishes a sequence number, waits for the sequence numbers of the other
ranks, and adds up all slots in rank order: an element's bits do not depend on its position. Two rows of slots
alternate: before a rank overwrites a row, every other rank has begun the next exchange, and has finished reading that
row. x86-64 keeps the order of stores, values before their sequence number; other processors need fences that Python
lacks.

The memory is an anonymous file (memfd): it disappears with the processes, however they end, and the size of /dev/shm,
which containers keep small, does not limit it. Rank 0 creates it; the other ranks open it through rank 0's /proc entry,
which the kernel allows only to processes of the same user.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import secrets
import select
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import UnmatchedError
from .topology import Topology

Array = npt.NDArray[Any]
Slots = tuple[Tensor, ...]
"""Every rank's values, in rank order."""
_SLOT_BYTES = 1 << 19
_TURNS = 2
_WORDS = 8  # 64-bit words per rank: a cache line. Word 0 is the rank's sequence number.
_HAS_LEFT, _KIND = 1, 2  # word 1: whether the rank has left; words 2 and 3: the kind of its exchange, one per turn

_POLLS = 100  # polls before a waiting rank yields its processor
_YIELD_S = 1e-3  # waiting time before a rank sleeps between polls
_SLEEP_SHARE, _LONGEST_SLEEP_S = 0.05, 1e-3  # a sleep lasts this share of the time waited, at most this long


class PeerLostError(RuntimeError):
    """A rank that other ranks wait for has ended, or does not arrive."""


class SharedMemory:
    """One rank's side of the memory. Calls are *collective*, by one thread."""

    def __init__(self, fd: int, rank: int, processes: Sequence[int], timeout_s: float) -> None:
        """Map `fd`, the memory shared by the ranks whose process ids are `processes`.

        Raises `OSError` for an invisible process. A collective that waits longer than `timeout_s` raises
        `PeerLostError`.
        """
        self._rank, self._timeout_s, self._sequence = rank, timeout_s, 0
        self._peers = {peer: os.pidfd_open(pid) for peer, pid in enumerate(processes) if peer != rank}
        size, slots_bytes = len(processes), len(processes) * _TURNS * _SLOT_BYTES
        mapped = mmap.mmap(fd, _total_bytes(size))
        self._words = memoryview(mapped)[slots_bytes:].cast("q", (size, _WORDS))
        slots = torch.frombuffer(mapped, dtype=torch.uint8, count=slots_bytes).view(_TURNS, size, _SLOT_BYTES)

        @lru_cache(1024)  # a model needs two per tensor size
        def views(turn: int, operation: str, dtype: torch.dtype, count: int, total_count: int) -> tuple[int, Slots]:
            kind = zlib.crc32(f"{operation} {dtype} {total_count}".encode())
            with torch.inference_mode(False):  # an inference tensor, made in an evaluation, is read-only in training
                return kind, slots[turn, :, : count * dtype.itemsize].view(dtype).unbind()

        self._views, self._rows = views, slots.view(torch.float64).numpy()

    def sum_(self, tensor: Tensor) -> None:
        """Add up `tensor` (contiguous) in rank order, in place."""
        for part, (first, second, *further_slots) in self._exchange("sum", tensor):
            torch.add(first, second, out=part)
            for slot in further_slots:
                part.add_(slot)

    def stack(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor` (contiguous): (ranks, elements)."""
        return torch.cat([torch.stack(slots) for _, slots in self._exchange("stack", tensor)], 1)

    def gather_array(self, parts: Sequence[Array]) -> Array | None:
        """Return every rank's `parts` as a row of float64, (ranks, Σn_i); None if a row exceeds a slot.

        The array is the shared memory itself: read it before the next exchange, and do not write to it.
        """
        count = sum(map(len, parts))
        if count * 8 > _SLOT_BYTES:
            return None
        rows = self._rows[(self._sequence + 1) % _TURNS, :, :count]
        np.concatenate(parts, out=rows[self._rank])
        self._synchronize(~count)  # negative; the kinds of tensors are not
        return rows

    def close(self) -> None:
        """Announce to waiting ranks that this one has left."""
        self._words[self._rank, _HAS_LEFT] = 1
        while self._peers:
            os.close(self._peers.popitem()[1])

    def _exchange(self, operation: str, tensor: Tensor) -> Iterator[tuple[Tensor, Slots]]:
        """Yield `tensor` in parts that fit a slot, each with every rank's copy. Valid until the next exchange."""
        flat = tensor.detach().view(-1)  # in-place writes to a view of a tensor with gradients would raise
        parts = (flat,) if flat.nbytes <= _SLOT_BYTES else torch.split(flat, _SLOT_BYTES // flat.element_size())
        for part in parts:
            turn = (self._sequence + 1) % _TURNS
            kind, slots = self._views(turn, operation, part.dtype, part.numel(), flat.numel())
            slots[self._rank].copy_(part)
            self._synchronize(kind)
            yield part, slots

    def _synchronize(self, kind: int) -> None:
        """Publish this rank's slot; return once all ranks have published their slots.

        Raises `UnmatchedError` if another rank makes a different exchange: its values would be taken for this one's.
        """
        self._sequence = sequence = self._sequence + 1
        words, turn = self._words, sequence % _TURNS
        words[self._rank, _KIND + turn] = kind
        words[self._rank, 0] = sequence
        for peer in self._peers:
            for _ in range(_POLLS):
                if words[peer, 0] >= sequence:
                    break
            else:
                self._wait(peer)
            if words[peer, _KIND + turn] != kind:
                raise UnmatchedError(
                    f"rank {self._rank} exchanges something else than rank {peer} at the same moment: every rank "
                    "has to take the same path through the model and the loop"
                )

    def _wait(self, peer: int) -> None:
        """Return once `peer` has published; raise `PeerLostError` if it does not."""
        words, ended, began_s = self._words, select.poll(), time.monotonic()
        ended.register(self._peers[peer], select.POLLIN)
        while words[peer, 0] < self._sequence:
            waited_s = time.monotonic() - began_s
            if waited_s < _YIELD_S:
                os.sched_yield()
                continue
            # Sleeping also releases Python's lock to other threads of this process.
            time.sleep(min(_SLEEP_SHARE * waited_s, _LONGEST_SLEEP_S))
            is_gone = ended.poll(0) or words[peer, _HAS_LEFT]
            if words[peer, 0] >= self._sequence:  # it published before it ended
                return
            if is_gone:
                raise PeerLostError(f"rank {peer}: remote process exited")
            if waited_s > self._timeout_s:
                raise PeerLostError(f"rank {peer}: timed out after {1000 * self._timeout_s:.0f} ms")


def join(
    topology: Topology, is_unwanted: bool, gather: Callable[[Any], list[Any]], timeout_s: float
) -> tuple[SharedMemory | None, str]:
    """Return (memory, "") or (None, the reason) (*collective*).

    `gather` collects one item from each rank, by another transport.
    """
    rank, memory, fd, name = topology.rank, None, -1, secrets.token_hex(16)
    reason = "a rank was started with --collectives gloo" if is_unwanted else _find_obstacle(topology.nodes)
    try:
        if rank == 0 and not reason:
            fd = os.memfd_create(name)
            # Raises now; later, a write to memory that is not available would kill the process.
            os.posix_fallocate(fd, 0, _total_bytes(topology.size))
    except OSError as error:
        reason = f"shared memory cannot be allocated ({error.strerror})"
    reasons, processes, fds, names = zip(*gather([reason, os.getpid(), fd, name]), strict=True)
    if not any(reasons):
        try:
            fd = fd if rank == 0 else _open(Path(f"/proc/{processes[0]}/fd/{fds[0]}"), names[0])
            memory = SharedMemory(fd, rank, processes, timeout_s)
        except OSError as error:
            reason = f"rank {rank} cannot see the other ranks' processes ({error.strerror})"
        reasons = tuple(gather(reason))
    if fd >= 0:
        os.close(fd)
    reason = next(filter(None, reasons), "")
    if reason and memory is not None:
        memory.close()
    return (None, reason) if reason else (memory, "")


def _find_obstacle(nodes: int) -> str:
    if nodes > 1:
        return f"the ranks are on {nodes} hosts"
    if platform.machine() != "x86_64" or not hasattr(os, "pidfd_open"):
        return f"{platform.system()} on {platform.machine()} is not Linux on x86-64"
    return ""


def _open(path: Path, name: str) -> int:
    if name not in str(path.readlink()):  # in a separate container, that process id is another process's
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _total_bytes(ranks: int) -> int:
    return ranks * (_TURNS * _SLOT_BYTES + _WORDS * 8)

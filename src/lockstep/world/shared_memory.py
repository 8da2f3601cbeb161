"""Shared-memory collectives of CPU tensors between the ranks of one host.

A collective over loopback takes a millisecond however small it is, and a net with BatchNorm has two for each layer and
step. Here each rank copies its numbers into a slot of its own, publishes a sequence number, waits for those of the
others, and adds up all slots in rank order: an element's bits do not depend on its place. Two rows of slots are used by
turns: a rank that writes into one again has seen all others begin the next exchange, and so be done with the last one.
x86-64 keeps the order of stores, numbers before their sequence number; other processors need fences that Python lacks.

The memory is a file without a name (memfd): no death of a process leaves it behind, and the size of /dev/shm, which
containers keep small, does not limit it. Rank 0 makes it; the others open it through rank 0's /proc entry, which the
kernel allows to processes of the same user alone.
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
"""Every rank's numbers, in rank order."""
_SLOT_BYTES = 1 << 19
_TURNS = 2
_WORDS = 8  # of 64 bits, for each rank: a cache line. Word 0 is its sequence number.
_LEFT, _KIND = 1, 2  # the words that say whether it has left, and what it exchanges, by turns

_LOOKS = 100  # before a rank that waits yields its processor
_YIELD_S = 1e-3  # before a rank that waits takes naps
_NAP, _LONGEST_NAP_S = 0.05, 1e-3  # of the time that it has waited


class PeerLostError(RuntimeError):
    """A rank that others wait for does not come."""


class SharedMemory:
    """One rank's side of the memory. Calls are *collective*, by one thread."""

    def __init__(self, fd: int, rank: int, processes: Sequence[int], timeout_s: float) -> None:
        """Map `fd`, shared with the ranks of these process ids.

        Raises `OSError` for an invisible process. Collectives that wait longer than `timeout_s` raise `PeerLostError`.
        """
        self._rank, self._timeout_s, self._sequence = rank, timeout_s, 0
        self._peers = {peer: os.pidfd_open(pid) for peer, pid in enumerate(processes) if peer != rank}
        size, slots_bytes = len(processes), len(processes) * _TURNS * _SLOT_BYTES
        mapped = mmap.mmap(fd, _total_bytes(size))
        self._words = memoryview(mapped)[slots_bytes:].cast("q", (size, _WORDS))
        slots = torch.frombuffer(mapped, dtype=torch.uint8, count=slots_bytes).view(_TURNS, size, _SLOT_BYTES)

        @lru_cache(1024)  # a model needs two for each size of tensor
        def views(turn: int, operation: str, dtype: torch.dtype, count: int, whole: int) -> tuple[int, Slots]:
            kind = zlib.crc32(f"{operation} {dtype} {whole}".encode())
            with torch.inference_mode(False):  # one made in an evaluation could not be written to after it
                return kind, slots[turn, :, : count * dtype.itemsize].view(dtype).unbind()

        self._views, self._numbers = views, slots.view(torch.float64).numpy()

    def sum_(self, tensor: Tensor) -> None:
        """Add up `tensor` (contiguous) in rank order, in place."""
        for part, (first, second, *more) in self._exchanged("sum", tensor):
            torch.add(first, second, out=part)
            for each in more:
                part.add_(each)

    def stack(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor` (contiguous): (ranks, elements)."""
        return torch.cat([torch.stack(slots) for _, slots in self._exchanged("stack", tensor)], 1)

    def gather_array(self, parts: Sequence[Array]) -> Array | None:
        """Return every rank's `parts` as a row of float64: (ranks, Σn_i). None where that is more than a slot.

        The array is the memory itself: read it before the next exchange, and do not write to it.
        """
        count = sum(map(len, parts))
        if count * 8 > _SLOT_BYTES:
            return None
        rows = self._numbers[(self._sequence + 1) % _TURNS, :, :count]
        np.concatenate(parts, out=rows[self._rank])
        self._meet(~count)  # negative, unlike a tensor's kind
        return rows

    def close(self) -> None:
        """Tell ranks that wait for this one that it has left."""
        self._words[self._rank, _LEFT] = 1
        while self._peers:
            os.close(self._peers.popitem()[1])

    def _exchanged(self, operation: str, tensor: Tensor) -> Iterator[tuple[Tensor, Slots]]:
        """Yield each part of `tensor` that fits a slot with every rank's. They are valid until the next exchange."""
        flat = tensor.detach().view(-1)  # nothing is written to a view that a gradient passes
        parts = (flat,) if flat.nbytes <= _SLOT_BYTES else torch.split(flat, _SLOT_BYTES // flat.element_size())
        for part in parts:
            turn = (self._sequence + 1) % _TURNS
            kind, slots = self._views(turn, operation, part.dtype, part.numel(), flat.numel())
            slots[self._rank].copy_(part)
            self._meet(kind)
            yield part, slots

    def _meet(self, kind: int) -> None:
        """Publish this rank's slot, and return once all ranks have published theirs.

        Raises `UnmatchedError` where another rank exchanges something else: it would be taken for this.
        """
        self._sequence = sequence = self._sequence + 1
        words, turn = self._words, sequence % _TURNS
        words[self._rank, _KIND + turn] = kind
        words[self._rank, 0] = sequence
        for peer in self._peers:
            for _ in range(_LOOKS):
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
            # A nap lets other threads of this process have Python's lock as well.
            time.sleep(min(_NAP * waited_s, _LONGEST_NAP_S))
            is_gone = ended.poll(0) or words[peer, _LEFT]
            if words[peer, 0] >= self._sequence:  # it published before it went
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
    why = "a rank was started with --collectives gloo" if is_unwanted else _unfit(topology.nodes)
    try:
        if rank == 0 and not why:
            fd = os.memfd_create(name)
            # An error now: to write to what is not there would kill.
            os.posix_fallocate(fd, 0, _total_bytes(topology.size))
    except OSError as error:
        why = f"no memory to share can be had ({error.strerror})"
    whys, processes, fds, names = zip(*gather([why, os.getpid(), fd, name]), strict=True)
    if not any(whys):
        try:
            fd = fd if rank == 0 else _open(Path(f"/proc/{processes[0]}/fd/{fds[0]}"), names[0])
            memory = SharedMemory(fd, rank, processes, timeout_s)
        except OSError as error:
            why = f"rank {rank} cannot see the other ranks' processes ({error.strerror})"
        whys = tuple(gather(why))
    if fd >= 0:
        os.close(fd)
    why = next(filter(None, whys), "")
    if why and memory is not None:
        memory.close()
    return (None, why) if why else (memory, "")


def _unfit(nodes: int) -> str:
    if nodes > 1:
        return f"the ranks are on {nodes} hosts"
    if platform.machine() != "x86_64" or not hasattr(os, "pidfd_open"):
        return f"{platform.system()} on {platform.machine()} is not Linux on x86-64"
    return ""


def _open(path: Path, name: str) -> int:
    if name not in str(path.readlink()):  # in a container of its own, that number is another process's
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _total_bytes(size: int) -> int:
    return size * (_TURNS * _SLOT_BYTES + _WORDS * 8)

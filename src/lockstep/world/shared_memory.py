"""All-reduce and all-gather of CPU tensors between the ranks of one host, through memory that they share.

A collective over loopback costs a millisecond however small it is, and a net with BatchNorm has two for each layer in
each step. Here each rank copies its numbers into a slot of its own, says so with a sequence number, waits for the
others' numbers, and adds up all slots in the order of the ranks: an element's bits do not depend on its place. There
are two rows of slots, used by turns: a rank that writes into one again has seen all the others begin the next
collective, and so be done with it. What is larger than a slot goes in parts.

Data has to be visible before the sequence number that announces it. An x86-64 processor keeps the order of its stores;
others need fences that Python does not have, so that ranks there use gloo.

The memory is a file without a name (memfd): no death of any process leaves it behind, and the size of /dev/shm, which
containers keep small, does not limit it. Rank 0 makes it; the others open it through rank 0's /proc entry, which the
kernel allows to processes of the same user alone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import secrets
import select
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import UnmatchedError

_SLOT_BYTES = 1 << 19
_LINE = 8  # 64-bit words in a cache line, so that no two ranks write into one
_LEFT = 1  # the word of a rank's line that says that it has left; word 0 is its sequence number
_KIND = 2  # the words that say what it exchanges, by turns
_NONCE_BYTES = 16
_PAGE = mmap.PAGESIZE
_PROCESSORS = ("x86_64", "AMD64")

# While a rank waits: how often it looks before it yields, for how long it yields before it sleeps, and how long then.
_LOOKS = 100
_YIELD_S = 1e-3
_NAP = 0.05  # of the time that it has waited
_LONGEST_NAP_S = 1e-3
_LIVES_S = 0.01  # between looks whether the rank that it waits for still lives

_TURNS = 2
_VIEWS = 1024  # kept, of which a model needs one for each size of tensor


class PeerLostError(RuntimeError):
    """A rank that others wait for has ended, has left, or does not come."""


class _Views(NamedTuple):
    """The ranks' slots as tensors."""

    all: Tensor
    """(ranks, elements)"""
    rows: tuple[Tensor, ...]


class SharedMemory:
    """One rank's side of the memory that all ranks of a host share. Calls are *collective*, by one thread at a time."""

    def __init__(self, fd: int, rank: int, processes: list[int], timeout_s: float) -> None:
        """Map `fd`; `processes` are the ranks' process ids, in their order. Raises `OSError` where one is not seen.

        A collective that waits longer than `timeout_s` for a rank raises `PeerLostError`.
        """
        self.rank, self.size = rank, len(processes)
        self._timeout_s = timeout_s
        self._peers = {peer: os.pidfd_open(pid) for peer, pid in enumerate(processes) if peer != rank}
        mapped = mmap.mmap(fd, _total_bytes(self.size))
        self._words = memoryview(mapped)[_PAGE : _PAGE + self.size * _LINE * 8].cast("q")
        slots = torch.frombuffer(mapped, dtype=torch.uint8)[-_TURNS * self.size * _SLOT_BYTES :]
        self._slots = slots.view(_TURNS, self.size, _SLOT_BYTES)
        self._numbers = self._slots.view(torch.float64).numpy()
        self._sequence = 0
        self._views: dict[tuple[int, torch.dtype, int], _Views] = {}

    def reduce_(self, tensor: Tensor, op: Callable[..., Any]) -> None:
        """Put `tensor` (contiguous, the same shape and type on each rank) together over all ranks, in place.

        `op` is torch.add or torch.maximum, taken in the order of the ranks.
        """
        kind = _kind(op.__name__, tensor)
        for part in self._parts(tensor):
            first, second, *more = self._exchange(part, kind).rows
            op(first, second, out=part)
            for each in more:
                op(part, each, out=part)

    def stack(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor` (contiguous), in the order of the ranks: (ranks, elements)."""
        kind = _kind("stack", tensor)
        parts = [self._exchange(part, kind).all.clone() for part in self._parts(tensor)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def numbers(self, parts: Sequence[np.ndarray], count: int) -> np.ndarray | None:
        """Return every rank's `count` numbers, all its `parts` in one row of float64, in the order of the ranks.

        The array (ranks, count) is the memory itself: not to be written, and valid until the next collective. None
        where the numbers fill more than a slot.
        """
        if count * 8 > _SLOT_BYTES:
            return None
        everyone = self._numbers[(self._sequence + 1) % _TURNS, :, :count]
        np.concatenate(parts, out=everyone[self.rank])
        self._meet(~count)  # negative, unlike a tensor's kind
        return everyone

    def close(self) -> None:
        """Tell the ranks that still wait for this one that it does not come any more."""
        self._words[self.rank * _LINE + _LEFT] = 1
        for peer in self._peers.values():
            os.close(peer)
        self._peers.clear()

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        flat = tensor.detach().view(-1)  # nothing is written to a view that a gradient passes through
        return (flat,) if tensor.nbytes <= _SLOT_BYTES else torch.split(flat, _SLOT_BYTES // tensor.element_size())

    def _exchange(self, part: Tensor, kind: int) -> _Views:
        """Return every rank's `part` (flat, at most a slot), which is valid until the next exchange."""
        views = self._next(part.dtype, part.numel())
        views.rows[self.rank].copy_(part)
        self._meet(kind)
        return views

    def _meet(self, kind: int) -> None:
        """Say that this rank's slot is written, and return once all have written theirs.

        Raises `UnmatchedError` where another rank exchanges something of another kind: it would be taken for this.
        """
        self._sequence = sequence = self._sequence + 1
        words, turn = self._words, _KIND + sequence % _TURNS
        words[self.rank * _LINE + turn] = kind
        words[self.rank * _LINE] = sequence
        for peer in self._peers:
            at = peer * _LINE
            looks = 0
            while words[at] < sequence:
                looks += 1
                if looks > _LOOKS:
                    self._wait(peer)
            if words[at + turn] != kind:
                raise UnmatchedError(
                    f"rank {self.rank} exchanges something else than rank {peer} at the same moment: every rank has to "
                    "take the same path through the model and the loop"
                )

    def _next(self, dtype: torch.dtype, count: int) -> _Views:
        """Return the slots of the next exchange, of `count` elements each."""
        key = ((self._sequence + 1) % _TURNS, dtype, count)
        if (views := self._views.get(key)) is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            everyone = self._slots[key[0], :, : count * dtype.itemsize].view(dtype)
            self._views[key] = views = _Views(everyone, everyone.unbind())
        return views

    def _wait(self, peer: int) -> None:
        """Return once `peer` has written; meanwhile leave the processor to whoever needs it."""
        at, began_s = peer * _LINE, time.monotonic()
        looked_s = began_s
        while self._words[at] < self._sequence:
            now_s = time.monotonic()
            if now_s - began_s < _YIELD_S:
                os.sched_yield()
                continue
            # A nap lets other threads of this process have Python's lock as well.
            time.sleep(min(_NAP * (now_s - began_s), _LONGEST_NAP_S))
            if now_s - looked_s > _LIVES_S:
                looked_s = now_s
                self._check(peer, now_s - began_s)

    def _check(self, peer: int, waited_s: float) -> None:
        """Raise `PeerLostError` where `peer` has ended or left without having written, or is waited for too long."""
        poll = select.poll()
        poll.register(self._peers[peer], select.POLLIN)
        is_gone = bool(poll.poll(0)) or self._words[peer * _LINE + _LEFT]
        if self._words[peer * _LINE] >= self._sequence:  # it wrote before it went
            return
        if is_gone:
            raise PeerLostError(f"rank {peer}: remote process exited")
        if waited_s > self._timeout_s:
            raise PeerLostError(f"rank {peer}: timed out after {1000 * self._timeout_s:.0f} ms")


def join(
    rank: int, size: int, nodes: int, gather: Callable[[Any], list[Any]], timeout_s: float
) -> tuple[SharedMemory | None, str]:
    """Return the memory that all ranks share, or None and, in words, why there can be none (*collective*).

    `gather` returns what all ranks give to it, by another way. All ranks return the same.
    """
    with contextlib.ExitStack() as opened:
        made, why = (0, ""), ""
        try:
            why = _unfit(nodes)
            if rank == 0 and not why:
                made = _make(size, opened)
        except OSError as error:
            why = f"no memory to share can be had ({error.strerror})"
        found = gather({"pid": os.getpid(), "user": _user(), "made": made, "why": why})
        users = {each["user"] for each in found}
        if len(users) > 1:
            why = f"the ranks are of different users ({', '.join(map(str, sorted(users)))})"
        why = next((each["why"] for each in found if each["why"]), why)
        if why:
            return None, why
        memory, processes = None, [each["pid"] for each in found]
        try:
            its_fd, nonce = found[0]["made"]
            memory = SharedMemory(_open(processes[0], its_fd, nonce, opened), rank, processes, timeout_s)
        except OSError as error:
            why = f"rank {rank} cannot see the other ranks' processes ({error.strerror})"
        why = next(filter(None, gather(why)), "")
        if why and memory is not None:
            memory.close()
        return (None, why) if why else (memory, "")


def _kind(operation: str, tensor: Tensor) -> int:
    """Return a number that is another one where the operation, the type or the number of elements is."""
    return zlib.crc32(f"{operation} {tensor.dtype} {tensor.numel()}".encode())


def _unfit(nodes: int) -> str:
    if nodes > 1:
        return f"the ranks are on {nodes} hosts"
    if platform.machine() not in _PROCESSORS:
        return f"a {platform.machine()} processor does not keep the order of its stores"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this system has no memory without a name (memfd), which is Linux's"
    return ""


def _make(size: int, opened: contextlib.ExitStack) -> tuple[int, str]:
    """Return this process's descriptor of new memory, and the nonce that it begins with."""
    fd = os.memfd_create("lockstep")
    opened.callback(os.close, fd)
    os.posix_fallocate(fd, 0, _total_bytes(size))  # an error now, where writing to memory that is not there would kill
    nonce = secrets.token_hex(_NONCE_BYTES)
    os.pwrite(fd, bytes.fromhex(nonce), 0)
    return fd, nonce


def _open(process: int, its_fd: int, nonce: str, opened: contextlib.ExitStack) -> int:
    fd = os.open(f"/proc/{process}/fd/{its_fd}", os.O_RDWR | os.O_CLOEXEC)
    opened.callback(os.close, fd)
    if os.pread(fd, _NONCE_BYTES, 0) != bytes.fromhex(nonce):
        raise FileNotFoundError(errno.ENOENT, "that number is another process's here")  # in a container of its own
    return fd


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _total_bytes(size: int) -> int:
    """Return a page for the nonce, a cache line for each rank, and the slots."""
    lines = -(-size * _LINE * 8 // _PAGE) * _PAGE
    return _PAGE + lines + _TURNS * size * _SLOT_BYTES

"""The live process group, as a value that is passed to whoever communicates.

With one rank every method is the identity, so that no caller asks how many ranks there are. Methods marked
*collective* must be called by every rank, in the same order.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from .._torch import Store
from ..errors import RequestError
from ..monitor.notes import Notes
from ..monitor.progress import Pulse
from . import shared_memory
from .topology import Topology

_torch.spare_compiler()

T = TypeVar("T")

_LENGTH = struct.Struct("<q")
_AT_ONCE = 504
"""Bytes of a rank's text that travel with its length: most are no longer, and a second exchange costs as much."""


@dataclass(frozen=True)
class World:
    """The ranks that train together: `topology` says who this one is, `device` where it computes."""

    topology: Topology
    device: torch.device
    group: dist.ProcessGroup | None = None
    """The process group; None where there is one rank and nothing to exchange."""
    pulse: Pulse = field(default_factory=Pulse, compare=False)
    """What this rank is doing, for whoever watches it."""
    notes: Notes = field(default_factory=Notes, compare=False)
    """What an earlier start of the same ranks has left, and this one leaves for the next."""
    memory: shared_memory.SharedMemory | None = field(default=None, compare=False)
    """What the ranks of one host exchange CPU tensors through; None where gloo does it."""
    apart: str = ""
    """Why ranks that might have shared memory do not, in words."""

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> World:
        """Return the world of this one process."""
        return cls(Topology(), torch.device(device))

    @classmethod
    def join(
        cls,
        topology: Topology,
        device: torch.device,
        store: Store,
        *,
        timeout_s: float,
        form_s: float | None = None,
        pulse: Pulse | None = None,
        notes: Notes | None = None,
        collectives: str = "auto",
    ) -> World:
        """Form the process group of all ranks over `store` and return it (*collective*).

        NCCL moves CUDA tensors. CPU tensors go through memory that the ranks of one host share, or by gloo, as
        `collectives` says: auto, gloo or shared-memory. A collective that waits longer than `timeout_s` for a rank
        raises in the others; forming the group waits `form_s`, by default as long. `pulse` is what a watch over this
        rank reads, `notes` what outlives the ranks. Raises `RequestError` where there can be no shared-memory, or
        ranks ask for different `collectives`.
        """
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        hook = sys.excepthook
        dist.init_process_group(
            backend,
            store=store,
            rank=topology.rank,
            world_size=topology.size,
            timeout=timedelta(seconds=timeout_s if form_s is None else form_s),
            device_id=device if device.type == "cuda" else None,
        )
        sys.excepthook = hook  # torch's own drops what another one says, and stays
        if form_s is not None:
            _torch.set_timeout(timedelta(seconds=timeout_s))
        world = cls(topology, device, dist.group.WORLD, pulse or Pulse(), notes or Notes())
        # Before the options are compared: what a rank does next depends on this one.
        asked = world.gather(collectives)
        if other := next((rank for rank, each in enumerate(asked) if each != asked[0]), 0):
            world.close()
            raise RequestError(
                f"Rank {other} was started with --collectives {asked[other]}, rank 0 with {asked[0]}; "
                "start every rank with the same options."
            )
        if world.size == 1 or collectives == "gloo":
            return world
        memory, apart = shared_memory.join(world.rank, world.size, topology.nodes, world.gather, timeout_s)
        if apart and collectives == "shared-memory":
            world.close()
            raise RequestError(f"--collectives shared-memory: {apart}; take --collectives gloo, or auto.")
        return dataclasses.replace(world, memory=memory, apart=apart)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.topology.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: the one that prints and writes. Never guard a collective with it."""
        return self.topology.is_main

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the element-wise sum of `tensor` over all ranks; any shape, same on each rank (*collective*).

        Over three ranks or more, an element's last bits depend on its place in the tensor where gloo or NCCL add up:
        different parts in different orders. What has to be the same bits wherever it stands goes through `stack`.
        """
        if self.group is None:
            return tensor
        return self.sum_(tensor.clone(memory_format=torch.contiguous_format))

    def sum_(self, tensor: Tensor) -> Tensor:
        """Make `tensor` (contiguous) its element-wise sum over all ranks, in place, and return it (*collective*)."""
        return self._reduce_(tensor, dist.ReduceOp.SUM, torch.add)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum of `tensor` over all ranks (*collective*)."""
        if self.group is None:
            return tensor
        return self._reduce_(tensor.clone(memory_format=torch.contiguous_format), dist.ReduceOp.MAX, torch.maximum)

    def _reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, on_memory: Callable[..., Any]) -> Tensor:
        if self.group is None:
            return tensor
        before = self.pulse.phase
        self.pulse.enter("all-reduce")
        if self.memory is not None and not tensor.is_cuda:
            self.memory.reduce_(tensor, on_memory)
        else:
            dist.all_reduce(tensor, op, group=self.group)
        self.pulse.enter(before)
        return tensor

    def stack(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor`, in the order of the ranks: (ranks, *its shape) (*collective*)."""
        if self.group is None:
            return tensor[None]
        before = self.pulse.phase
        self.pulse.enter("all-gather")
        tensor = tensor.contiguous()
        if self.memory is not None and not tensor.is_cuda:
            found = self.memory.stack(tensor)
        else:
            found = tensor.new_empty(self.size * tensor.numel())
            dist.all_gather_into_tensor(found, tensor.view(-1), group=self.group)
        self.pulse.enter(before)
        return found.view(self.size, *tensor.shape)

    def numbers(self, *parts: np.ndarray) -> np.ndarray:
        """Return every rank's `parts` (n_i,), one after the other as float64: (ranks, Σn_i) (*collective*).

        What is on the host already, such as BatchNorm's statistics, spares a tensor's detours here. Read it before the
        next collective, and write nothing into it: where ranks share memory, it is that memory.
        """
        count = sum(map(len, parts))
        if self.memory is not None:
            before = self.pulse.phase
            self.pulse.enter("all-gather")
            found = self.memory.numbers(parts, count)
            self.pulse.enter(before)
            if found is not None:
                return found
        return self.stack(torch.from_numpy(np.concatenate(parts, dtype=np.float64))).numpy()

    def gather(self, item: Any) -> list[Any]:
        """Return every rank's `item` (small and JSON-able), in the order of the ranks, on all ranks (*collective*)."""
        # JSON, not all_gather_object: that one unpickles whatever a peer sends.
        if self.group is None:
            return [item]
        text = json.dumps(item).encode()
        head = _LENGTH.pack(len(text)) + text[:_AT_ONCE]
        texts = [head.tobytes() for head in self.stack(_padded(head, _LENGTH.size + _AT_ONCE)).numpy()]
        lengths = [_LENGTH.unpack_from(head)[0] for head in texts]
        texts = [head[_LENGTH.size :] for head in texts]
        if (longest := max(lengths)) > _AT_ONCE:
            rests = self.stack(_padded(text[_AT_ONCE:], longest - _AT_ONCE)).numpy()
            texts = [head + rest.tobytes() for head, rest in zip(texts, rests, strict=True)]
        return [json.loads(text[:length]) for text, length in zip(texts, lengths, strict=True)]

    def unlike(self, facts: dict[str, Any]) -> tuple[int, str] | None:
        """Return the first rank that has other `facts` than rank 0, and which, in words (*collective*).

        `facts` is {what it is: a number or text}, the same keys on each rank; all ranks hear the same, None where
        the facts are the same everywhere.
        """
        first, *others = self.gather(facts)
        for rank, theirs in enumerate(others, start=1):
            differ = [f"{what} {theirs[what]} (rank 0 has {had})" for what, had in first.items() if theirs[what] != had]
            if differ:
                return rank, ", ".join(differ)
        return None

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Overwrite `tensors` with rank 0's, in place (*collective*)."""
        if self.group is not None:
            with self.pulse.during("broadcast"):
                for tensor in tensors:
                    dist.broadcast(tensor, src=0, group=self.group)

    def barrier(self) -> None:
        """Return once every rank has come here (*collective*)."""
        if self.group is not None:
            # An all-reduce of one CPU number: NCCL's own barrier would pick a device by itself.
            with self.pulse.during("barrier"):
                self.sum_(torch.zeros(1))

    def together(self, attempt: Callable[[], T]) -> T:
        """Return what `attempt`, which must not communicate, returns on this rank (*collective*).

        Where it raises `RequestError` on any rank, every rank raises one, with the sentence of the lowest such rank.
        Any other exception passes through at once: a bug is not a request, and ends the run by itself.
        """
        refused: RequestError | None = None
        try:
            result = attempt()
        except RequestError as error:
            refused = error
        for sentence in self.gather(None if refused is None else str(refused)):
            if sentence is not None:
                raise RequestError(sentence) from refused
        return result

    def close(self) -> None:
        """Leave the process group. The world is of no use afterwards."""
        if self.memory is not None:
            self.memory.close()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()


def _padded(text: bytes, size: int) -> Tensor:
    """Return the bytes, with zeros up to `size`: (size,), uint8."""
    return torch.frombuffer(bytearray(text.ljust(size, b"\0")), dtype=torch.uint8)

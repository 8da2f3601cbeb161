"""The ranks that train together, as a value.

With one rank every method is the identity, so that no caller asks how many ranks there are. Methods marked
*collective* must be called by every rank, in the same order.
"""

from __future__ import annotations

import dataclasses
import json
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
from ..monitor.progress import Progress
from . import shared_memory
from .topology import Topology

_torch.spare_compiler()

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks that train together.

    This one is at `topology`, and computes on `device`.
    CPU tensors go through `memory`, which the ranks of one host share, else by gloo; `shared_memory_reason` says why
    there is no shared memory.
    `progress` tells the watchdog what this rank is doing; `notes` are what earlier starts of the ranks have left.
    """

    topology: Topology
    device: torch.device
    group: dist.ProcessGroup | None = None
    progress: Progress = field(default_factory=Progress, compare=False)
    notes: Notes = field(default_factory=Notes, compare=False)
    memory: shared_memory.SharedMemory | None = field(default=None, compare=False)
    shared_memory_reason: str = ""

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
        progress: Progress | None = None,
        notes: Notes | None = None,
        collectives: str = "auto",
    ) -> World:
        """Form the process group of all ranks over `store` (*collective*).

        NCCL moves CUDA tensors; `collectives` says what moves those of CPUs: auto, gloo or shared-memory. A collective
        that waits `timeout_s` for a rank raises in the others; forming the group waits `form_s`, by default as long.
        Raises `RequestError` where shared-memory is asked for and cannot be.
        """
        is_cuda, hook = device.type == "cuda", sys.excepthook
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=topology.rank,
            world_size=topology.size,
            timeout=timedelta(seconds=timeout_s if form_s is None else form_s),
            device_id=device if is_cuda else None,
        )
        sys.excepthook = hook  # torch's own drops what another one says, and stays
        if form_s is not None:
            _torch.set_timeout(timedelta(seconds=timeout_s))
        world = cls(topology, device, dist.group.WORLD, progress or Progress(), notes or Notes())
        if world.size == 1:
            return world
        memory, reason = shared_memory.join(topology, collectives == "gloo", world.gather, timeout_s)
        if reason and collectives == "shared-memory":
            world.close()
            raise RequestError(f"--collectives shared-memory: {reason}; take --collectives gloo, or auto.")
        return dataclasses.replace(world, memory=memory, shared_memory_reason=reason)

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self  # a copy of a layer that holds it belongs to the same world; a process group cannot be copied

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
        """Whether this is rank 0. Never guard a collective with it."""
        return self.topology.is_main

    @property
    def is_imagined(self) -> bool:
        """Whether this rank computes its share of several ranks' work without the others."""
        return self.size > 1 and self.group is None

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the element-wise sum of `tensor` over all ranks (*collective*).

        Over three ranks or more, an element's last bits depend on its place where gloo or NCCL add up. What has to be
        the same bits wherever it stands goes through `stack`.
        """
        return self.sum_(tensor.clone(memory_format=torch.contiguous_format))

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` (contiguous) over all ranks in place; return it (*collective*)."""
        if self.group is not None:
            with self.progress.during("all-reduce"):
                if self.memory is not None and not tensor.is_cuda:
                    self.memory.sum_(tensor)
                else:
                    dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum of `tensor` (small) over all ranks (*collective*)."""
        return self.stack(tensor).amax(0)

    def stack(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor` in rank order: (ranks, *shape) (*collective*)."""
        if self.group is None:
            return tensor[None]
        tensor = tensor.contiguous()
        with self.progress.during("all-gather"):
            if self.memory is not None and not tensor.is_cuda:
                found = self.memory.stack(tensor)
            else:
                found = tensor.new_empty(self.size * tensor.numel())
                dist.all_gather_into_tensor(found, tensor.view(-1), group=self.group)
        return found.view(self.size, *tensor.shape)

    def gather_variable_length(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's `tensor` in rank order (*collective*). Each is (n, …); n may differ."""
        lengths: list[int] = self.stack(torch.tensor(len(tensor))).tolist()
        if not any(lengths):
            return [tensor] * self.size
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        return [each[:length] for each, length in zip(self.stack(padded), lengths, strict=True)]

    def gather_array(self, *parts: np.ndarray) -> np.ndarray:
        """Return every rank's `parts` as a row of float64: (ranks, Σn_i) (*collective*).

        Spares numbers that are on the host, such as BatchNorm's statistics, a tensor's detours. Valid until the next
        collective, and not to be written: where ranks share memory, it is that memory.
        """
        if self.memory is not None:
            with self.progress.during("all-gather"):
                found = self.memory.gather_array(parts)
            if found is not None:
                return found
        stacked: np.ndarray = self.stack(torch.from_numpy(np.concatenate(parts, dtype=np.float64))).numpy()
        return stacked

    def gather(self, item: Any) -> list[Any]:
        """Return every rank's `item`, small and JSON-able, in rank order (*collective*)."""
        if self.group is None:
            return [item]
        # JSON, not all_gather_object: that one unpickles whatever a peer sends.
        text = torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)
        return [json.loads(each.numpy().tobytes()) for each in self.gather_variable_length(text)]

    def find_mismatch(self, facts: dict[str, Any]) -> tuple[int, str] | None:
        """Return the first rank that has other `facts` than rank 0 (*collective*).

        `facts` is {name: number or text}, compared by rank 0's names. The text has the differences; None where all are
        alike.
        """
        first, *others = self.gather(facts)
        for rank, theirs in enumerate(others, start=1):
            pairs = ((name, theirs.get(name), had) for name, had in first.items())
            differ = [f"{name} {has} (rank 0 has {had})" for name, has, had in pairs if has != had]
            if differ:
                return rank, ", ".join(differ)
        return None

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Overwrite `tensors` with rank 0's, in place (*collective*)."""
        if self.group is not None:
            for tensor in tensors:
                with self.progress.during("broadcast"):  # each by itself: all of a large model may take long
                    dist.broadcast(tensor, src=0, group=self.group)

    def barrier(self) -> None:
        """Return once every rank has come here (*collective*)."""
        # An all-reduce of one CPU number: NCCL's own barrier would pick a device by itself.
        with self.progress.during("barrier"):
            self.sum_(torch.zeros(1))

    def together(self, attempt: Callable[[], T]) -> T:
        """Return this rank's value of `attempt`, which must not communicate (*collective*).

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

    def from_main(self, attempt: Callable[[], T]) -> T:
        """Return rank 0's value of `attempt` on all ranks (*collective*). JSON-able; raises as `together` does."""
        found: T = self.gather(self.together(lambda: attempt() if self.is_main else None))[0]
        return found

    def close(self) -> None:
        """Leave the process group. The world is of no use afterwards."""
        if self.memory is not None:
            self.memory.close()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group()

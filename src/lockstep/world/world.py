"""The ranks that train together, as a value.

With one rank every method is the identity, so that no caller needs the number of ranks. Methods marked
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

    This process has its place in `topology`, and computes on `device`. CPU tensors go through `memory`, which the ranks
    of one host share, or through gloo; `shared_memory_reason` says why `memory` is None. `progress` reports this rank's
    current phase to the watchdog; `notes` are messages from earlier starts of the ranks.
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
        """Return a world of this process alone."""
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

        An accelerator's own backend (NCCL, XCCL) moves its tensors; `collectives` chooses the transport of CPU tensors:
        auto, gloo or shared-memory. A
        collective that waits `timeout_s` for a rank raises on the other ranks; forming the group waits `form_s`, by
        default also `timeout_s`. Raises `RequestError` if shared memory was requested and is not available.
        """
        hook, backend, group = sys.excepthook, "gloo", dist.group.WORLD
        progress, on_host = progress or Progress(), device.type == "cpu"
        if not on_host:
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
            progress.event = torch.Event(device)
        if _torch.get_debug_level() == _torch.DebugLevel.DETAIL:
            form_s = None  # torch 2.11 to 2.13 cannot change the limit of a group under TORCH_DISTRIBUTED_DEBUG=DETAIL
        if group is None:
            dist.init_process_group(
                backend,
                store=store,
                rank=topology.rank,
                world_size=topology.size,
                timeout=timedelta(seconds=timeout_s if form_s is None else form_s),
                device_id=None if on_host else device,
            )
            sys.excepthook = hook  # torch replaces the hook and discards the previous one's output
            if form_s is not None:
                _torch.set_timeout(timedelta(seconds=timeout_s))
            group = dist.group.WORLD
        else:  # another library has formed the ranks' default group, as Ray Train does
            if (dist.get_rank(), dist.get_world_size()) != (topology.rank, topology.size):
                raise RequestError(
                    f"torch.distributed has rank {dist.get_rank()} of {dist.get_world_size()}, and the environment "
                    f"rank {topology.rank} of {topology.size}; call lockstep.session() in place of init_process_group."
                )
            group = new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
        world = cls(topology, device, group, progress, notes or Notes())
        if world.size == 1:
            return world
        memory, reason = shared_memory.join(topology, collectives == "gloo", world.gather, timeout_s)
        if reason and collectives == "shared-memory":
            world.close()
            raise RequestError(f"--collectives shared-memory: {reason}; take --collectives gloo, or auto.")
        return dataclasses.replace(world, memory=memory, shared_memory_reason=reason)

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self  # a copied layer belongs to the same world; a process group cannot be copied

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.topology.size

    @property
    def group_size(self) -> int:
        """The number of ranks that take part in a collective: 1 without a process group."""
        return 1 if self.group is None else self.size

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

        With three ranks or more, the rounding of gloo and NCCL depends on an element's position. Sums whose bits must
        not depend on it go through `stack`.
        """
        return self.sum_(tensor.clone(memory_format=torch.contiguous_format))

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` (contiguous) over all ranks in place; return it (*collective*)."""
        if self.group is not None:
            with self.progress.during("all-reduce"):
                if self.memory is not None and tensor.is_cpu:
                    self.memory.sum_(tensor)
                else:
                    dist.all_reduce(tensor, group=self.group)
        return tensor

    def beside(self) -> World:
        """Return this world, on GPUs with another process group, so that its order is independent (*collective*)."""
        if self.group is None or self.device.type == "cpu":
            return self
        return dataclasses.replace(self, group=new_group())

    def max(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum of `tensor` (small) over all ranks (*collective*)."""
        return self.stack(tensor).amax(0)

    def stack(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor` in rank order: (ranks, *shape) (*collective*)."""
        if self.group is None:
            return tensor[None]
        if self.memory is not None and tensor.is_cpu:
            with self.progress.during("all-gather"):
                return self.memory.stack(tensor.contiguous()).view(self.size, *tensor.shape)
        rows = tensor.new_empty(self.size * tensor.numel())
        return self.gather_into(rows, tensor.contiguous().view(-1)).view(self.size, *tensor.shape)

    def gather_into(self, rows: Tensor, row: Tensor) -> Tensor:
        """Write every rank's `row` (n,) to `rows` (ranks · n,), both contiguous; return it (*collective*)."""
        if self.group is None:
            return rows.copy_(row)
        with self.progress.during("all-gather"):
            dist.all_gather_into_tensor(rows, row, group=self.group)
        return rows

    def gather_variable_length(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's `tensor`, (n, …), in rank order (*collective*). n may differ between ranks."""
        lengths: list[int] = self.stack(torch.tensor(len(tensor))).tolist()
        if not any(lengths):
            return [tensor] * self.size
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        return [rows[:length] for rows, length in zip(self.stack(padded), lengths, strict=True)]

    def gather_array(self, *parts: np.ndarray) -> np.ndarray:
        """Return every rank's `parts` as a row of float64: (ranks, Σn_i) (*collective*).

        For host arrays, such as BatchNorm's statistics, without the overhead of tensors. Valid until the next
        collective, and read-only: it may be the shared memory itself.
        """
        if self.memory is not None:
            with self.progress.during("all-gather"):
                rows = self.memory.gather_array(parts)
            if rows is not None:
                return rows
        stacked: np.ndarray = self.stack(torch.from_numpy(np.concatenate(parts, dtype=np.float64))).numpy()
        return stacked

    def gather(self, item: Any) -> list[Any]:
        """Return every rank's `item`, small and JSON-able, in rank order (*collective*)."""
        if self.group is None:
            return [item]
        # JSON, not all_gather_object, which unpickles the bytes that a peer sends.
        text = torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)
        return [json.loads(encoded.numpy().tobytes()) for encoded in self.gather_variable_length(text)]

    def find_mismatch(self, facts: dict[str, Any]) -> tuple[int, str] | None:
        """Return the first rank whose `facts` differ from rank 0's, and the differences (*collective*).

        `facts` is {name: number or text}, compared by rank 0's names. Returns None if all ranks agree.
        """
        reference, *other_facts = self.gather(facts)
        for rank, rank_facts in enumerate(other_facts, start=1):
            pairs = ((name, rank_facts.get(name), expected) for name, expected in reference.items())
            differences = [
                f"{name} {value} (rank 0 has {expected})" for name, value, expected in pairs if value != expected
            ]
            if differences:
                return rank, ", ".join(differences)
        return None

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Overwrite `tensors` with rank 0's, in place (*collective*)."""
        if self.group is not None:
            for tensor in tensors:
                # Of an expanded dimension, one element in memory; torch sends only contiguous tensors.
                memory = tensor.detach()[tuple(slice(None if step else 1) for step in tensor.stride())]
                sent = memory.contiguous()
                with self.progress.during("broadcast"):  # one phase per tensor: a large model may take long
                    dist.broadcast(sent, src=0, group=self.group)
                if sent is not memory:
                    memory.copy_(sent)

    def barrier(self) -> None:
        """Return once every rank has called this (*collective*)."""
        # An all-reduce of one CPU number: NCCL's barrier would choose a device.
        with self.progress.during("barrier"):
            self.sum_(torch.zeros(1))

    def together(self, attempt: Callable[[], T]) -> T:
        """Return this rank's value of `attempt`, which must not communicate (*collective*).

        If it raises `RequestError` on any rank, every rank raises the message of the lowest such rank. Any other
        exception propagates at once: it is a bug, and ends the run.
        """
        refusal: RequestError | None = None
        try:
            result = attempt()
        except RequestError as error:
            refusal = error
        for message in self.gather(None if refusal is None else str(refusal)):
            if message is not None:
                raise RequestError(message) from refusal
        return result

    def from_main(self, attempt: Callable[[], T]) -> T:
        """Return rank 0's value of `attempt`, JSON-able, on all ranks (*collective*). Raises as `together` does."""
        value: T = self.gather(self.together(lambda: attempt() if self.is_main else None))[0]
        return value

    def close(self) -> None:
        """Leave the process group. The world cannot be used afterwards."""
        if self.memory is not None:
            self.memory.close()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)


def new_group(**options: Any) -> dist.ProcessGroup:
    """Return a new process group of all ranks (*collective*). See `torch.distributed.new_group` on `options`."""
    group = dist.new_group(**options)
    assert isinstance(group, dist.ProcessGroup)
    return group

"""Micro-batches that fit into memory (`--micro-batch auto`).

Without batch statistics, micro-batches are no part of the model, and their number may follow from the memory. Before
the first step, all ranks try the largest share of a micro-batch, and halve it while it does not fit on one of them.
A rank that runs out of memory later computes no further gradients of that batch, and still takes part in its exchange;
then all ranks know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor, nn

from .. import hardware
from ..batching import BatchPlan
from ..errors import RequestError, RunError, counted, ranks_named
from ..world.world import World

_STATE_TENSORS = 2  # of an optimizer such as AdamW, per parameter
_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "could not create a primitive")  # the latter is oneDNN's


class OutOfMemoryError(RunError):
    """A rank ran out of memory; raised alike on all ranks, before the step. `plan` has smaller micro-batches."""

    def __init__(self, message: str, plan: BatchPlan) -> None:
        super().__init__(message)
        self.plan = plan


@dataclass
class MemoryWatch:
    """Notes that this rank has run out of memory within `watched`, if it `is_on`."""

    is_on: bool = False
    has_run_out: bool = False
    cause: str = ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note an out-of-memory error of the block, which ends there."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not (self.is_on and _is_out_of_memory(error)):
                raise
            self.has_run_out, self.cause = True, str(error).partition("\n")[0]

    def check(self, world: World, plan: BatchPlan) -> None:
        """Raise `OutOfMemoryError` on all ranks if one has run out of memory (*collective*). The host waits."""
        if not self.is_on:
            return
        ranks = [rank for rank, has_run_out in enumerate(_stacked(world, self.has_run_out)) if has_run_out]
        if ranks:
            raise OutOfMemoryError(
                f"{ranks_named(ranks).capitalize()} ran out of memory at step {world.progress.step + 1} with "
                f"micro-batches of {counted(plan.largest_share, 'sample')} per rank",
                halved(plan),
            )


def fitted(plan: BatchPlan, world: World, compute: Callable[[int], None]) -> BatchPlan:
    """Return the plan with the largest micro-batches, by halves, that fit into each rank's memory (*collective*).

    `compute` computes the gradients of a number of samples. Raises `RequestError` if a single one does not fit, and on
    a CPU whose processes cannot be limited.
    """
    # All look before one takes memory, and have the same limit.
    free_bytes = int(world.stack(torch.tensor(hardware.free_memory_bytes(), device=world.device)).min())
    while True:
        watch = MemoryWatch(is_on=True)
        with watch.watched(), _limited(world, free_bytes):
            compute(plan.largest_share)
        if not any(_stacked(world, watch.has_run_out)):
            return plan
        plan = halved(plan, watch.cause)


def halved(plan: BatchPlan, cause: str = "") -> BatchPlan:
    """Return the plan with twice as many micro-batches. Raises `RequestError` if there are no more; `cause` is why."""
    most = plan.global_size // (plan.ranks * plan.devices)
    if plan.accumulation >= most:
        raise RequestError(
            f"--micro-batch auto: micro-batches of {counted(plan.largest_share, 'sample')} per rank do not fit into "
            f"memory{cause and f' ({cause})'}; take a smaller model, or --checkpoint-activations."
        )
    return replace(plan, accumulation=min(2 * plan.accumulation, most))


@contextlib.contextmanager
def unchanged(model: nn.Module, *, has_average: bool) -> Iterator[None]:
    """Drop the gradients that the block computes, and restore the buffers.

    Leaves room for an optimizer's state and for an average of the weights.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    room = [torch.empty_like(parameter) for parameter in parameters for _ in range(_STATE_TENSORS + has_average)]
    try:
        yield
    finally:
        room.clear()
        with torch.no_grad():
            for parameter in parameters:
                parameter.grad = None
            for buffer, saved in buffers:
                buffer.copy_(saved)


def no_loss(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return a loss (0-dim) of zero that depends on the parameters, for a rank that cannot compute its own."""
    return torch.stack([parameter.flatten()[:1].sum() * 0 for parameter in parameters if parameter.requires_grad]).sum()


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _TEXTS)


def _stacked(world: World, flag: bool) -> list[bool]:
    return [bool(value) for value in world.stack(torch.tensor(int(flag), device=world.device)).tolist()]


@contextlib.contextmanager
def _limited(world: World, free_bytes: int) -> Iterator[None]:
    """Limit a process on a CPU to its part of the free memory: Linux grants more, and ends processes that use it."""
    if world.device.type != "cpu":
        yield
        return
    used_bytes = getattr(psutil.Process().memory_info(), "data", None)
    if used_bytes is None:
        raise RequestError("--micro-batch auto needs a GPU or Linux; give a number.")
    import resource  # absent on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used_bytes + free_bytes // world.topology.local_size
    resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

"""What the tests on a GPU share.

`LOCKSTEP_REHEARSAL=1 pytest tests/gpu` runs on a CPU what does not depend on CUDA: whether the tests themselves hold.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lockstep.world.topology import Topology
from lockstep.world.world import World

IS_REHEARSAL = os.environ.get("LOCKSTEP_REHEARSAL") == "1"
DEVICE = torch.device("cpu") if IS_REHEARSAL else torch.device("cuda", 0)
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
needs_cuda = pytest.mark.skipif(IS_REHEARSAL, reason="needs CUDA itself")


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    """Skip without a GPU; set what --deterministic needs before CUDA starts, as the launchers do in a rank."""
    if not (IS_REHEARSAL or torch.cuda.is_available()):
        pytest.skip("needs an NVIDIA GPU that torch can use")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """Give one rank in a process group of NCCL and gloo, as ranks of a larger world have it."""
    if not IS_REHEARSAL:
        torch.cuda.set_device(DEVICE)
    try:
        yield World.join(Topology(), DEVICE, HashStore(), timeout_s=60)
    finally:  # a group that stays fails all tests after it
        if dist.is_initialized():
            dist.destroy_process_group()


def paired(world: World, other: Callable[[Tensor], Tensor] = torch.clone) -> World:
    """Return a rank of two, whose peer holds `other` of this rank's tensors.

    All that two ranks run is run, NCCL's exchange of a group of one included.
    """

    class Paired(World):
        def gather_into(self, rows: Tensor, row: Tensor) -> Tensor:
            own, peers = rows.chunk(2)
            World(Topology(), self.device, self.group).gather_into(own, row)
            peers.copy_(other(own))
            return rows

        def sum_(self, tensor: Tensor) -> Tensor:
            return super().sum_(tensor).add_(other(tensor))

    return Paired(Topology(size=2, local_size=2), world.device, world.group)


@contextlib.contextmanager
def never_waits() -> Iterator[None]:
    """Fail where the host waits for the GPU within the block."""
    if IS_REHEARSAL:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronize() -> None:
    """Wait for the device."""
    if not IS_REHEARSAL:
        torch.cuda.synchronize()

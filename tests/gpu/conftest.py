"""What the tests on a GPU share."""

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

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    """Skip without a GPU; set what --deterministic needs before CUDA starts, as the launchers do in a rank."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU that torch can use")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """Give one rank in a process group of NCCL and gloo, as ranks of a larger world have it."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    try:
        yield World.join(Topology(), device, HashStore(), timeout_s=60)
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
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

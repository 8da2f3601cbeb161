"""What ranks run in the launchers' tests; a module of its own, since started processes look it up by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.config.schema import RunConfig
from lockstep.errors import Stopped
from lockstep.world.world import World


def total(config: RunConfig, world: World) -> dict[str, Any]:
    """Return what every rank can say about the world."""
    topology = world.topology
    return {
        "sum": world.sum(torch.tensor([1.0, float(world.rank)])).tolist(),
        "ranks": world.gather([world.rank, topology.local_rank, topology.local_size]),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


def unpicklable(config: RunConfig, world: World) -> object:
    """Return what cannot be sent."""
    return lambda: 1


def fail(config: RunConfig, world: World) -> None:
    """Fail on rank 1 in the way that the config's data folder names; rank 0 waits for it in a collective."""
    world.barrier()
    if world.rank == 1:
        assert config.record.output is not None
        (config.record.output / "failing_since").write_text(str(time.time()))
        _FAILURES[config.data.dir.name]()
    world.sum(torch.ones(1))
    time.sleep(60)


def _raise() -> None:
    raise ValueError("labels reach 10")  # the line that the sentence names


_FAILURES = {"raise": _raise, "exit": lambda: sys.exit(3), "vanish": lambda: os._exit(7)}


def outlast(config: RunConfig, world: World) -> None:
    """Return on rank 0, and go on for a minute on rank 1."""
    time.sleep(60 * world.rank)


def fed(config: RunConfig, world: World) -> None:
    """Read from data workers, and stop while they go on."""
    samples = cast(Dataset[Tensor], torch.arange(1000.0).unbind())
    batches = iter(DataLoader(samples, batch_size=1, num_workers=2, persistent_workers=True))
    next(batches)
    world.barrier()
    raise Stopped("Enough.")


def lose(config: RunConfig, world: World) -> None:
    """Send rank 0 a signal, which the config's data folder names; the others wait for it."""
    world.barrier()
    if world.is_main:
        os.kill(os.getpid(), signal.Signals[config.data.dir.name])
    world.sum(torch.ones(1))


def read_long(config: RunConfig, world: World) -> None:
    """Kill rank 1; the others are in a long read of data, and in no collective."""
    world.progress.folder = config.record.output
    world.barrier()
    world.progress.enter("data")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

"""What ranks run in the launchers' tests; a module of its own, since started processes look it up by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.config import RunConfig
from lockstep.errors import Stopped
from lockstep.launchers import stores
from lockstep.launchers.claims import Claim
from lockstep.launchers.rendezvous import RollCall
from lockstep.world import World


def total(config: RunConfig, world: World) -> dict[str, Any]:
    """Return what every rank can say about the world."""
    topology = world.topology
    return {
        "sum": world.sum(torch.tensor([1.0, float(world.rank)])).tolist(),
        "ranks": world.gather([world.rank, topology.local_rank, topology.local_size, os.getpid()]),
        "threads": world.gather(torch.get_num_threads()),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "seed": config.seed,
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


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_FAILURES = {"raise": _raise, "exit": lambda: sys.exit(3), "vanish": lambda: os._exit(7), "killed": _killed}


def fed(config: RunConfig, world: World) -> None:
    """Read from data workers, and end in the way that the config's data folder names while they go on."""
    samples = cast(Dataset[Tensor], torch.arange(1000.0).unbind())
    batches = iter(DataLoader(samples, batch_size=1, num_workers=2, persistent_workers=True))
    next(batches)
    world.barrier()
    if config.data.dir.name == "stop":
        raise Stopped("Enough.")
    del batches


def lose(config: RunConfig, world: World) -> None:
    """Send a signal, which the config's data folder names, to the rank that its seed names; the others wait for it."""
    world.barrier()
    if world.rank == config.seed:
        os.kill(os.getpid(), signal.Signals[config.data.dir.name])
    world.sum(torch.ones(1))


def read_long(config: RunConfig, world: World) -> None:
    """Kill rank 1; the others are in a long read of data, and in no collective."""
    world.pulse.folder = config.record.output
    world.barrier()
    world.pulse.enter("data")
    if world.rank == 1:
        _killed()
    time.sleep(600)


def abort(config: RunConfig, world: World) -> None:
    """End rank 0 as NCCL's watchdog does where it has waited in vain; rank 1 hangs."""
    world.barrier()
    if world.rank == 0:
        os.abort()
    time.sleep(60)


def desert(path: str, rank: int, size: int) -> None:
    """Answer the roll call at a file, and end with code 3 before the process group is formed."""
    call = RollCall(stores.open_file(Path(path)), Claim(rank=rank, size=size, accelerator="cpu"))
    call.take(60)
    os._exit(3)

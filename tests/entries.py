"""What ranks run in the launchers' tests; a module of its own, since started processes look it up by name."""

from __future__ import annotations

import multiprocessing
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
from lockstep.errors import ProofError, RequestError, Stopped
from lockstep.interrupts import StopRequest
from lockstep.launchers import stores
from lockstep.launchers.claims import Claim
from lockstep.launchers.rendezvous import RollCall
from lockstep.world import World


def total(config: RunConfig, world: World) -> dict[str, Any]:
    """Return what every rank can say about the world."""
    ranks = world.sum(torch.tensor([1.0, float(world.rank)])).tolist()
    return {
        "sum": ranks,
        "ranks": world.gather([world.rank, world.topology.local_rank, world.topology.local_size, os.getpid()]),
        "threads": world.gather(torch.get_num_threads()),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "seed": config.seed,
    }


class _Unreadable:
    """What can be pickled, but not read again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("none",)


def unreadable(config: RunConfig, world: World) -> _Unreadable:
    """Return what no process can read."""
    return _Unreadable()


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


def _refuse() -> None:
    raise RequestError("The data set has no image.")


def _disprove() -> None:
    raise ProofError("Rank 1 differs in fc.weight.")


_FAILURES = {
    "raise": _raise,
    "exit": lambda: sys.exit(3),
    "vanish": lambda: os._exit(7),
    "killed": _killed,
    "refuse": _refuse,
    "disprove": _disprove,
}


def stoppable(config: RunConfig, world: World) -> None:
    """Say in a file that this rank runs, and stop on SIGTERM as the engine does."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    _note(config, world)
    while not world.max(torch.tensor(len(asked))):
        time.sleep(0.02)
    raise Stopped("Stopped after step 3; resume with --resume auto.")


def stubborn(config: RunConfig, world: World) -> None:
    """Say in files that this rank runs, with a data worker, and that it is asked to stop; and do not stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    samples = cast(Dataset[int], list(range(1000)))  # a list has all that a loader asks for
    loader = DataLoader(samples, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    signal.signal(signal.SIGTERM, lambda number, frame: (config.data.dir / f"asked_{world.rank}").touch())
    _note(config, world)
    time.sleep(120)


def fed(config: RunConfig, world: World) -> None:
    """Read from data workers, and end in the way that the config's data folder names while they go on."""
    samples = cast(Dataset[Tensor], torch.arange(1000.0).unbind())
    loader = DataLoader(samples, batch_size=1, num_workers=2, persistent_workers=True)
    next(batches := iter(loader))
    world.barrier()
    if config.data.dir.name == "stop":
        raise Stopped("Enough.")
    if config.data.dir.name == "raise":
        _refuse()
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


def busy(config: RunConfig, world: World) -> None:
    """Kill rank 1, while the others are in a long step and would hear a request to stop."""
    world.barrier()
    if world.rank == 1:
        _killed()
    with StopRequest():
        time.sleep(30)


def desert(path: str, rank: int, size: int) -> None:
    """Answer the roll call at a file, and end with code 3 before the process group is formed."""
    call = RollCall(stores.open_file(Path(path)), Claim(rank=rank, size=size, accelerator="cpu"))
    call.take(60)
    os._exit(3)


def _note(config: RunConfig, world: World) -> None:
    world.barrier()
    (config.data.dir / f"rank_{world.rank}").write_text(str(os.getpid()))


def started(config: RunConfig, world: World) -> str:
    """Return how this rank starts processes of its own, such as data workers."""
    return multiprocessing.get_start_method()

"""Ranks as processes of this host, started and watched by one parent that never imports torch.

They meet in memory of the parent's, where no other user can (see `memory`). The parent then waits for what each
rank reports (see `supervise.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .. import bounded, failures
from ..config import RunConfig
from ..errors import RequestError
from ..screen import Screen
from ..topology import Topology
from . import lifeline, memory, rank, stores
from .base import Entry
from .devices import processes
from .reports import UNGUARDED, Report, pickled
from .supervise import Supervisor, Worker


class SpawnLauncher:
    """Starts one process for each device of this host."""

    name = "spawn"

    def starts_here(self, config: RunConfig) -> bool:
        """Return True: it starts no rank elsewhere."""
        return True

    def detect(self, config: RunConfig, env: Mapping[str, str]) -> bool:
        """Return False: no environment asks for it; `auto` takes it where several processes are needed."""
        return False

    def launch(self, entry: Entry, config: RunConfig, env: Mapping[str, str]) -> Any | None:
        """Start the ranks, wait for all of them, and return rank 0's value.

        Raises the error of the rank that failed first; by then the others have been ended.
        """
        if config.parallel.nodes > 1:
            raise RequestError(
                f"--launcher spawn starts processes on this host alone, but --nodes {config.parallel.nodes} were "
                "asked for; start the command on each node with torchrun, or give --init-method."
            )
        payload = packed(entry, config)
        size = processes(config, env)
        stall_timeout_s = config.parallel.stall_timeout
        on_gpus = config.parallel.accelerator == "cuda"
        with (
            Supervisor(
                failures.again(config), stall_timeout_s=stall_timeout_s, aborts_when_alone=on_gpus
            ) as supervisor,
            memory.file() as meeting,
        ):
            _say(f"starting {size} {'process' if size == 1 else 'processes'} …")
            for index in range(size):
                topology = Topology(rank=index, size=size, local_rank=index, local_size=size)
                supervisor.add(_start(topology, payload, meeting))
            return supervisor.wait()


def _say(words: str) -> None:
    """Say on a terminal what happens during the seconds in which ranks import torch; a log needs no such line."""
    screen = Screen(stderr=True)
    if screen.is_terminal:
        screen.say((words, "dim"))


def packed(entry: Entry, config: RunConfig) -> bytes:
    """Return both as other processes of this program can read them.

    Raises `RequestError` for an entry, or a program, that they could not find.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)  # a rank that imports the script which started it, and is told to start ranks in turn
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and script.startswith("<"):
        raise RequestError(
            f"A script that is read from {script} cannot start other processes, each of which has to read it too; "
            "save it to a file and start that."
        )
    called = getattr(entry, "function", entry)  # what an entry of ours calls
    if script is None and getattr(called, "__module__", "") == "__main__":
        raise RequestError(
            f"{getattr(called, '__qualname__', called)!s} was defined in an interactive session, where other processes "
            "do not find it; define it at the top level of a module and import it."
        )
    try:
        return pickle.dumps((entry, config))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RequestError(
            f"{getattr(called, '__qualname__', called)!s} cannot be run in other processes ({error}); "
            "define it at the top level of a module."
        ) from error


def _start(topology: Topology, payload: bytes, meeting: Path) -> Worker:
    context = multiprocessing.get_context("spawn")
    hear, tell = context.Pipe(duplex=False)
    held, keep = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve, args=(topology, payload, tell, held, meeting), name=f"lockstep-rank-{topology.rank}"
    )
    with lifeline.starting_children():
        process.start()
    tell.close()
    held.close()
    return Worker(topology.rank, process, hear, keep)


def _serve(topology: Topology, payload: bytes, tell: Connection, held: Connection, meeting: Path) -> None:
    """Be one rank: run the entry, report its value or its failure to the parent."""
    lifeline.settle()
    lifeline.tie_to_parent(held)
    be_rank(topology, payload, tell, lambda timeout_s: stores.open_memory(meeting))


def be_rank(topology: Topology, payload: bytes, tell: Connection, opens: Callable[[float], stores.Meeting]) -> None:
    """Run the pickled (entry, config) of `payload` as a rank, and tell its `Report`; a failure ends the process.

    `opens` opens the store, waiting for it no longer than so many seconds.
    """
    config = RunConfig()
    try:
        entry, config = pickle.loads(payload)  # from our own parent, through a pipe that nobody else holds
        value = rank.run_met(
            entry,
            config,
            os.environ,
            lambda: opens(config.parallel.timeout),
            index=topology.rank,
            size=topology.size,
            known=topology,
            tell=lambda failure: tell.send(Report(topology.rank, failure=failure)),
        )
        report = Report(topology.rank, value=pickled(value))
    except BaseException as error:
        tell.send(Report(topology.rank, failure=failures.account(error, topology.rank, config)))
        rank.vanish(error)
    tell.send(report)
    if bounded.any_left():
        bounded.leave(0)

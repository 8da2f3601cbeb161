"""Ranks as processes of this host, started and watched by one parent that never imports torch.

The parent binds a free port on the loopback interface and hands the listening socket itself to rank 0: nobody can
take the port in between. It then waits for what each rank reports (see `supervise.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console

from .. import bounded, failures
from ..config import RunConfig
from ..errors import RequestError
from ..topology import Topology
from . import lifeline, rank, stores
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
            stores.listening_on_loopback() as listener,
        ):
            _say(f"starting {size} {'process' if size == 1 else 'processes'} …")
            for topology in _topologies(size, *listener.getsockname()):
                supervisor.add(_start(topology, payload, listener))
            listener.close()
            return supervisor.wait()


def _say(words: str) -> None:
    """Say on a terminal what happens during the seconds in which ranks import torch; a log needs no such line."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        console.print(words, style="dim")


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
    if script is None and getattr(entry, "__module__", "") == "__main__":
        raise RequestError(
            f"{getattr(entry, '__qualname__', entry)!s} was defined in an interactive session, where other processes "
            "do not find it; define it at the top level of a module and import it."
        )
    try:
        return pickle.dumps((entry, config))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RequestError(
            f"{getattr(entry, '__qualname__', entry)!s} cannot be run in other processes ({error}); "
            "define it at the top level of a module."
        ) from error


def _topologies(size: int, address: str, port: int) -> list[Topology]:
    return [
        Topology(rank=index, size=size, local_rank=index, local_size=size, address=address, port=port)
        for index in range(size)
    ]


def _start(topology: Topology, payload: bytes, listener: socket.socket) -> Worker:
    context = multiprocessing.get_context("spawn")
    hear, tell = context.Pipe(duplex=False)
    held, keep = context.Pipe(duplex=False)
    handed = listener if topology.is_main else None
    process = context.Process(
        target=_serve, args=(topology, payload, tell, held, handed), name=f"lockstep-rank-{topology.rank}"
    )
    with lifeline.interrupts_held_back():
        process.start()
    tell.close()
    held.close()
    return Worker(topology.rank, process, hear, keep)


def _serve(
    topology: Topology, payload: bytes, tell: Connection, held: Connection, listener: socket.socket | None
) -> None:
    """Be one rank: run the entry, report its value or its failure to the parent."""
    lifeline.settle()
    lifeline.tie_to_parent(held)
    be_rank(topology, payload, tell, listener)


def be_rank(topology: Topology, payload: bytes, tell: Connection, listener: socket.socket | None) -> None:
    """Run the pickled (entry, config) of `payload` as a rank, and tell its `Report`; a failure ends the process.

    Rank 0 has the socket that listens at the topology's address; the others connect to it.
    """
    config = RunConfig()
    try:
        entry, config = pickle.loads(payload)  # from our own parent, through a pipe that nobody else holds
        value = rank.run_met(
            entry,
            config,
            os.environ,
            lambda: _open(topology, listener, config.parallel.timeout),
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


def _open(topology: Topology, listener: socket.socket | None, timeout_s: float) -> stores.Meeting:
    if listener:
        return stores.adopt(listener, stores.address_of(topology.address, topology.port))
    return stores.connect(topology.address, topology.port, timeout_s)

"""A rank under Ray: an actor that starts the rank as a process of its own, and listens to it.

Ray runs an actor's methods in threads, where Python hears no signals, and beside a runtime with handlers and forks of
its own. In a process of its own a rank is what it is under the other launchers: it saves on SIGTERM, its death has an
exit code, it ends with the actor, and what it started ends with it. The actor itself imports no torch. These functions
run on Ray's nodes and may read the environment there.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from ..errors import Stopped
from ..failures import Failure
from ..topology import Topology
from . import lifeline
from .spawn import be_rank
from .supervise import Report

_CHILD = "import sys; from lockstep.launchers.ray_actor import serve; serve(*map(int, sys.argv[1:]))"
_READ_BYTES = 1 << 16


class Rank:
    """One rank's process, and what it has said. Ray makes an actor of this."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._listener: socket.socket | None = None
        self._said: list[tuple[int, bytes]] = []
        self._asked: list[int] = []
        self._lock = threading.Lock()

    def where(self) -> tuple[str, str]:
        """Return this node's address, as Ray knows it, and its name."""
        import ray.util

        return ray.util.get_node_ip_address(), socket.gethostname()

    def listen(self, host: str) -> tuple[str, int]:
        """Take a free port of `host`, an address of this node, for the ranks to meet at; return address and port."""
        self._listener = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
        address, port = self._listener.getsockname()[:2]
        return address, port

    def run(self, topology: Topology, payload: bytes, folder: str, paths: Sequence[str], again: str) -> Report:
        """Run the rank to its end in `folder`, where this node has it, and return its last word.

        `payload` is the pickled (entry, config), `paths` are the driver's for modules; `again` says how to go on.
        """
        ours, theirs = Pipe()
        held, keep = Pipe(duplex=False)
        handed = [] if self._listener is None else [self._listener.fileno()]
        passed = (theirs.fileno(), held.fileno(), *handed)
        pipe = subprocess.PIPE if topology.is_main else None  # the others' goes to Ray's logs
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *map(str, passed)],
            pass_fds=passed,
            cwd=folder if Path(folder).is_dir() else None,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        with self._lock:
            self._child = child
            for number in self._asked:
                child.send_signal(number)
        theirs.close()
        held.close()
        if self._listener is not None:
            self._listener.close()
        pumps = [self._pump(1, child.stdout), self._pump(2, child.stderr)]
        report = _heard(ours, pickle.dumps((topology, payload, list(paths))))
        code = child.wait()
        keep.close()
        for pump in pumps:
            pump.join()
        return report or Report(topology.rank, failure=self._obituary(topology.rank, code, again))

    def signal(self, number: int) -> None:
        """Send the rank's process a signal, as soon as there is one."""
        with self._lock:
            self._asked.append(number)
            if self._child is not None:
                self._child.send_signal(number)

    def read(self) -> list[tuple[int, bytes]]:
        """Return what the rank has said since the last call: (1 for stdout or 2 for stderr, bytes)."""
        said, self._said = self._said, []
        return said

    def _pump(self, number: int, pipe: IO[bytes] | None) -> threading.Thread:
        def pump() -> None:
            while pipe is not None and (data := os.read(pipe.fileno(), _READ_BYTES)):
                self._said.append((number, data))

        thread = threading.Thread(target=pump, daemon=True)
        thread.start()
        return thread

    def _obituary(self, rank: int, code: int, again: str) -> Failure:
        """Return the failure of a rank that died without a word."""
        if self._asked and code == -signal.SIGTERM:
            return Failure(rank, Stopped.__name__, "Stopped outside of training; there was nothing to save.", "")
        who = f"Rank {rank} on node {self.where()[0]}"
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return Failure(rank, "", f"{who} was killed by {signal.Signals(-code).name}{hint}; {again}.", "")
        return Failure(rank, "", f"{who} ended with exit code {code} and without a word; {again}.", "")


def _heard(ours: Connection, payload: bytes) -> Report | None:
    """Send the process its work, and return its report; None where it died without one."""
    with contextlib.suppress(EOFError, OSError):
        ours.send_bytes(payload)
        report: Report = pickle.loads(ours.recv_bytes())  # from our own child, through a pipe that nobody else holds
        return report
    return None


def serve(tell: int, held: int, listener: int | None = None) -> None:
    """Be the process of a rank: its pipes and, on rank 0, the socket to listen at, by their descriptors."""
    lifeline.tie_to_parent(Connection(held, writable=False))
    pipe = Connection(tell)
    topology, payload, paths = pickle.loads(pipe.recv_bytes())  # from the actor, our parent
    sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]
    be_rank(topology, payload, pipe, None if listener is None else socket.socket(fileno=listener))

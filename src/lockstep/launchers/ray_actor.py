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
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from ..failures import Failure
from ..topology import Topology
from . import lifeline, stores
from .frozen import Frozen
from .reports import GRACE_S, LEAVE_S, Report
from .spawn import be_rank

_CHILD = "import sys; from lockstep.launchers.ray_actor import serve; serve(*map(int, sys.argv[1:]))"
_READ_BYTES = 1 << 16
_LOOK_S = 0.05
_DRAIN_S = 1.0  # for what the rank has said last to be read, where others hold its stdout open


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

    def run(
        self,
        topology: Topology,
        payload: bytes,
        secret: bytes,
        folder: str,
        paths: Sequence[str],
        patience_s: float,
        again: str,
    ) -> Report | int:
        """Run the rank to its end in `folder`, where this node has it; return its last word, or else its exit code.

        `payload` is the pickled (entry, config), `secret` the job's, `paths` are the driver's for modules; `patience_s`
        and `again` are as `Frozen` has them. What the rank has started ends with it, and whatever holds its pipes is
        not waited for.
        """
        ours, theirs = Pipe()
        held, keep = Pipe(duplex=False)
        with ours, keep:
            with theirs, held:
                child = self._start(topology, folder, theirs, held)
            pumps = [self._pump(1, child.stdout), self._pump(2, child.stderr)]
            frozen = Frozen(patience_s, again)
            report = _heard(
                ours,
                child,
                pickle.dumps((topology, payload, secret, list(paths))),
                lambda: frozen.look({topology.rank: child.pid}),
            )
            code = _ended(child, LEAVE_S if report and not report.failure else GRACE_S)
            with self._lock:
                self._child = None
            for pump in pumps:
                pump.join(_DRAIN_S)
        return report or code

    def signal(self, number: int) -> None:
        """Send the rank's process a signal, as soon as there is one."""
        with self._lock:
            self._asked.append(number)
            if self._child is not None:
                self._child.send_signal(number)

    def end(self) -> None:
        """Kill the rank's process, if there is one, with what it has started."""
        with self._lock:
            if self._child is not None:
                lifeline.end_group(self._child.pid)

    def read(self) -> list[tuple[int, bytes]]:
        """Return what the rank has said since the last call: (1 for stdout or 2 for stderr, bytes)."""
        with self._lock:
            said, self._said = self._said, []
        return said

    def _start(self, topology: Topology, folder: str, tell: Connection, held: Connection) -> subprocess.Popen[bytes]:
        handed = [] if self._listener is None else [self._listener.fileno()]
        passed = (tell.fileno(), held.fileno(), *handed)
        pipe = subprocess.PIPE if topology.is_main else None  # the others' goes to Ray's logs
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, *map(str, passed)],
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
        if self._listener is not None:
            self._listener.close()
        return child

    def _pump(self, number: int, pipe: IO[bytes] | None) -> threading.Thread:
        def pump() -> None:
            with pipe or contextlib.nullcontext():
                while pipe is not None and (data := os.read(pipe.fileno(), _READ_BYTES)):
                    with self._lock:
                        self._said.append((number, data))

        thread = threading.Thread(target=pump, daemon=True)
        thread.start()
        return thread


def _heard(
    ours: Connection, child: subprocess.Popen[bytes], payload: bytes, failed: Callable[[], Failure | None]
) -> Report | None:
    """Send the process its work, and return its report; None where it died without one.

    `failed` is asked again and again for what the process cannot tell itself. Its death is looked for as well: a
    process that it has forked holds the pipe too, and may live on.
    """
    with contextlib.suppress(EOFError, OSError):
        ours.send_bytes(payload)
        while not ours.poll(_LOOK_S):
            if child.poll() is not None and not ours.poll():
                return None
            if failure := failed():
                return Report(failure.rank, failure=failure)
        report: Report = pickle.loads(ours.recv_bytes())  # from our own child, through a pipe that no stranger holds
        return report
    return None


def _ended(child: subprocess.Popen[bytes], wait_s: float) -> int:
    """Give the process `wait_s` seconds to end, kill what is left of it and what it started; return its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(wait_s)
    lifeline.end_group(child.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(GRACE_S)
    return -signal.SIGKILL  # which a disk that hangs holds up


def serve(tell: int, held: int, listener: int | None = None) -> None:
    """Be the process of a rank: its pipes and, on rank 0, the socket to listen at, by their descriptors."""
    lifeline.tie_to_parent(Connection(held, writable=False))
    pipe = Connection(tell)
    topology, payload, secret, paths = pickle.loads(pipe.recv_bytes())  # from the actor, our parent
    sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]

    def opens(timeout_s: float) -> stores.Meeting:
        if listener is None:
            return stores.connect(topology.address, topology.port, timeout_s, secret=secret)
        where = stores.address_of(topology.address, topology.port)
        return stores.adopt(socket.socket(fileno=listener), where, secret=secret)

    be_rank(topology, payload, pipe, opens)

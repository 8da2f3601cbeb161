"""Where ranks meet: torch's key-value stores, opened so that whatever can go wrong is one sentence in bounded time.

torch's own ways of opening one hang or crash on bad input: its TCP client waits for ever for a server that stays
silent, its file store never returns for a folder that does not exist (nor lets other threads run meanwhile), and
ends the process on a file that holds something else. So each thing is looked at before torch is let near it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..errors import RequestError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed re-exports it unseen by type checkers

T = TypeVar("T")

_PREFIX = "lockstep"  # parts our keys from those of others who may use the same store
_RETRY_S = 0.2
_RESOLVE_S = 10.0  # a name may appear late (a cluster's DNS); a wrong one should not take the whole time-out
_PROBE_S = 5.0
_FILE_BEGINS = b"refcount/"  # the first key in every file of torch's FileStore
_STORE_S = timedelta(seconds=60)  # for one request to the store; the roll call has its own limit


@dataclass(frozen=True)
class Meeting:
    """An open store, and how to speak of it."""

    store: Store
    where: str
    """In the user's words: tcp://HOST:PORT or file:///PATH."""
    hosted: bool = False
    """Whether this process serves the store, so that the others lose it when this process ends."""
    host: str = ""
    """The host that serves the store; empty for a file."""
    file: Path | None = None


def serve(host: str, port: int, timeout_s: float) -> Meeting:
    """Open the store that the other ranks connect to, listening on `host`'s address alone.

    Where another process serves a lockstep store there already, return that one: the roll call then tells who.
    """
    where = address_of(host, port)
    try:
        listener = _listen(host, port, timeout_s)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and (taken := _taken(host, port)):
            return taken
        raise RequestError(f"{where}: rank 0 cannot listen there: {_why_not(error)}") from error
    return adopt(listener, where)


def adopt(listener: socket.socket, where: str) -> Meeting:
    """Open a store on a socket that listens already."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    store = TCPStore(host, port, is_master=True, master_listen_fd=descriptor, wait_for_workers=False, timeout=_STORE_S)
    return Meeting(PrefixStore(_PREFIX, store), where, hosted=True, host=host)


def connect(host: str, port: int, timeout_s: float, *, under: str = "") -> Meeting:
    """Open the store that rank 0, or an agent, serves at the address; wait for it at most `timeout_s` seconds.

    `under` parts the keys from those of an earlier start of the ranks, where the store outlives them.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    where = address_of(host, port)
    deadline = time.monotonic() + timeout_s
    _wait_for_listener(host, port, deadline, timeout_s)
    left_s = max(_PROBE_S, deadline - time.monotonic())
    try:
        limit = timedelta(seconds=left_s)
        store = _within(left_s, lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))
    except (TimeoutError, RuntimeError) as error:
        raise RequestError(
            f"{where}: something answers there, but not the store of a rank 0; is another service using the port?"
        ) from error
    return Meeting(PrefixStore(f"{_PREFIX}/{under}" if under else _PREFIX, store), where, host=host)


def open_file(path: Path) -> Meeting:
    """Open a store in a file that all ranks can reach; it is removed when they have all left.

    Raises `RequestError` where the file cannot be written, or holds something that is not such a store.
    """
    from torch._C._distributed_c10d import FileStore, PrefixStore

    where = f"file://{path}"
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise RequestError(f"{where} is not a plain file; give the path of one that does not exist yet.")
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            file.seek(0)
            beginning = file.read(32)
            fcntl.flock(file, fcntl.LOCK_UN)
    except OSError as error:
        raise RequestError(
            f"{where} cannot be opened for writing and locking ({error.strerror}); "
            "give a path in an existing folder that every rank can write to."
        ) from error
    if beginning and _FILE_BEGINS not in beginning:
        raise RequestError(f"{where} exists and is not a meeting place of ranks; give a path that does not exist yet.")
    # A world size of -1 keeps torch from removing the file: the roll call does, when it knows that all have left.
    return Meeting(PrefixStore(_PREFIX, FileStore(str(path), -1)), where, file=path)


def address_of(host: str, port: int) -> str:
    """Return tcp://HOST:PORT, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _listen(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a socket that listens on the first of the host's addresses that this machine has."""
    failed = OSError(errno.EADDRNOTAVAIL, "no address")
    for family, address in _resolve(host, port, timeout_s):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            listener.close()
            failed = error
        else:
            return listener
    raise failed


def _resolve(host: str, port: int, timeout_s: float) -> list[tuple[int, tuple[str, int]]]:
    """Return the (family, socket address) pairs of a name, IPv4 first."""
    deadline = time.monotonic() + min(timeout_s, _RESOLVE_S)
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RequestError(
                    f"{address_of(host, port)}: the name {host} does not resolve here ({error.strerror}); "
                    "give an address, or add the name to /etc/hosts or the DNS."
                ) from error
            time.sleep(_RETRY_S)
        else:
            pairs = [(int(family), (str(where[0]), int(where[1]))) for family, _, _, _, where in found]
            return sorted(pairs, key=lambda pair: pair[0] != socket.AF_INET)


def _why_not(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program uses the port; take another one on every rank."
    if error.errno == errno.EADDRNOTAVAIL:
        return "the address is not one of this machine; give the address of the machine that rank 0 runs on."
    if error.errno == errno.EACCES:
        return "ports below 1024 need privileges; take a higher one on every rank."
    return f"{error.strerror}."


def _taken(host: str, port: int) -> Meeting | None:
    """Return the lockstep store that another process serves at the address, None if it is anything else."""
    with contextlib.suppress(RequestError):
        meeting = connect(host, port, _PROBE_S)
        if meeting.store.check(["claim/0"]):
            return meeting
    return None


def _wait_for_listener(host: str, port: int, deadline: float, timeout_s: float) -> None:
    addresses = _resolve(host, port, timeout_s)
    while True:
        for family, address in addresses:
            try:
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.settimeout(max(_RETRY_S, deadline - time.monotonic()))
                    probe.connect(address)
                    return
            except OSError as error:
                why = error.strerror or str(error)
        if time.monotonic() >= deadline:
            raise RequestError(
                f"{address_of(host, port)}: nothing answers there within --timeout {timeout_s:g} s ({why}); "
                "is rank 0 running, is the address its own, and does a firewall let the port through?"
            )
        time.sleep(_RETRY_S)


def _within(limit_s: float, function: Callable[[], T]) -> T:
    """Return `function()`; raise TimeoutError if it takes longer, and leave it behind in a thread."""
    answers: list[T] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            answers.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return answers[0]


@contextlib.contextmanager
def listening_on_loopback() -> Iterator[socket.socket]:
    """Hold a free port of the loopback interface; the socket itself is handed on, so nobody can take it between."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        yield listener

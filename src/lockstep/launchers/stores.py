"""Where ranks meet: torch's key-value stores, opened so that whatever can go wrong is one sentence in bounded time.

torch's own ways of opening one hang or crash on bad input: its TCP client waits for ever for a server that stays
silent and prints its own stack where another service answers, its file store never returns for a folder that does
not exist (nor lets other threads run meanwhile), and ends the process on a file that holds something else. So each
thing is looked at before torch is let near it. A TCP store is known by its answer to the greeting of torch's client.

Once it listens, torch's server bears what strangers send it (HTTP, TLS, random bytes, half a greeting: it waits for
more or closes), but writes a line on stderr for each one that is gone before it looks, as a port scan is, and a stack
of 16 lines for each whose words make no sense. See `adopt` for what keeps them off.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import AbsentError, RequestError
from ..notes import Notes
from . import meeting_files, names
from .names import Address
from .names import address_of as address_of  # where others look for it
from .starts import Starts
from .variables import having, unset

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed re-exports it unseen by type checkers

QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""What torch reads when it is imported: its warnings, about strangers and lost peers, are told in our words."""
_PREFIX = "lockstep"  # parts our keys from those of others who may use the same store
_RETRY_S = 0.2
_PROBE_S = 5.0
_ANSWER_S = 1.0  # for a store that has answered before
_SILENCE_S = 30  # for whoever connects to say something
_NONCE = b"\r\n\r\n"  # a store returns it; a service that reads lines is moved to say what it is instead
_GREETING = b"\x00" + 0x3C85F7CE.to_bytes(4, "little") + b"\x0d" + _NONCE
"""What torch's client says first: VALIDATE with a magic number, and PING (c10d/TCPStoreBackend.hpp)."""
_STORE_S = timedelta(seconds=60)  # for the server to wait for a key; a server that is stopped is waited for without end


@dataclass(frozen=True)
class Meeting:
    """An open store, and how to speak of it."""

    store: Store
    where: str
    """In the user's words: tcp://HOST:PORT, file:///PATH, or that it is this host's memory."""
    hosted: bool = False
    """Whether this process serves the store, so that the others lose it when this process ends."""
    host: str = ""
    """The host that serves the store; empty for a file."""
    port: int = 0
    file: Path | None = None
    memory: Path | None = None
    """Where the file lies in memory, of the process that has started the ranks."""
    notes: Notes | None = None
    """What outlives this start of the ranks, where an agent has started them."""
    server: Address | None = None
    """Where another process serves the store."""
    starts: Starts | None = None
    """Where ranks find out themselves which start this is."""
    caution: str = ""
    """What may keep others from coming, to end a sentence with."""

    def bounded(self, limit_s: float) -> Store:
        """Return the store, in which no request takes longer than that where another process serves it."""
        return self.store if self.server is None else _bounded(self.store, limit_s)

    def is_open(self) -> bool:
        """Return whether the store still answers; torch prints its own stack where one does not."""
        if place := self.file or self.memory:
            return place.exists()  # torch waits for one that does not
        if self.server is None:
            return True
        try:
            return bool(_greet(self.server, _ANSWER_S))
        except OSError:
            return False


class StoredNotes:
    """Notes in the agents' store, which all starts of a job's ranks share (see `notes`)."""

    def __init__(self, store: Store, job: str) -> None:
        from .bounded_store import KeptPrefixStore  # late: it imports torch

        self._store = KeptPrefixStore(f"{job}/lasting", store)

    def read(self, name: str) -> str:
        """Return the text, "" where there is none."""
        return self._store.get(name).decode() if self._store.check([name]) else ""

    def write(self, name: str, text: str) -> None:
        """Keep the text under this name, in the place of an earlier one."""
        self._store.set(name, text)


def open_memory(path: Path, notes: Notes | None = None) -> Meeting:
    """Open a store in a file of `memory.file()`; `notes` are what outlives this start of the ranks, if anything does.

    A rank that is stopped while it writes there keeps the others waiting, so that no request takes longer than some
    seconds.
    """
    _import_torch()
    from torch._C._distributed_c10d import FileStore, PrefixStore

    store = _bounded(PrefixStore(_PREFIX, FileStore(str(path), -1)), _PROBE_S)
    return Meeting(store, "this host's memory", memory=path, notes=notes)


def alone() -> Meeting:
    """Return a store of this process alone, for an agent that has only itself to agree with."""
    from torch._C._distributed_c10d import HashStore

    return Meeting(HashStore(), "this host", hosted=True, host="127.0.0.1")


def serve(host: str, port: int, timeout_s: float, *, secret: bytes = b"", apart: bool = False) -> Meeting:
    """Open the store that the other ranks connect to, listening on `host`'s address alone.

    Those who do not have the `secret` write there in vain (see `sealed_store`). `apart` says that ranks of other hosts
    are to come.
    """
    where = address_of(host, port)
    try:
        listener = _listen(host, port, timeout_s)
    except OSError as error:
        raise RequestError(f"{where}: rank 0 cannot listen there: {_why_not(error)}") from error
    caution = names.unreachable(host, listener.getsockname()[0])
    if apart and caution:
        listener.close()
        raise RequestError(f"{where}: ranks of other nodes are to come{caution}.")
    return adopt(listener, where, caution, secret=secret)


def join(host: str, port: int, timeout_s: float, *, secret: bytes = b"") -> Meeting:
    """Open the store of several agents: serve it where the address is this host's and nobody does, else connect."""
    where = address_of(host, port)
    try:
        listener = _listen(host, port, timeout_s)
        return adopt(listener, where, names.unreachable(host, listener.getsockname()[0]), secret=secret)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise RequestError(f"{where}: this agent cannot listen there: {_why_not(error)}") from error
    return connect(host, port, timeout_s, secret=secret)


def adopt(listener: socket.socket, where: str, caution: str = "", *, secret: bytes = b"") -> Meeting:
    """Open a store on a socket that listens already."""
    _import_torch()
    from torch._C._distributed_c10d import TCPStore

    if hasattr(socket, "TCP_DEFER_ACCEPT"):
        # Linux keeps connections to itself until something is said: who scans ports, or sits there, is never let in.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENCE_S)
    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    store = TCPStore(host, port, is_master=True, master_listen_fd=descriptor, wait_for_workers=False, timeout=_STORE_S)
    return Meeting(_sealed(store, secret)(_PREFIX), where, hosted=True, host=host, port=port, caution=caution)


def _import_torch() -> None:
    """Import torch with its C++ code left its errors alone: a program that has imported it keeps its warnings."""
    with having(unset(QUIET_TORCH)):
        import torch  # noqa: F401


def connect(
    host: str,
    port: int,
    timeout_s: float,
    *,
    secret: bytes = b"",
    job: str = "",
    start: str = "",
    place: tuple[int, int] | None = None,
    apart: bool = False,
) -> Meeting:
    """Open the store that rank 0, or an agent, serves at the address; wait for it at most `timeout_s` seconds.

    Where an agent serves it, the store outlives the ranks: `start` parts their keys from those of earlier starts of the
    same `job`; where nobody tells it, whoever has this `place` (rank, size) finds out (see `starts`). `apart` says that
    it is served on another host.
    """
    _import_torch()
    from torch._C._distributed_c10d import TCPStore

    where = address_of(host, port)
    deadline = time.monotonic() + timeout_s
    server = _wait_for_store(host, port, deadline, timeout_s, apart=apart)
    limit = timedelta(seconds=max(_PROBE_S, deadline - time.monotonic()))
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        sealed = _sealed(store, secret)
        of_job = sealed(f"{_PREFIX}/{job}" if start or place else _PREFIX)
        starts = Starts(_bounded(of_job, timeout_s), *place) if place else None
    except RuntimeError as error:
        raise (AbsentError if start or place else RequestError)(_not_a_store(where)) from error
    caution = names.unreachable(host, server[1][0])
    if not start and not place:
        return Meeting(of_job, where, host=host, port=port, server=server, caution=caution)
    own, notes = sealed(f"{_PREFIX}/{job}/{starts.name if starts else start}"), StoredNotes(sealed(_PREFIX), job)
    return Meeting(own, where, host=host, notes=notes, server=server, starts=starts)


def _sealed(store: Store, secret: bytes) -> Callable[[str], Store]:
    """Return what gives the part of the store under a prefix, in which the notes of strangers count for nothing."""
    from torch._C._distributed_c10d import PrefixStore

    from .sealed_store import Seal, SealedStore  # late: it imports torch

    seal = Seal(secret)
    return lambda prefix: SealedStore(PrefixStore(prefix, store), seal, prefix)


def _bounded(store: Store, limit_s: float) -> Store:
    from .bounded_store import BoundedStore  # late: it imports torch

    return BoundedStore(store, limit_s)


def open_file(path: Path, *, clears: bool = False) -> Meeting:
    """Open a store in a file that all ranks can reach; it is removed when they have all left.

    Raises `RequestError` where the file cannot be written, or holds something that is not such a store, or, unless
    this start `clears` it, one that a killed rank has left half written.
    """
    meeting_files.check(path, clears=clears)
    _import_torch()
    from torch._C._distributed_c10d import FileStore, PrefixStore

    # A world size of -1 keeps torch from removing the file: the roll call does, when it knows that all have left.
    return Meeting(PrefixStore(_PREFIX, FileStore(str(path), -1)), f"file://{path}", file=path)


def _listen(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a socket that listens on the first of the host's addresses that this machine has."""
    failed = OSError(errno.EADDRNOTAVAIL, "no address")
    for family, address in names.resolve(host, port, timeout_s):
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


def _why_not(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process uses the port, such as a second rank 0; take another one on every rank."
    if error.errno == errno.EADDRNOTAVAIL:
        return "the address is not one of this machine; give the address of the machine that rank 0 runs on."
    if error.errno == errno.EACCES:
        return "ports below 1024 need privileges; take a higher one on every rank."
    return f"{error.strerror}."


def _wait_for_store(host: str, port: int, deadline: float, timeout_s: float, *, apart: bool) -> Address:
    """Return the address at which a store answers, once one does.

    Raises `RequestError` if nothing listens there in time, or something else; and at once, where rank 0 is on another
    host, if the name means this one.
    """
    addresses = names.resolve(host, port, timeout_s)
    if apart and names.to_itself(addresses):
        raise RequestError(f"{address_of(host, port)}: rank 0 is on another host{names.misnamed(host, addresses)}.")
    patient_until = min(deadline, time.monotonic() + _PROBE_S)
    why = ""
    while True:
        for address in addresses:
            try:
                answer = _greet(address, max(_RETRY_S, deadline - time.monotonic()))
            except OSError as error:
                why = error.strerror or str(error)
                continue
            if answer == _NONCE or not _greeting_is_torchs():
                return address
            if answer is None:
                raise AbsentError(
                    f"{address_of(host, port)}: whoever listens there said nothing within --timeout {timeout_s:g} s; "
                    "was rank 0 stopped, or is another service using the port?"
                )
            # The store of a run that is just ending closes too; the next one may open at the same address.
            if answer != b"" or time.monotonic() >= patient_until:
                raise RequestError(_not_a_store(address_of(host, port)))
            why = "it closes"
        if time.monotonic() >= deadline:
            raise AbsentError(
                f"{address_of(host, port)}: nothing answers there within --timeout {timeout_s:g} s ({why})"
                f"{names.misnamed(host, addresses)}; "
                "is rank 0 running, is the address its own, and does a firewall let the port through?"
            )
        time.sleep(_RETRY_S)


def _greet(address: Address, wait_s: float) -> bytes | None:
    """Return the first bytes that come back for a greeting, empty if the other side closes, None if it stays silent.

    Raises `OSError` where nobody listens. A rank 0 that listens may take seconds until its store answers.
    """
    family, where = address
    with socket.socket(family, socket.SOCK_STREAM) as peer:
        peer.settimeout(wait_s)
        peer.connect(where)
        try:
            peer.sendall(_GREETING)
            return peer.recv(len(_NONCE))
        except TimeoutError:
            return None
        except ConnectionError:
            return b""


def _greeting_is_torchs() -> bool:
    """Return whether this version of torch serves stores that answer the greeting; else nothing follows from it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        meeting = adopt(listener, "")
        return meeting.hosted and _greet((socket.AF_INET, address), _PROBE_S) == _NONCE


def _not_a_store(where: str) -> str:
    return f"{where}: something listens there, but not the store of a rank 0; is another service using the port?"

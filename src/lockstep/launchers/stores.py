"""The ranks' rendezvous: torch's store, opened in bounded time.

memory     a nameless file of the process that started all ranks of its host; no other user can open it
tcp://     rank 0 serves the store at that address alone; or an agent does, and then it outlives the ranks
file://    contains rank 0's address; a stale file of a dead run is harmless
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..errors import AbsentError, RequestError
from ..monitor import bounded
from ..monitor.keys import Keys
from ..monitor.notes import Notes
from . import hosts
from .variables import having, unset

if TYPE_CHECKING:
    from .._torch import Store

QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Read when torch is imported: lockstep reports strangers and lost peers in its own words."""
PREFIX = "lockstep"  # separates lockstep's keys from others in the same store
WAIT = timedelta(seconds=60)
"""For a key that torch itself waits for."""
_RETRY_S = 0.2
_PROBE_S = 5.0
_FILE_BYTES = 1 << 12
_REASONS = {
    errno.EADDRINUSE: "another process uses the port, such as a second rank 0; take another one on every rank",
    errno.EADDRNOTAVAIL: "the address is not one of this machine; give the address of the machine that rank 0 runs on",
    errno.EACCES: "ports below 1024 need privileges; take a higher one on every rank",
}


@dataclass(frozen=True)
class Rendezvous:
    """An open store, and its name in messages."""

    keys: Keys
    name: str
    """In the user's words: tcp://HOST:PORT, file:///PATH, or this host's memory."""
    hosted: bool = False
    """Whether this process serves the store, so that the others lose it when this process ends."""
    host: str = ""
    """The host that serves the store, by the user's or rank 0's name for it; "" for memory."""
    port: int = 0
    file: Path | None = None
    """The file that rank 0 removes at its end."""
    outlives: bool = False
    """Whether an agent, or the process that started the ranks, keeps the store: no rank serves it."""
    notes: Notes = field(default_factory=Notes)
    """Notes that outlive this start of the ranks."""


def import_torch() -> None:
    """Import torch with its C++ warnings off, unless it is imported already."""
    with having(unset(QUIET_TORCH)):
        import torch  # noqa: F401


@contextlib.contextmanager
def memory() -> Iterator[Path]:
    """Hold an empty file in memory, for this user's processes; yield its path."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("lockstep-rendezvous")
        try:
            yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        finally:
            os.close(descriptor)
    else:
        with tempfile.NamedTemporaryFile(prefix="lockstep-") as file:
            yield Path(file.name)


@dataclass(frozen=True)
class Endpoint:
    """The address of the ranks' store: a parent's memory, a file, or host and port. A lone rank has none."""

    memory: Path | None = None
    file: Path | None = None
    host: str = ""
    port: int = 0
    job: str = ""
    """Name of the job, at an agent whose store may outlive it."""
    served: bool = False
    """Whether an agent serves the store."""

    def open(self, rank: int, timeout_s: float, notes: Notes) -> Rendezvous:
        """Open the store for a rank, with the notes of an earlier start."""
        if self.memory is not None or not (self.file or self.host):
            rendezvous = _in_memory(self.memory)
        elif self.file is not None:
            rendezvous = at_file(self.file, is_main=rank == 0, timeout_s=timeout_s, host=self.host)
        elif rank == 0 and not self.served:
            rendezvous = serve(self.host, self.port)
        else:
            rendezvous = connect(self.host, self.port, timeout_s, job=self.job, served=self.served)
        return dataclasses.replace(rendezvous, notes=notes)


def _in_memory(path: Path | None) -> Rendezvous:
    import_torch()
    from .._torch import FileStore, HashStore

    store = FileStore(str(path), -1) if path else HashStore()
    return Rendezvous(Keys(store, PREFIX), "this host's memory", outlives=True)


def serve(host: str, port: int) -> Rendezvous:
    """Serve the store to the other ranks, on `host`'s address alone."""
    url = hosts.url(host, port)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror)
        raise RequestError(f"{url}: this process cannot listen there: {reason}.") from error
    import_torch()
    from .._torch import TCPStore

    address, port = listener.getsockname()[:2]
    descriptor = listener.detach()
    store = TCPStore(address, port, is_master=True, master_listen_fd=descriptor, wait_for_workers=False, timeout=WAIT)
    return Rendezvous(Keys(store, PREFIX), url, hosted=True, host=host, port=port)


def connect(
    host: str, port: int, timeout_s: float, *, attempt_s: float | None = None, job: str = "", served: bool = False
) -> Rendezvous:
    """Open the store of rank 0, or of an agent if `served`.

    `job` separates these ranks' keys from those of other jobs at the agent. Raises `AbsentError` if no such store
    answers within `timeout_s`, or within `attempt_s` in an attempt that the caller repeats.
    """
    import_torch()
    from .._torch import TCPStore

    url, deadline = hosts.url(host, port), time.monotonic() + (timeout_s if attempt_s is None else attempt_s)
    if not served:  # an agent's store exists before the process that it starts
        _await_listener(host, port, timeout_s, deadline)
    left_s = max(_PROBE_S, deadline - time.monotonic())

    def attempt() -> Store:  # torch retries when the store of a run that ends just now closes
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=left_s))

    try:
        store = bounded.within(left_s + _PROBE_S, attempt, "store")
    except RuntimeError as error:
        raise AbsentError(
            f"{url}: no store of a rank 0 has answered there within --timeout {timeout_s:g} s; was rank 0 stopped, "
            "or is another service using the port?"
        ) from error
    store.set_timeout(WAIT)
    keys = Keys(store, f"{PREFIX}/{job}" if job else PREFIX)
    return Rendezvous(keys, url, host=host, port=port, outlives=served)


def _await_listener(host: str, port: int, timeout_s: float, deadline: float) -> None:
    while True:
        try:
            socket.create_connection((host, port), max(_RETRY_S, deadline - time.monotonic())).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise AbsentError(
                    f"{hosts.url(host, port)}: nothing answers there within --timeout {timeout_s:g} s "
                    f"({error.strerror or error}){hosts.caution(host, has_met=False)}; is rank 0 running, is the "
                    "address its own, and does a firewall let the port through?"
                ) from error
            time.sleep(_RETRY_S)
        else:
            return


def at_file(path: Path, *, is_main: bool, timeout_s: float, host: str = "") -> Rendezvous:
    """Open rank 0's store by the address in the file at `path`.

    Rank 0 (`is_main`) serves it and listens at `host`, by default this host's first address. Raises `RequestError` if
    the file is another's, cannot be written, or is in use by a run.
    """
    url, deadline = f"file://{path}", time.monotonic() + timeout_s
    if not is_main:
        while (rendezvous := _connect_by_file(path, deadline - time.monotonic())) is None:
            if time.monotonic() >= deadline:
                raise AbsentError(
                    f"{url}: rank 0 did not come there within --timeout {timeout_s:g} s; start every rank, or raise "
                    "--timeout."
                )
            time.sleep(_RETRY_S)
        return dataclasses.replace(rendezvous, name=url)
    if _connect_by_file(path, _PROBE_S) is not None:
        raise RequestError(
            f"{url}: rank 0 is claimed twice, or another run meets there; give each process its own --rank, and each "
            "run its own file."
        )
    nonce, addresses = secrets.token_hex(16), hosts.own_addresses(hosts.ANYWHERE)
    rendezvous = serve(host or next(iter(addresses), "127.0.0.1"), 0)
    rendezvous.keys.write("place", nonce)
    contents = json.dumps({PREFIX: nonce, "host": rendezvous.host, "port": rendezvous.port})
    try:
        files.write_whole(path, contents.encode(), private=True)
    except OSError as error:
        raise _unusable(path, error) from error
    return dataclasses.replace(rendezvous, name=url, file=path)


def _connect_by_file(path: Path, limit_s: float) -> Rendezvous | None:
    """Return the store at the address in the file; None without an answer."""
    if (place := _read_place(path)) is None:
        return None
    with contextlib.suppress(RequestError, RuntimeError):
        limit_s = min(max(limit_s, _RETRY_S), 5 * _RETRY_S)
        rendezvous = connect(place["host"], place["port"], limit_s)
        if rendezvous.keys.read("place") == place[PREFIX]:
            return rendezvous
    return None


def _read_place(path: Path) -> dict[str, Any] | None:
    """Return the file's contents; None if the file does not exist."""
    try:
        if path.lstat().st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise OSError(errno.EPERM, "the file is another user's")
        text = files.read(path, most_bytes=_FILE_BYTES)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.parent.is_dir():
            return None
        raise _unusable(path, error) from error
    with contextlib.suppress(ValueError, KeyError, TypeError):
        place: dict[str, Any] | None = files.parse_json(text) if text else None
        if place is None or (isinstance(place["host"] + place[PREFIX], str) and 0 < place["port"] < 1 << 16):
            return place
    raise RequestError(f"{path} exists and is no rendezvous file of ranks; give a path that does not exist yet.")


def _unusable(path: Path, error: OSError) -> RequestError:
    return RequestError(
        f"file://{path} cannot be opened ({error.strerror}); give the path of a file that does not exist yet, in a "
        "folder that every rank can write to."
    )

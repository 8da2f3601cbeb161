"""Where ranks meet: torch's key-value store, opened so that what goes wrong is one sentence in bounded time.

    memory     a file without a name, of the process that has started all ranks on its host: no other user can open it
    tcp://     rank 0 serves the store at that address alone, or an agent does, and then it outlives the ranks
    file://    holds rank 0's address, and a secret for whoever may read it; one that a dead run has left is harmless

torch's stores know no passwords: whoever reaches the port reads and writes there. So each text of ours bears a seal
(see `keys`).
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..errors import AbsentError, RequestError
from ..files import ours
from ..monitor import bounded
from ..monitor.keys import SECRET, Keys
from ..monitor.notes import Notes
from . import hosts
from .variables import having, unset

if TYPE_CHECKING:
    from .._torch import Store

QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""What torch reads when it is imported: its warnings, about strangers and lost peers, are told in our words."""
PREFIX = "lockstep"  # parts our keys from those of others who may use the same store
_SECRET_BYTES = 32
_RETRY_S = 0.2
_PROBE_S = 5.0
_SILENCE_S = 30  # for whoever connects to say something
_WAIT = timedelta(seconds=60)  # for the server to wait for a key
_FILE_BYTES = 1 << 12


@dataclass(frozen=True)
class Meeting:
    """An open store, and how to speak of it."""

    store: Store
    keys: Keys
    where: str
    """In the user's words: tcp://HOST:PORT, file:///PATH, or that it is this host's memory."""
    hosted: bool = False
    """Whether this process serves the store, so that the others lose it when this process ends."""
    host: str = ""
    """The host that serves the store, as the user or rank 0 names it."""
    port: int = 0
    file: Path | None = None
    """What rank 0 removes when all have left."""
    outlives: bool = False
    """Whether an agent, or the process that has started the ranks, keeps the store: no rank serves it."""
    notes: Notes | None = None
    """What outlives this start of the ranks."""
    caution: str = ""
    """What may keep others from coming, to end a sentence with."""

    def is_open(self) -> bool:
        """Return whether somebody still listens at the store; torch prints its own stack where nobody does."""
        try:
            if self.port and not self.hosted:
                socket.create_connection((self.host, self.port), _RETRY_S * 5).close()
        except OSError:
            return False
        return True


def import_torch() -> None:
    """Import torch with its C++ code left its errors alone: a program that has imported it keeps its warnings."""
    with having(unset(QUIET_TORCH)):
        import torch  # noqa: F401


def of_job(env: Mapping[str, str], *, on_one_host: bool) -> bytes:
    """Return the job's secret, by which its ranks know one another: LOCKSTEP_SECRET, or one of this user on this host.

    Empty where nobody has given one, and the ranks are on several hosts or have no home: they trust the network.
    """
    if given := env.get(SECRET, ""):
        return given.encode(errors="surrogateescape")
    return _of_user() if on_one_host else b""


def _of_user() -> bytes:
    try:
        # Not among temporary files, which are tidied away while a job goes on, and where others take names first.
        path = Path.home() / ".cache" / "lockstep" / "secret"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), tempfile.NamedTemporaryFile(dir=path.parent) as part:
            part.write(secrets.token_bytes(_SECRET_BYTES))
            part.flush()
            os.link(part.name, path)  # whole at once; unlike a rename it leaves what another rank has just put there
        return files.read(path, most_bytes=_SECRET_BYTES)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return b""


@contextlib.contextmanager
def memory() -> Iterator[Path]:
    """Hold a new, empty file in memory while the block runs; give the path at which this user's processes open it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("lockstep-meeting")
        try:
            yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
            (Path(folder) / "meeting").touch()
            yield Path(folder) / "meeting"


def alone() -> Meeting:
    """Open the store of a world of one."""
    from .._torch import HashStore

    store = HashStore()
    return Meeting(store, Keys(store, PREFIX), "this process", outlives=True)


def in_memory(path: Path, notes: Notes | None = None) -> Meeting:
    """Open the store in a file of `memory()`."""
    import_torch()
    from .._torch import FileStore

    store = FileStore(str(path), -1)
    return Meeting(store, Keys(store, PREFIX), "this host's memory", outlives=True, notes=notes)


def serve(host: str, port: int, timeout_s: float, *, secret: bytes = b"", apart: bool = False) -> Meeting:
    """Open the store that the other ranks connect to, listening on `host`'s address alone.

    `apart` says that ranks of other hosts are to come. Raises `RequestError` where this host cannot listen there.
    """
    where = hosts.url(host, port)
    try:
        listener = _listen(host, port, timeout_s)
    except OSError as error:
        raise RequestError(f"{where}: rank 0 cannot listen there: {_why_not(error)}") from error
    caution = hosts.unreachable(host, listener.getsockname()[0])
    if apart and caution:
        listener.close()
        raise RequestError(f"{where}: ranks of other nodes are to come{caution}.")
    return _adopt(listener, where, caution, secret)


def join(host: str, port: int, timeout_s: float, *, secret: bytes = b"") -> Meeting:
    """Open the store of several agents: serve it where the address is this host's and nobody does, else connect."""
    where = hosts.url(host, port)
    try:
        listener = _listen(host, port, timeout_s)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise RequestError(f"{where}: this agent cannot listen there: {_why_not(error)}") from error
        return connect(host, port, timeout_s, secret=secret)
    return _adopt(listener, where, hosts.unreachable(host, listener.getsockname()[0]), secret)


def connect(
    host: str,
    port: int,
    timeout_s: float,
    *,
    secret: bytes = b"",
    job: str = "",
    start: str = "",
    served: bool = False,
    apart: bool = False,
) -> Meeting:
    """Open the store that rank 0 serves at the address, or, where it is `served`, an agent: it outlives the ranks.

    `job` and `start` part the keys of these ranks from those of other jobs at that agent's, and of earlier starts.
    `apart` says that rank 0 is on another host. Raises `AbsentError` where nobody answers within `timeout_s`,
    `RequestError` where something else than such a store does.
    """
    import_torch()
    from .._torch import TCPStore

    where, deadline = hosts.url(host, port), time.monotonic() + timeout_s
    addresses = hosts.resolve(host, port, timeout_s)
    address = addresses[0][1][0]
    if apart and hosts.to_itself(addresses):
        raise RequestError(f"{where}: rank 0 is on another host{hosts.misnamed(host, addresses)}.")
    if not served:  # an agent's is there: it has started this process
        address = _await_listener(host, port, addresses, deadline, timeout_s)
    left_s = max(_PROBE_S, deadline - time.monotonic())

    def attempt() -> Store:  # torch tries again where the store of a run that is just ending closes
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=left_s))

    try:
        store = bounded.within(left_s + _PROBE_S, attempt, "store")
    except RuntimeError as error:
        raise AbsentError(
            f"{where}: whoever listens there has not answered as the store of a rank 0 within --timeout {timeout_s:g} "
            "s; was rank 0 stopped, or is another service using the port?"
        ) from error
    store.set_timeout(_WAIT)
    keys = Keys(store, "/".join(filter(None, (PREFIX, job, start))), secret)
    notes = _Kept(Keys(store, f"{PREFIX}/{job}/lasting", secret)) if served else None
    caution = hosts.unreachable(host, address)
    return Meeting(store, keys, where, host=host, port=port, outlives=served, notes=notes, caution=caution)


class _Kept:
    """Notes in an agent's store, which all starts of a job's ranks share (see `notes`)."""

    def __init__(self, keys: Keys) -> None:
        self.read, self.write = keys.read, keys.write


def at_file(
    path: Path, *, is_main: bool, timeout_s: float, interface: str = "", local: bool = False, secret: bytes = b""
) -> Meeting:
    """Open the store whose address rank 0 writes to the file at `path`; rank 0 (`is_main`) serves it.

    `local` says that all ranks are on this host; else it listens at this host's address, on `interface` if one is
    named. Raises `RequestError` where the file is another's, cannot be written, or is in use by a run.
    """
    where = f"file://{path}"
    before = _read_place(path)
    if not is_main:
        return _follow(path, where, timeout_s, secret)
    if before is not None and _open_place(before, secret, _RETRY_S * 5) is not None:
        raise RequestError(
            f"{where}: rank 0 is claimed twice, or another run meets there; give each process its own --rank, and each "
            "run its own meeting place."
        )
    own = () if local else hosts.own_addresses(hosts.ANYWHERE, interface)
    nonce = secrets.token_hex(_SECRET_BYTES)
    meeting = serve(own[0] if own else "127.0.0.1", 0, timeout_s, secret=secret + nonce.encode())
    meeting.keys.write("place", nonce)
    _write_place(path, {PREFIX: nonce, "host": meeting.host, "port": meeting.port})
    return dataclasses.replace(meeting, where=where, file=path)


def _follow(path: Path, where: str, timeout_s: float, secret: bytes) -> Meeting:
    """Return the store whose address stands, or will stand, in the file."""
    deadline, found = time.monotonic() + timeout_s, None
    while True:
        found = _read_place(path)
        if found is not None and (meeting := _open_place(found, secret, deadline - time.monotonic())) is not None:
            return dataclasses.replace(meeting, where=where)
        if time.monotonic() >= deadline:
            how = f" ({hosts.url(found['host'], found['port'])}, which it names, does not answer)" if found else ""
            raise AbsentError(
                f"{where}: rank 0 did not come there within --timeout {timeout_s:g} s{how}; start every rank, or raise "
                "--timeout."
            )
        time.sleep(_RETRY_S)


def _open_place(place: Mapping[str, Any], secret: bytes, limit_s: float) -> Meeting | None:
    """Return the store that a file names; None where it does not answer, as that of a dead run."""
    with contextlib.suppress(RequestError, RuntimeError):
        limit_s = min(max(limit_s, _RETRY_S), 5 * _RETRY_S)
        meeting = connect(place["host"], place["port"], limit_s, secret=secret + place[PREFIX].encode())
        if meeting.keys.read("place") == place[PREFIX]:
            return meeting
    return None


def _read_place(path: Path) -> dict[str, Any] | None:
    """Return what the file says; None where it is not there. Raises `RequestError` where it is something else."""
    try:
        if path.lstat().st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise OSError(errno.EPERM, "the file is another user's")
        text = files.read(path, most_bytes=_FILE_BYTES)
    except FileNotFoundError as error:
        if path.parent.is_dir():
            return None
        raise _unusable(path, error) from error
    except OSError as error:
        raise _unusable(path, error) from error
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = files.parse_json(text) if text else None
        if found is None or (isinstance(found["host"] + found[PREFIX], str) and 0 < found["port"] < 1 << 16):
            return found
    raise RequestError(
        f"file://{path} exists and is not a meeting place of ranks; give a path that does not exist yet."
    )


def _write_place(path: Path, place: Mapping[str, Any]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "xb", opener=ours) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(place).encode())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> RequestError:
    return RequestError(
        f"file://{path} cannot be opened ({error.strerror}); give the path of a file that does not exist yet, in a "
        "folder that every rank can write to."
    )


def _adopt(listener: socket.socket, where: str, caution: str, secret: bytes) -> Meeting:
    """Open a store on a socket that listens already."""
    import_torch()
    from .._torch import TCPStore

    if hasattr(socket, "TCP_DEFER_ACCEPT"):
        # Linux keeps connections to itself until something is said: who scans ports, or sits there, is never let in.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENCE_S)
    host, port = listener.getsockname()[:2]
    taken = listener.detach()
    store = TCPStore(host, port, is_master=True, master_listen_fd=taken, wait_for_workers=False, timeout=_WAIT)
    return Meeting(store, Keys(store, PREFIX, secret), where, hosted=True, host=host, port=port, caution=caution)


def _listen(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a socket that listens on the first of the host's addresses that this machine has."""
    failed = OSError(errno.EADDRNOTAVAIL, "no address")
    for family, address in hosts.resolve(host, port, timeout_s):
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
    return {
        errno.EADDRINUSE: "another process uses the port, such as a second rank 0; take another one on every rank.",
        errno.EADDRNOTAVAIL: "the address is not one of this machine; give the address of the machine that rank 0 runs "
        "on.",
        errno.EACCES: "ports below 1024 need privileges; take a higher one on every rank.",
    }.get(error.errno or 0, f"{error.strerror}.")


def _await_listener(host: str, port: int, addresses: Sequence[hosts.Address], deadline: float, timeout_s: float) -> str:
    """Return the address at which somebody listens, once somebody does."""
    while True:
        for family, address in addresses:
            with socket.socket(family, socket.SOCK_STREAM) as caller:
                caller.settimeout(max(_RETRY_S, deadline - time.monotonic()))
                try:
                    caller.connect(address)
                except OSError as error:
                    why = error.strerror or str(error)
                else:
                    return address[0]
        if time.monotonic() >= deadline:
            raise AbsentError(
                f"{hosts.url(host, port)}: nothing answers there within --timeout {timeout_s:g} s ({why})"
                f"{hosts.misnamed(host, addresses)}; is rank 0 running, is the address its own, and does a firewall "
                "let the port through?"
            )
        time.sleep(_RETRY_S)

"""Whether each rank can reach each other one: a connection to a free port, as gloo and NCCL make them.

Every rank listens on the job's interface alone, and answers whoever connects with a nonce that the others have read
elsewhere: so what is reached is that rank and no other program. On the same connection it then answers each byte with
the time, from which the difference of the clocks follows as in NTP (RFC 5905): the fastest answer bounds it best.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .finding import Finding, Subject

CONNECT_S = 3.0
"""For one connection: a network of the whole earth answers in a third of a second, a firewall that drops, never."""
LOOPBACK = "127.0.0.1"
_PINGS = 8
_AT_ONCE = 32
_NONCE_BYTES = 16
_TIME = struct.Struct("!q")
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NAMED = 4


@dataclass(frozen=True)
class Door:
    """Where a rank listens, and by which nonce it is known."""

    address: str
    port: int
    nonce: str


@dataclass(frozen=True)
class Visit:
    """How a visit at another rank's door went."""

    trouble: str = ""
    offset_s: float = 0.0
    """How far that rank's clock is ahead of this one's."""
    bound_s: float = 0.0
    """By how much that may be wrong: half the fastest round trip."""


@contextlib.contextmanager
def listening(address: str, clock_ns: Callable[[], int] = time.time_ns) -> Iterator[Door]:
    """Listen on a free port of `address` for as long as the block lasts."""
    nonce = secrets.token_bytes(_NONCE_BYTES)

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(CONNECT_S)
            with contextlib.suppress(OSError):
                self.request.sendall(nonce)
                while self.request.recv(1):
                    self.request.sendall(_TIME.pack(clock_ns()))

    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        daemon_threads = True
        block_on_close = False  # a visitor that stays is none of ours
        request_queue_size = socket.SOMAXCONN

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing: whoever connects and breaks off is no concern of the job's."""

    with Server((address, 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield Door(address, server.server_address[1], nonce.hex())
        finally:
            server.shutdown()


def visit(door: Door, limit_s: float = CONNECT_S) -> Visit:
    """Connect to another rank's door; return what keeps one from it, or how far its clock is ahead."""
    try:
        with socket.create_connection((door.address, door.port), timeout=limit_s) as peer:
            if _read(peer, _NONCE_BYTES).hex() != door.nonce:
                return Visit("another program answers there")
            trips = [_ping(peer) for _ in range(_PINGS)]
    except TimeoutError:
        return Visit(f"no answer within {limit_s:g} s")
    except OSError as error:
        unreachable = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
        return Visit("no route" if unreachable else (error.strerror or str(error)).lower())
    bound_s, offset_s = min(trips)
    return Visit("", offset_s, bound_s)


def visit_all(doors: Mapping[int, Door], limit_s: float = CONNECT_S) -> dict[int, Visit]:
    """Visit every door, by rank, several at once."""
    if not doors:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(doors))) as pool:
        return dict(zip(doors, pool.map(lambda door: visit(door, limit_s), doors.values()), strict=True))


def judge(troubles: Mapping[tuple[int, int], str], doors: Mapping[int, Door], hosts: Sequence[str]) -> Finding:
    """Return what the visits amount to: {(from rank, to rank): trouble, "" where it went well}."""
    about = Subject("network", "ports")
    if not troubles:
        return about.unchecked("one rank: nobody to reach")
    blocked = {pair: trouble for pair, trouble in troubles.items() if trouble}
    if not blocked:
        pairs = len(troubles) // 2
        words = f"all {pairs} pairs of ranks connect, both ways" if pairs > 1 else "both ranks reach each other"
        return about.green(words)
    told = [
        f"rank {start} ({hosts[start]}) does not reach rank {end} ({hosts[end]}) at {doors[end].address}: {trouble}"
        for (start, end), trouble in blocked.items()
    ]
    more = f"; and {len(told) - _NAMED} pairs more" if len(told) > _NAMED else ""
    ranks = tuple(sorted({rank for pair in blocked for rank in pair}))
    fix = _fix(*next(iter(blocked)), doors, hosts)
    return replace(about, ranks=ranks).red("; ".join(told[:_NAMED]) + more, fix)


def _fix(start: int, end: int, doors: Mapping[int, Door], hosts: Sequence[str]) -> str:
    if hosts[start] == hosts[end]:
        return f"let {hosts[end]} talk to itself: iptables -I INPUT -s {doors[start].address} -p tcp -j ACCEPT"
    if ipaddress.ip_address(doors[end].address).is_loopback:
        return "let the job's traffic go over the network's interface, not over loopback: see there"
    low, high = _ephemeral()
    return (
        f"let TCP from {doors[start].address} into {hosts[end]}, ports {low} to {high}: iptables -I INPUT -s "
        f"{doors[start].address} -p tcp -j ACCEPT, or firewall-cmd --zone=trusted --add-source={doors[start].address}"
    )


def _ephemeral() -> tuple[str, str]:
    """Return the ports that the kernel hands out, from which gloo and NCCL take theirs."""
    try:
        low, high = _RANGE.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return "1024", "65535"
    return low, high


def _ping(peer: socket.socket) -> tuple[float, float]:
    """Return half the round trip and the other clock's lead, in seconds."""
    sent_ns, since = time.time_ns(), time.perf_counter_ns()
    peer.sendall(b"?")
    theirs_ns: int = _TIME.unpack(_read(peer, _TIME.size))[0]
    half_ns = (time.perf_counter_ns() - since) / 2
    return half_ns / 1e9, (theirs_ns - sent_ns - half_ns) / 1e9


def _read(peer: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = peer.recv(count - len(found))
        if not part:
            raise ConnectionError("the connection is closed at once")
        found += part
    return found

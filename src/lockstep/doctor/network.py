"""How hosts are named and connected: the job's interface, names, clocks, and ports between every two ranks."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..launchers import hosts
from ..topology import Topology
from .finding import RED, UNCHECKED, YELLOW, Finding, found, shown

if TYPE_CHECKING:
    from .board import Board

_CONNECT_S = 3.0
"""For one connection: a network of the whole earth answers in a third of a second, a firewall that drops, never."""
_FAR_CLOCK_S = 1.0  # logs of hosts that are further apart cannot be read side by side
_AT_ONCE, _NAMED = 32, 4
_TIME = struct.Struct("!q")  # nanoseconds since the epoch


class Wire(NamedTuple):
    """The network interface of a job on one host."""

    interface: str
    address: str
    """Empty where the interface has none."""
    bytes_per_s: float = 0.0
    """Its rate; 0 where it tells none, such as loopback."""
    is_chosen: bool = False
    """Whether the job's traffic is kept on it."""


class Visit(NamedTuple):
    """How a connection to another rank went."""

    trouble: str
    ahead_s: float = 0.0
    """How far that rank's clock is ahead of this one's, ± bound_s."""
    bound_s: float = 0.0


def wire(interface: str, towards: str) -> Wire:
    """Return the wire of this process's traffic: `interface`, or the one `towards` an address."""
    known, is_chosen = hosts.interfaces(), bool(interface)
    if is_chosen:
        address = min(known.get(interface, []), key=lambda each: ":" in each, default="")  # IPv4 first
    else:
        address = hosts.own_address(towards) or "127.0.0.1"  # a laptop without a network
        interface = next((name for name, each in known.items() if address in each), "")
    megabits = 0
    with contextlib.suppress(OSError, ValueError):
        megabits = int(Path(f"/sys/class/net/{interface}/speed").read_text(encoding="ascii"))
    return Wire(interface, address, max(0, megabits) * 1e6 / 8, is_chosen)  # −1 is a link that does not know


def look_at(wire: Wire, *, others: bool) -> Iterator[Finding]:
    """Yield what this host's interface and name are; `others` are to find it."""
    words, fix = f"{wire.interface} {wire.address}", ""
    if wire.bytes_per_s:
        words += f", {shown(wire.bytes_per_s, 'bytes/s')} ({wire.bytes_per_s * 8 / 1e9:g} Gbit/s)"
    if not wire.address:
        words = f"{wire.interface or 'no interface'} has no address; there are {hosts.listed()}"
        fix = "name one of these in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on this host, or unset them"
    yield found("network", "interface", words, fix, bad=RED, value=wire.bytes_per_s, unit="bytes/s")
    name, addresses = socket.gethostname(), []
    with contextlib.suppress(OSError):
        addresses = [str(where[0]) for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    yield judge_name(name, addresses, wire, others=others)


def judge_name(name: str, addresses: list[str], wire: Wire, *, others: bool) -> Finding:
    """Return what it means that a host's name resolves to these addresses, or to none."""
    words, fix = f"{name} resolves to {', '.join(dict.fromkeys(addresses))}", ""
    line = f"add a line to /etc/hosts: {wire.address or 'ADDRESS'} {name}"
    bad = RED if others and not wire.is_chosen else YELLOW  # gloo then takes what the name resolves to
    if not addresses:
        words, fix = f"{name} does not resolve; torchrun and other tools need it", line
    elif others and hosts.is_loopback(addresses):
        words += ", where other hosts reach nobody"
        fix = f"{line} (in place of the one with {addresses[0]}), or name the network's interface with --interface"
    return found("network", "host name", words, fix, bad=bad)


def reach(topology: Topology, address: str, board: Board, names: Sequence[str]) -> list[Finding]:
    """Return whether ranks reach one another, and how far clocks differ (*collective*).

    This rank listens at `address`; `names` are the hosts of all ranks.
    """
    with listening(address) as port:
        told = board.all("ports", [address, port, topology.node])
        others = {at: where for at, (*where, _) in told.items() if at != topology.rank}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            visits = dict(zip(others, pool.map(lambda where: visit(*where), others.values()), strict=True))
        rows = board.all("visits", visits)
    been = {(at, int(to)): Visit(*each) for at, row in rows.items() for to, each in row.items()}
    addresses = {at: where for at, (where, *_) in told.items()}
    first = {node: at for at, (*_, node) in sorted(told.items(), reverse=True)}  # the first rank of each node
    clocks = [judge_clock(been[at, 0], at) for at in first.values() if (at, 0) in been and not been[at, 0].trouble]
    alone = Finding("network", "clock", UNCHECKED, "one host, one clock")
    return [judge_visits(been, addresses, names), *(clocks or [alone])]


@contextlib.contextmanager
def listening(address: str) -> Iterator[int]:
    """Listen on a free port of `address` within the block; tell callers the time."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.sendall(_TIME.pack(time.time_ns()))

    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        request_queue_size = socket.SOMAXCONN

    with Server((address, 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def visit(address: str, port: int, limit_s: float = _CONNECT_S) -> Visit:
    """Connect to another rank as gloo and NCCL do, and compare clocks."""
    here_ns, since_s = time.time_ns(), time.perf_counter()
    try:
        with socket.create_connection((address, port), timeout=limit_s) as peer, peer.makefile("rb") as answer:
            there_ns: int = _TIME.unpack(answer.read(_TIME.size))[0]
    except TimeoutError:
        return Visit(f"no answer within {limit_s:g} s")
    except (OSError, struct.error) as error:
        return Visit(str(getattr(error, "strerror", "") or error).lower())
    half_s = (time.perf_counter() - since_s) / 2
    return Visit("", (there_ns - here_ns) / 1e9 - half_s, half_s)


def judge_visits(been: Mapping[tuple[int, int], Visit], addresses: Mapping[int, str], names: Sequence[str]) -> Finding:
    """Return what the visits amount to: {(from rank, to rank): how it went}."""
    blocked = [(start, end, each.trouble) for (start, end), each in been.items() if each.trouble]
    if not been:
        return Finding("network", "ports", UNCHECKED, "one rank: nobody to reach")
    if not blocked:
        return found("network", "ports", "each two ranks connect, both ways")
    told = [
        f"rank {start} ({names[start]}) does not reach rank {end} ({names[end]}) at {addresses[end]}: {trouble}"
        for start, end, trouble in blocked[:_NAMED]
    ]
    more = f"; and {len(blocked) - _NAMED} pairs more" if blocked[_NAMED:] else ""
    start, end, _ = blocked[0]
    fix = f"let TCP from {addresses[start]} into {names[end]}, all ports above 1023: iptables -I INPUT -s \
{addresses[start]} -p tcp -j ACCEPT, or firewall-cmd --zone=trusted --add-source={addresses[start]}"
    return found("network", "ports", "; ".join(told) + more, fix, bad=RED)


def judge_clock(of_rank_0: Visit, rank: int) -> Finding:
    """Return what it means how far a rank's clock is from rank 0's."""
    apart_s = abs(of_rank_0.ahead_s)
    words = f"rank {rank}'s is {shown(apart_s, 's')} {'behind' if of_rank_0.ahead_s > 0 else 'ahead of'} rank 0's"
    fix = "set it by a time server: timedatectl set-ntp true" if apart_s - of_rank_0.bound_s > _FAR_CLOCK_S else ""
    about = f"{words}, ± {shown(of_rank_0.bound_s, 's')}"
    return replace(found("network", "clock", about, fix, value=apart_s, unit="s"), ranks=(rank,))

"""How hosts are named and connected: the job's interface, names, and ports between every two ranks."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from ..launchers import hosts
from ..world.topology import Topology
from .finding import RED, UNCHECKED, YELLOW, Finding, found

if TYPE_CHECKING:
    from .board import Board

_CONNECT_S = 3.0
"""For one connection: a network of the whole earth answers in a third of a second, a firewall that drops, never."""
_AT_ONCE, _NAMED = 32, 4
_WORD = b"lockstep"


class Wire(NamedTuple):
    """The network interface of a job on one host."""

    interface: str
    address: str
    """Empty where the interface has none."""
    is_chosen: bool = False
    """Whether the job's traffic is kept on it."""


def wire(interface: str, towards: str) -> Wire:
    """Return the wire of this process's traffic: `interface`, or the one `towards` an address."""
    known, is_chosen = hosts.interfaces(), bool(interface)
    if is_chosen:
        address = min(known.get(interface, []), key=lambda each: ":" in each, default="")  # IPv4 first
    else:
        address = hosts.own_address(towards) or "127.0.0.1"  # a laptop without a network
        interface = next((name for name, each in known.items() if address in each), "")
    return Wire(interface, address, is_chosen)


def look_at(wire: Wire, *, others: bool) -> Iterator[Finding]:
    """Yield what this host's interface and name are; `others` are to find it."""
    words, fix = f"{wire.interface} {wire.address}", ""
    if not wire.address:
        words = f"{wire.interface or 'no interface'} has no address; there are {hosts.listed()}"
        fix = "name one of these in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on this host, or unset them"
    yield found("network", "interface", words, fix, bad=RED)
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


def reach(topology: Topology, address: str, board: Board, names: Sequence[str]) -> Finding:
    """Return whether ranks reach one another (*collective*).

    This rank listens at `address`; `names` are the hosts of all ranks.
    """
    with listening(address) as port:
        told = board.all("ports", [address, port])
        others = {at: where for at, where in told.items() if at != topology.rank}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            visits = dict(zip(others, pool.map(lambda where: visit(*where), others.values()), strict=True))
        rows = board.all("visits", visits)
    been = {(at, int(to)): trouble for at, row in rows.items() for to, trouble in row.items()}
    return judge_visits(been, {at: where for at, (where, _) in told.items()}, names)


@contextlib.contextmanager
def listening(address: str) -> Iterator[int]:
    """Listen on a free port of `address` within the block."""

    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        request_queue_size = socket.SOMAXCONN

    with Server((address, 0), _Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.sendall(_WORD)


def visit(address: str, port: int, limit_s: float = _CONNECT_S) -> str:
    """Connect to another rank as gloo and NCCL do; return what keeps this one from it, "" for nothing."""
    try:
        with socket.create_connection((address, port), timeout=limit_s) as peer:
            return "" if peer.recv(len(_WORD)) == _WORD else "another program answers"
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
    except OSError as error:
        return str(error.strerror or error).lower()


def judge_visits(been: Mapping[tuple[int, int], str], addresses: Mapping[int, str], names: Sequence[str]) -> Finding:
    """Return what the visits amount to: {(from rank, to rank): trouble}."""
    blocked = [(start, end, trouble) for (start, end), trouble in been.items() if trouble]
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

"""How hosts are named and connected: the job's interface, names, and ports between every two ranks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..launchers import hosts
from ..world.topology import Topology
from .board import Board
from .finding import RED, UNCHECKED, YELLOW, Finding, found

_CONNECT_S = 3.0
"""For one connection: a network of the whole earth answers in a third of a second, a firewall that drops, never."""
_AT_ONCE, _NAMED = 32, 4


def address_of(interface: str, towards: str) -> str:
    """Return the address of this process's traffic: the interface's, or, without one, that `towards` another."""
    chosen = sorted(hosts.interfaces().get(interface, []), key=lambda each: ":" in each)  # IPv4 first
    return chosen[0] if chosen else hosts.own_address(towards) or "127.0.0.1"  # a laptop without a network


def look_at(address: str, *, is_chosen: bool, others: bool) -> Iterator[Finding]:
    """Yield what this host's interface and name are; `is_chosen` says of the interface whether somebody named it.

    `others` says whether there are other hosts, which have to find this one.
    """
    interface = next((name for name, each in hosts.interfaces().items() if address in each), "no interface")
    yield found("network", "interface", f"{interface} {address}")
    name, addresses = socket.gethostname(), []
    with contextlib.suppress(OSError):
        addresses = [str(where[0]) for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    # Where no interface is chosen, gloo takes what the name resolves to.
    yield judge_name(name, addresses, address, others=others, bad=RED if others and not is_chosen else YELLOW)


def judge_name(name: str, addresses: list[str], address: str, *, others: bool, bad: str) -> Finding:
    """Return what it means that the name of the host at `address` resolves to these addresses, or to none."""
    words, fix = f"{name} resolves to {', '.join(dict.fromkeys(addresses))}", ""
    line = f"add a line to /etc/hosts: {address} {name}"
    if not addresses:
        words, fix = f"{name} does not resolve; torchrun and other tools need it", line
    elif others and hosts.is_loopback(addresses):
        words += ", where other hosts reach nobody"
        fix = f"{line} (in place of the one with {addresses[0]}), or name the network's interface with --interface"
    return found("network", "host name", words, fix, bad=bad)


def reach(topology: Topology, address: str, board: Board, names: Sequence[str]) -> Finding:
    """Return whether ranks reach one another: this one listens at `address`; `names` are all hosts (*collective*)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # The kernel answers whoever connects, as long as there is room in the backlog.
    with socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN) as server:
        told = board.all("ports", server.getsockname()[:2])
        others = [rank for rank in told if rank != topology.rank]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            troubles = [*pool.map(lambda rank: visit(*told[rank]), others)]
        rows = board.all("visits", [*zip(others, troubles, strict=True)])
    visits = {(start, end): trouble for start, row in rows.items() for end, trouble in row}
    return judge_visits(visits, {rank: where for rank, (where, _) in told.items()}, names)


def visit(address: str, port: int, limit_s: float = _CONNECT_S) -> str:
    """Connect to another rank as gloo and NCCL do; return what keeps this one from it, "" for nothing."""
    try:
        socket.create_connection((address, port), timeout=limit_s).close()
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
    except OSError as error:
        return str(error.strerror or error).lower()
    return ""


def judge_visits(visits: Mapping[tuple[int, int], str], addresses: Mapping[int, str], names: Sequence[str]) -> Finding:
    """Return what the visits amount to: {(from rank, to rank): trouble}."""
    if not visits:
        return Finding("network", "ports", UNCHECKED, "one rank: nobody to reach")
    blocked = [
        f"rank {start} ({names[start]}) does not reach rank {end} ({names[end]}) at {addresses[end]}: {trouble}"
        for (start, end), trouble in visits.items()
        if trouble
    ]
    if not blocked:
        return found("network", "ports", "each two ranks connect, both ways")
    more = f"; and {len(blocked) - _NAMED} pairs more" if blocked[_NAMED:] else ""
    start, end = next(pair for pair, trouble in visits.items() if trouble)
    rule = f"iptables -I INPUT -s {addresses[start]} -p tcp -j ACCEPT"
    fix = f"let TCP from {addresses[start]} into {names[end]}, all ports above 1023: {rule}"
    return found("network", "ports", "; ".join(blocked[:_NAMED]) + more, fix, bad=RED)

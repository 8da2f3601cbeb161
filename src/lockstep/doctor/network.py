"""How this host is named and connected: its own name, the interface that the job uses, and its clock beside others'."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..launchers import hosts
from .finding import RED, YELLOW, Finding, Subject
from .host import INFINIBAND
from .units import rate, span

NET = Path("/sys/class/net")
_SLOW_LOOKUP_S = 1.0
_FAR_CLOCK_S = 1.0
"""Logs of two hosts that are further apart than this cannot be read side by side."""


@dataclass(frozen=True)
class Wire:
    """The network interface of a job on one host."""

    interface: str
    """Its name; empty where none was chosen, and gloo takes the address that the host's name resolves to."""
    address: str
    bytes_per_s: float | None
    """Its rate; None where it tells none, such as loopback."""
    mtu: int | None


def wire(interface: str, towards: str, net: Path = NET) -> Wire:
    """Return the wire that traffic of this process takes: `interface`, or the one on the route `towards` an address."""
    if interface:
        found = hosts.interfaces().get(interface, [])
        address = next((each for each in found if ":" not in each), next(iter(found), ""))
    else:
        address = hosts.own_address(towards)
        interface = next((name for name, each in hosts.interfaces().items() if address in each), "")
    speed, mtu = (_number(net / interface / name) for name in ("speed", "mtu"))
    # In Mbit/s; -1 for a link that does not know.
    return Wire(interface, address, speed * 1e6 / 8 if speed and speed > 0 else None, mtu)


def infiniband_bytes_per_s(folder: Path = INFINIBAND) -> float | None:
    """Return the rate of this host's fastest InfiniBand port; None where there is none.

    The kernel words it `100 Gb/sec (4X EDR)` (Documentation/ABI/stable/sysfs-class-infiniband).
    """
    found = []
    for path in folder.glob("*/ports/*/rate"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found.append(float(path.read_text(encoding="ascii").split()[0]) * 1e9 / 8)
    return max(found, default=None)


def judge_wire(wire: Wire, *, others: bool) -> Iterator[Finding]:
    """Yield what the job's interface on this host is; `others` says that there are other hosts to be reached."""
    about = Subject("network", "interface")
    if not wire.address:
        known = ", ".join(f"{name} ({addresses[0]})" for name, addresses in hosts.interfaces().items() if addresses)
        words = f"{wire.interface or 'no interface'} has no address that others could reach; there are {known}"
        fix = "name one of these in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on this host, or unset them"
        yield about.red(words, fix)
        return
    if others and ipaddress.ip_address(wire.address).is_loopback:
        words = f"traffic is kept on {wire.interface} {wire.address}, where other hosts reach nobody"
        # Whether they do is seen at the ports: nodes may share a host.
        fix = "unset GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or name the network's interface there"
        yield about.yellow(words, fix)
        return
    parts = [f"{wire.interface} {wire.address}"]
    parts += [f"{rate(wire.bytes_per_s)} ({wire.bytes_per_s * 8 / 1e9:g} Gbit/s)"] if wire.bytes_per_s else []
    parts += [f"MTU {wire.mtu}"] if wire.mtu else []
    yield Subject("network", "interface", value=wire.bytes_per_s, unit="bytes/s" if wire.bytes_per_s else "").green(
        ", ".join(parts)
    )


def judge_mtus(mtus: Mapping[int, int | None]) -> Iterator[Finding]:
    """Yield a finding where the hosts' interfaces send packets of different sizes: {rank: MTU}."""
    sizes = sorted({mtu for mtu in mtus.values() if mtu})
    if len(sizes) > 1:
        least = tuple(rank for rank, mtu in mtus.items() if mtu == sizes[0])
        words = f"interfaces differ in MTU ({', '.join(map(str, sizes))}): a switch between them may drop what is large"
        fix = f"give all the same: ip link set dev NAME mtu {sizes[0]}"
        yield Subject("network", "MTU", ranks=least).yellow(words, fix)


def names(own: str, address: str, *, is_bound: bool, others: bool) -> Iterator[Finding]:
    """Yield whether this host's name `own` can be looked up, to what, and how long that takes.

    `address` is the job's on this host; `is_bound` says that the job's traffic is kept on its interface, `others`
    that there are other hosts, to which a loopback address is of no use.
    """
    since_s = time.monotonic()
    try:
        found = [str(where[0]) for *_, where in socket.getaddrinfo(own, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        found, why = [], error.strerror or str(error)
    else:
        why = ""
    forward_s = time.monotonic() - since_s
    yield judge_name(own, found, why, address, is_bound=is_bound, others=others)
    with contextlib.suppress(OSError):  # an address without a name is no fault
        socket.gethostbyaddr(address)
    yield from judge_lookups(own, forward_s, time.monotonic() - since_s - forward_s)


def judge_name(own: str, found: list[str], why: str, address: str, *, is_bound: bool, others: bool) -> Finding:
    """Return what it means that a host's `own` name resolves to the addresses `found`, or, for a reason, to none."""
    about = Subject("network", "host name")
    # gloo takes what the name resolves to, unless it is bound to an interface.
    breaks = RED if others and not is_bound else YELLOW
    known = address and not ipaddress.ip_address(address).is_loopback
    line = f"add a line to /etc/hosts: {address if known else 'ADDRESS'} {own}"
    if not found:
        words = f"{own} does not resolve ({why}); torchrun and other tools need it"
        return about.found(breaks, words, line)
    shown = ", ".join(dict.fromkeys(found))
    if others and all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found):
        words = f"{own} resolves to {shown}, where other hosts reach nobody"
        fix = f"{line} (in place of the one with {found[0]}), or name the network's interface with --interface"
        return about.found(breaks, words, fix)
    return about.green(f"{own} resolves to {shown}")


def judge_lookups(own: str, forward_s: float, reverse_s: float) -> Iterator[Finding]:
    """Yield a finding where looking up the host's name, or the name of its address, took long."""
    if max(forward_s, reverse_s) > _SLOW_LOOKUP_S:
        what = "the name of its own address" if reverse_s > forward_s else f"its own name {own}"
        words = f"looking up {what} takes {span(max(forward_s, reverse_s))}: a name server does not answer"
        fix = "put the names of all nodes into /etc/hosts, or right /etc/resolv.conf"
        value = max(forward_s, reverse_s)
        yield Subject("network", "look-ups", value=value, unit="s").yellow(words, fix)


def judge_clock(offset_s: float, bound_s: float, rank: int) -> Finding:
    """Return what it means that a rank's clock is ahead of rank 0's by `offset_s`, known to within ± `bound_s`."""
    about = Subject("network", "clock", value=offset_s, unit="s", ranks=(rank,))
    way = "ahead of" if offset_s > 0 else "behind"
    words = f"{span(abs(offset_s))} {way} rank 0's, ± {span(bound_s)}"
    if abs(offset_s) - bound_s > _FAR_CLOCK_S:
        return about.yellow(words, "set it by a time server: timedatectl set-ntp true")
    return about.green(words)


def one_clock(size: int) -> Finding:
    """Return the finding for ranks that share one host, or are one."""
    words = "one host, one clock" if size > 1 else "one rank: no other clock to compare with"
    return Subject("network", "clock").unchecked(words)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such interface, or one that has no such number
        return None

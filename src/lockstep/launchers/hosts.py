"""This host as other hosts see it: its identity, its addresses, the interfaces they belong to."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path

import psutil

ANYWHERE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737): the route to it is the route to the world at large."""


def namespace(kind: str) -> str:
    """Return the identity of this process's network or process namespace; empty where there is no such thing."""
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return ""


def boot() -> str:
    """Return what tells this start of this machine from every other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}-{psutil.boot_time():.0f}"


def own_addresses(towards: str) -> tuple[str, ...]:
    """Return this host's addresses that are not loopback, the one on the route to `towards` first."""
    first = own_address(towards)
    others = [address for addresses in interfaces().values() for address in addresses]
    return tuple(address for address in dict.fromkeys([first, *others]) if address and not _is_loopback(address))


def own_address(towards: str) -> str:
    """Return this host's address on the route to another, empty if there is no route; nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return ""


def interfaces() -> dict[str, list[str]]:
    """Return the IPv4 and global IPv6 addresses of each network interface."""
    return {
        str(name): [
            str(each.address)
            for each in addresses
            if each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback

"""This host as other hosts see it: its identity, its addresses, the interfaces they belong to."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from ..errors import RequestError

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


def own_addresses(towards: str, interface: str = "") -> tuple[str, ...]:
    """Return this host's addresses that are not loopback, the one on the route to `towards` first.

    With an interface, its addresses alone.
    """
    if interface:
        return tuple(interfaces()[interface])
    first = own_address(towards)
    others = [address for addresses in interfaces().values() for address in addresses]
    return tuple(address for address in dict.fromkeys([first, *others]) if address and not is_loopback([address]))


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


def is_loopback(addresses: Iterable[str]) -> bool:
    """Return whether a host can be reached at these addresses by itself alone."""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def listed() -> str:
    """Return this host's interfaces with their addresses, in words."""
    return ", ".join(f"{name} ({', '.join(each) or 'no address'})" for name, each in sorted(interfaces().items()))


def check_interface(name: str, env: Mapping[str, str]) -> None:
    """Raise `RequestError` where the interface that --interface names cannot carry the ranks' traffic."""
    if not name:
        return
    found = interfaces()
    if name not in found:
        raise RequestError(f"--interface {name}: this host, {socket.gethostname()}, has no such one, but {listed()}.")
    if not found[name]:
        raise RequestError(
            f"--interface {name} has no address on {socket.gethostname()}; give it one, or take another of {listed()}."
        )
    if not psutil.net_if_stats()[name].isup:
        raise RequestError(
            f"--interface {name} is down on {socket.gethostname()}; bring it up, or take another of {listed()}."
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if (told := env.get(variable, name)).removeprefix("=") != name:
            raise RequestError(
                f"--interface {name} disagrees with the environment, where {variable} is {told}; drop one."
            )

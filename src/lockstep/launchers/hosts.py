"""This host as others see it: identity, addresses, interfaces, names."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from ..errors import RequestError

ANYWHERE = "192.0.2.1"
"""An unassigned address (RFC 5737), whose route is the route to other networks."""


def network() -> str:
    """Return the identity of this process's network namespace, or ""."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


def boot() -> str:
    """Return the identity of this boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}-{psutil.boot_time():.0f}"


def begun(pid: int) -> str:
    """Return a process's start time as text. Raises `psutil.NoSuchProcess`.

    The same text in every caller. On Linux, ticks since the boot: psutil's time of day moves where the clock is set.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return str(psutil.Process(pid).create_time())


def own_addresses(towards: str, interface: str = "") -> tuple[str, ...]:
    """Return the addresses of an interface, or of this host: the one on the route to `towards` first."""
    if interface:
        return tuple(interfaces()[interface])
    host_addresses = [address for addresses in interfaces().values() for address in addresses]
    candidates = dict.fromkeys([own_address(towards), *host_addresses])
    return tuple(address for address in candidates if address and not is_loopback([address]))


def own_address(towards: str) -> str:
    """Return this host's address on the route to another, or "". Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return ""


def interfaces() -> dict[str, list[str]]:
    """Return the IPv4 and global IPv6 addresses of each network interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        str(name): [str(entry.address) for entry in entries if entry.family in families and "%" not in entry.address]
        for name, entries in psutil.net_if_addrs().items()
    }


def is_loopback(addresses: Iterable[str]) -> bool:
    """Return whether all addresses are loopback addresses."""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def check_interface(name: str, env: Mapping[str, str]) -> None:
    """Raise `RequestError` where --interface cannot carry the ranks' traffic."""
    if not name:
        return
    candidates = interfaces()
    if not candidates.get(name):
        listed = ", ".join(f"{key} ({', '.join(values) or 'no address'})" for key, values in sorted(candidates.items()))
        host = socket.gethostname()
        raise RequestError(
            f"--interface {name}: this host, {host}, has no interface of this name with an address; it has {listed}."
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if (chosen := env.get(variable, name)).removeprefix("=") != name:
            raise RequestError(
                f"--interface {name} disagrees with the environment, where {variable} is {chosen}; drop one."
            )


def url(host: str, port: int | str) -> str:
    """Return tcp://HOST:PORT, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of tcp://HOST:PORT. Raises `RequestError` for any other URL."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(address)
        if parts.hostname and parts.port and not parts.path.strip("/") and not parts.query:
            return parts.hostname, parts.port
    raise RequestError(
        f"--init-method {address}: give an address and a port from 1 to 65535, such as tcp://10.0.0.1:29500."
    )


def caution(host: str, *, has_met: bool = True) -> str:
    """Return a clause on why other hosts may fail to reach `host`, or "".

    `has_met`: this rank has listened or connected at the address.
    """
    here, reachable, address = socket.gethostname(), own_addresses(ANYWHERE), ""
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    means = "" if host == address else f" means {address} here, which"
    if address and reachable and is_loopback([address]):
        return (
            f"; {host}{means} is this host ({here}) to itself alone: where ranks run on other hosts, give one of its "
            f"addresses that they reach ({', '.join(reachable)}), or put that in /etc/hosts"
        )
    if has_met or not address or not means:
        return ""
    return f"; {host} means {address} on {here}, and rank 0 may know the name as another, such as 127.0.1.1"

"""This host as other hosts see it: identity, addresses, interfaces, what names mean here; and its processes."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from ..errors import RequestError

ANYWHERE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737): the route to it is the route to the world at large."""
Address = tuple[int, tuple[str, int]]
"""A socket's family, and its host and port."""

_RETRY_S = 0.2
_RESOLVE_S = 10.0  # a name may appear late (a cluster's DNS); a wrong one should not take the whole time-out


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


def begun(pid: int) -> str:
    """Return when a process began, the same text for whoever asks; it tells it from others with its number.

    On Linux, ticks since the boot: psutil's time of day moves where the clock is set. Raises `psutil.NoSuchProcess`.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return str(psutil.Process(pid).create_time())


def has_ended(pid: int, since: str) -> bool:
    """Return whether the process with that number which began so is no more; a zombie is none."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE) or begun(pid) != since
    except psutil.NoSuchProcess:
        return True


def own_addresses(towards: str, interface: str = "") -> tuple[str, ...]:
    """Return this host's addresses that are not loopback, the one on the route to `towards` first.

    With an interface, its addresses alone.
    """
    if interface:
        return tuple(interfaces()[interface])
    others = [address for addresses in interfaces().values() for address in addresses]
    found = dict.fromkeys([own_address(towards), *others])
    return tuple(address for address in found if address and not is_loopback([address]))


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
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        str(name): [str(each.address) for each in addresses if each.family in families and "%" not in each.address]
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
    found, here = interfaces(), socket.gethostname()
    if name not in found:
        raise RequestError(f"--interface {name}: this host, {here}, has no such one, but {listed()}.")
    if not found[name] or not psutil.net_if_stats()[name].isup:
        lacks = "is down" if found[name] else "has no address"
        raise RequestError(f"--interface {name} {lacks} on {here}; set it up, or take another of {listed()}.")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if (told := env.get(variable, name)).removeprefix("=") != name:
            raise RequestError(
                f"--interface {name} disagrees with the environment, where {variable} is {told}; drop one."
            )


def url(host: str, port: int | str) -> str:
    """Return tcp://HOST:PORT, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def resolve(host: str, port: int, timeout_s: float) -> list[Address]:
    """Return the addresses of a name, IPv4 first."""
    deadline = time.monotonic() + min(timeout_s, _RESOLVE_S)
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RequestError(
                    f"{url(host, port)}: the name {host} does not resolve here ({error.strerror}); "
                    "give an address, or add the name to /etc/hosts or the DNS."
                ) from error
            time.sleep(_RETRY_S)
        else:
            pairs = [(int(family), (str(where[0]), int(where[1]))) for family, _, _, _, where in found]
            return sorted(pairs, key=lambda pair: pair[0] != socket.AF_INET)


def to_itself(addresses: Sequence[Address]) -> bool:
    """Return whether by these addresses this host reaches itself alone."""
    return is_loopback(address for _, (address, _) in addresses)


def unreachable(host: str, address: str) -> str:
    """Return, to end a sentence with, that other hosts do not reach an address; "" where they may, or none can."""
    others = own_addresses(ANYWHERE)
    if not is_loopback([address]) or not others:
        return ""
    meaning = "" if host == address else f" means {address} here, which"
    return (
        f"; {host}{meaning} is this host ({socket.gethostname()}) to itself alone: where ranks run on other hosts, "
        f"give one of its addresses that they reach ({', '.join(others)}), or put that in /etc/hosts"
    )


def misnamed(host: str, addresses: Sequence[Address]) -> str:
    """Return, as a part of a sentence, what a name means on this host, where it may mean another on rank 0's."""
    here = socket.gethostname()
    meant = ", ".join(dict.fromkeys(address for _, (address, _) in addresses))
    if to_itself(addresses):
        meaning = "" if host == meant else f"means {meant} here, which "
        return f"; {host} {meaning}is this host ({here}) itself: if rank 0 runs on another, give that one's address"
    if host == meant:
        return ""
    return f"; {host} means {meant} on {here}, and rank 0 may know the name as another, such as 127.0.1.1"

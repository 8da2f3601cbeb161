"""What the address of a meeting place means on this host: names resolved, and the loopback interface told apart."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from ..errors import RequestError
from . import hosts

Address = tuple[int, tuple[str, int]]
"""A socket's family, and its host and port."""

_RETRY_S = 0.2
_RESOLVE_S = 10.0  # a name may appear late (a cluster's DNS); a wrong one should not take the whole time-out


def address_of(host: str, port: int | str) -> str:
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
                    f"{address_of(host, port)}: the name {host} does not resolve here ({error.strerror}); "
                    "give an address, or add the name to /etc/hosts or the DNS."
                ) from error
            time.sleep(_RETRY_S)
        else:
            pairs = [(int(family), (str(where[0]), int(where[1]))) for family, _, _, _, where in found]
            return sorted(pairs, key=lambda pair: pair[0] != socket.AF_INET)


def unreachable(host: str, address: str) -> str:
    """Return, to end a sentence with, that other hosts do not reach an address; "" where they may, or none can."""
    others = hosts.own_addresses(hosts.ANYWHERE)
    if not hosts.is_loopback([address]) or not others:
        return ""
    meaning = "" if host == address else f" means {address} here, which"
    return (
        f"; {host}{meaning} is this host ({socket.gethostname()}) to itself alone: where ranks run on other hosts, "
        f"give one of its addresses that they reach ({', '.join(others)}), or put that in /etc/hosts"
    )


def to_itself(addresses: Sequence[Address]) -> bool:
    """Return whether by these addresses this host reaches itself alone."""
    return hosts.is_loopback(address for _, (address, _) in addresses)


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

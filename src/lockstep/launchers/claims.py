"""Who came: what each process says of itself before a world is formed, and what all of it together means."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from .. import hardware
from ..errors import RequestError
from ..topology import Topology
from . import hosts, processes
from .devices import of_rank


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a process says of itself at the roll call."""

    rank: int
    size: int
    accelerator: str
    gpus: tuple[str, ...] = ()
    """Identities of the GPUs that the process may take, by local rank; a single one is taken by whoever names it."""
    drives_all: bool = False
    """Whether it takes all of these GPUs, whatever its local rank."""
    addresses: tuple[str, ...] = ()
    """Addresses of this host, the one that others most likely reach first."""
    interface: str = ""
    """The network interface that the process was told to use, whose addresses these are; empty for any."""
    processors: tuple[int, ...] = field(default_factory=hardware.processors)
    """Those that the process may run on, by the host's numbers."""
    host: str = field(default_factory=socket.gethostname)
    network: str = field(default_factory=lambda: hosts.namespace("net"))
    processes: str = field(default_factory=lambda: hosts.namespace("pid"))
    boot: str = field(default_factory=hosts.boot)
    pid: int = field(default_factory=os.getpid)
    begun: str = field(default_factory=lambda: processes.begun(os.getpid()))
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def who(self) -> str:
        """The process in words."""
        return f"process {self.pid} on {self.host}"

    @property
    def node(self) -> tuple[str, str, str]:
        """What ranks share that reach one another without leaving the host."""
        return self.host, self.boot, self.network

    def is_dead(self) -> bool | None:
        """Return whether the process has ended; None where that cannot be seen from here."""
        if (self.boot, self.processes) != (hosts.boot(), hosts.namespace("pid")):
            return None
        return processes.has_ended(self.pid, self.begun)

    def to_json(self) -> str:
        """Return the claim as `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> Claim:
        """Return the claim in `text`."""
        values = json.loads(text)
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


def place(claims: Sequence[Claim], mine: Claim) -> Topology:
    """Return this rank's topology, with nodes and local ranks from the hosts that the claims name."""
    nodes = list(dict.fromkeys(claim.node for claim in claims))
    here = [claim.rank for claim in claims if claim.node == mine.node]
    return Topology(
        rank=mine.rank,
        size=mine.size,
        local_rank=here.index(mine.rank),
        local_size=len(here),
        node=nodes.index(mine.node),
        nodes=len(nodes),
    )


def sharing(claims: Sequence[Claim], mine: Claim) -> int:
    """Return how many ranks may run on processors of this one's: all of a machine, unless they are bound apart."""
    here = [set(claim.processors) for claim in claims if claim.boot == mine.boot]
    return max(1, sum(not each.isdisjoint(mine.processors) for each in here))


def interface(claims: Sequence[Claim], mine: Claim) -> str | None:
    """Return the network interface for this rank's traffic: the one it was told, or loopback if all are on this host.

    Otherwise the one on the route to another host's first address that can be reached from here, since gloo by itself
    takes what the host's name resolves to, often loopback; a host that was told an interface is followed before
    others. None where there is no such route.
    """
    if mine.interface:
        return mine.interface
    elsewhere = sorted((claim for claim in claims if claim.node != mine.node), key=lambda claim: not claim.interface)
    if not elsewhere:
        return "lo0" if sys.platform == "darwin" else "lo"
    # An address that both hosts have, such as that of a container bridge, leads nowhere.
    theirs = [address for address in elsewhere[0].addresses if address not in mine.addresses]
    own = next(filter(None, map(hosts.own_address, theirs)), "")
    return next((name for name, addresses in hosts.interfaces().items() if own in addresses), None)


def check_together(claims: Sequence[Claim]) -> None:
    """Raise if ranks that are each right by themselves cannot be one world."""
    kinds = {claim.accelerator: claim for claim in claims}
    if len(kinds) > 1:
        words = " and ".join(f"{kind} (rank {claim.rank}, {claim.who})" for kind, claim in sorted(kinds.items()))
        raise RequestError(f"The ranks compute on different accelerators, {words}; give --accelerator on every rank.")
    users: dict[tuple[str, str], Claim] = {}
    seen: Counter[tuple[str, str, str]] = Counter()
    for claim in claims:
        local_rank = seen[claim.node]
        seen[claim.node] += 1
        if not claim.gpus:
            continue
        mine = of_rank(claim.gpus, local_rank, drives_all=claim.drives_all)
        if not mine:
            raise RequestError(
                f"Rank {claim.rank} ({claim.who}) is number {local_rank} of its node, which shows "
                f"{len(claim.gpus)} GPUs; start at most as many ranks on a node as it has GPUs."
            )
        for gpu in mine:
            other = users.setdefault((claim.boot, gpu), claim)
            if other is not claim:
                raise RequestError(
                    f"Ranks {other.rank} and {claim.rank} on {claim.host} would share one GPU ({gpu}); "
                    "give each its own with --gpus, or start fewer ranks on this node."
                )


def check_reach(claims: Sequence[Claim], mine: Claim) -> None:
    """Raise if the interface that this rank was told to use does not lead to a rank on another host."""
    if not mine.interface:
        return
    for claim in claims:
        ways = {address: hosts.own_address(address) for address in claim.addresses}
        if claim.node != mine.node and not any(own in mine.addresses for own in ways.values()):
            roads = ", ".join(
                f"{address} (by {own})" if own else f"{address} (by no way)" for address, own in ways.items()
            )
            raise RequestError(
                f"Rank {mine.rank} ({mine.who}): --interface {mine.interface} ({', '.join(mine.addresses)}) does not "
                f"lead to rank {claim.rank} ({claim.who}), which is reached at {roads}; give each rank the interface "
                f"of one network, of those here: {hosts.listed()}."
            )


def digest(claims: Sequence[Claim]) -> str:
    """Return what tells these processes from any others."""
    return hashlib.sha256("".join(claim.nonce for claim in claims).encode()).hexdigest()[:16]

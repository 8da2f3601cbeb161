"""The roll call: each rank learns of all others in few requests.

Each rank writes a member (host, process, world size, GPUs) to its place in the store, by compare-and-set, and waits
until all places are taken. All ranks then check the same members, and so raise the same sentence.

A store that an agent keeps may hold members of an earlier start. torch's count of restarts does not tell them apart:
each agent has its own, and a node that joins or leaves does not raise it. So there a rank also confirms the members
that it has read, and goes on once all have confirmed the same ones; a process that has ended confirms nothing.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from .. import hardware
from ..errors import AbsentError, RequestError, ranks_in_short
from ..monitor.keys import parsed
from ..versions import version_of
from ..world.topology import Topology
from . import hosts
from .devices import of_rank
from .stores import WAIT, Rendezvous

_SLICE_S = 0.5  # of a wait, after which a rank reads whether another one found a fault
_HEAR_S = 1.0  # for the others to read a fault from a store that ends with this process


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process's report of itself at the roll call."""

    rank: int
    size: int
    accelerator: str
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that the process may use, by local rank; a single one is used whatever the local rank."""
    drives_all: bool = False
    """Whether the process uses all of these GPUs, whatever its local rank."""
    addresses: tuple[str, ...] = ()
    """Addresses of this host, the one that others most likely reach first."""
    interface: str = ""
    """The network interface of --interface, whose addresses these are; "" for any."""
    processors: tuple[int, ...] = field(default_factory=hardware.processors)
    """The processors that the process may run on, by the host's numbers."""
    host: str = field(default_factory=socket.gethostname)
    network: str = field(default_factory=hosts.network)
    boot: str = field(default_factory=hosts.boot)
    pid: int = field(default_factory=os.getpid)
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    version: str = field(default_factory=lambda: version_of("lockstep-torch") or "")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def node(self) -> tuple[str, str, str]:
        """(host, boot, network): equal for ranks that share a host's network."""
        return self.host, self.boot, self.network


def take(rendezvous: Rendezvous, member: Member, timeout_s: float) -> tuple[Member, ...]:
    """Return the members of all ranks once they have come (*collective*).

    Raises `RequestError`, on every rank that can know, if a rank is missing after `timeout_s` seconds or claimed twice,
    or if ranks were started with different versions, world sizes, accelerators, or the same GPU.
    """
    try:
        members = _checked(rendezvous, member, timeout_s)
        rendezvous.keys.store.set_timeout(WAIT)
        return members
    except ValueError as error:
        raise RequestError(
            f"{rendezvous.name}: the text there is no roll call ({error}): another program writes to this store; give "
            "each job a separate rendezvous that no other program can reach."
        ) from error
    except RuntimeError as error:  # the store's own: its server has gone
        raise AbsentError(
            f"{rendezvous.name}: the store went away during the roll call ({type(error).__name__}); rank 0, or the "
            "agent that serves it, has ended: see its own message."
        ) from error


def start_of(members: Sequence[Member]) -> str:
    """Return a name of these processes, which no others have."""
    return hashlib.sha256("".join(member.nonce for member in members).encode()).hexdigest()[:16]


def _checked(rendezvous: Rendezvous, member: Member, timeout_s: float) -> tuple[Member, ...]:
    try:
        members = _gathered(rendezvous, member, timeout_s)
        check_together(members)
        return members
    except RequestError as error:
        if rendezvous.outlives:  # a later start would read it
            raise
        fault = rendezvous.keys.put("fault", str(error))
        if rendezvous.hosted:
            time.sleep(_HEAR_S)
        raise type(error)(fault) from error


def _gathered(rendezvous: Rendezvous, member: Member, timeout_s: float) -> tuple[Member, ...]:
    keys, name, deadline = rendezvous.keys, rendezvous.name, time.monotonic() + timeout_s
    places, text = [f"member/{rank}" for rank in range(member.size)], json.dumps(asdict(member))
    if rendezvous.outlives:
        keys.write(places[member.rank], text)  # over that of an earlier start
    elif (holder := _member(keys.put(places[member.rank], text))).nonce != member.nonce:
        raise RequestError(
            f"{name}: rank {member.rank} is claimed twice, by {holder} and by {member}; give each process its own "
            "--rank, and each run a separate rendezvous."
        )
    while True:
        awaited, slice_s = places, min(_SLICE_S, timeout_s)
        if texts := keys.await_all(awaited, slice_s):
            members = tuple(map(_member, texts))
            if [other.rank for other in members] != [*range(member.size)]:
                raise ValueError("its members are not the ranks")
            if (holder := members[member.rank]).nonce != member.nonce:
                raise AbsentError(f"{name}: {holder} of a later start is rank {member.rank} in place of {member}.")
            if not rendezvous.outlives:
                return members
            awaited = [f"confirmed/{start_of(members)}/{rank}" for rank in range(member.size)]
            keys.write(awaited[member.rank], "yes")
            if keys.await_all(awaited, slice_s):
                return members
        elif fault := keys.read("fault"):
            raise RequestError(fault)
        if time.monotonic() >= deadline:
            has_come = [bool(text) for text in keys.read_all(awaited)]
            absent = ranks_in_short(rank for rank in range(member.size) if not has_come[rank])
            raise AbsentError(
                f"{name}: {sum(has_come)} of {member.size} ranks came within --timeout {timeout_s:g} s; missing: "
                f"{absent}; start every rank, or raise --timeout{rendezvous.caution}."
            )


def place(members: Sequence[Member], member: Member) -> Topology:
    """Return a member's topology, by the hosts of all."""
    nodes = list(dict.fromkeys(other.node for other in members))
    local_ranks = [other.rank for other in members if other.node == member.node]
    return Topology(
        rank=member.rank,
        size=member.size,
        local_rank=local_ranks.index(member.rank),
        local_size=len(local_ranks),
        node=nodes.index(member.node),
        nodes=len(nodes),
    )


def sharing(members: Sequence[Member], member: Member) -> int:
    """Return how many ranks may run on a member's processors."""
    processors = [set(other.processors) for other in members if other.boot == member.boot]
    return max(1, sum(not allowed.isdisjoint(member.processors) for allowed in processors))


def interface(members: Sequence[Member], member: Member) -> str | None:
    """Return the network interface for a member's traffic; None for no route.

    The one of --interface, or loopback if all are on this host. Otherwise the one on the route to another host, since
    gloo by default takes the host name's address, often loopback; hosts with --interface come first.
    """
    if member.interface:
        return member.interface
    remote = sorted((other for other in members if other.node != member.node), key=lambda other: not other.interface)
    if not remote:
        return "lo0" if sys.platform == "darwin" else "lo"
    # An address that both hosts have, such as that of a container bridge, leads nowhere.
    targets = [address for address in remote[0].addresses if address not in member.addresses]
    source = next(filter(None, map(hosts.own_address, targets)), "")
    return next((name for name, addresses in hosts.interfaces().items() if source in addresses), None)


def check_together(members: Sequence[Member]) -> None:
    """Raise `RequestError` if the ranks cannot be one world."""
    for problem, values, remedy in (
        ("have different world sizes", [member.size for member in members], "give every rank the same --world-size"),
        ("have different versions of lockstep", [member.version for member in members], "install one on every node"),
        ("use different accelerators", [member.accelerator for member in members], "give --accelerator on each rank"),
    ):
        if len(examples := dict(zip(values, members, strict=True))) > 1:
            listed = " and ".join(f"{value} (rank {member.rank}, {member})" for value, member in examples.items())
            raise RequestError(f"The ranks {problem}, {listed}; {remedy}.")
    users: dict[tuple[str, str], Member] = {}
    local_ranks: Counter[tuple[str, str, str]] = Counter()
    for member in members:
        local_rank = local_ranks[member.node]
        local_ranks[member.node] += 1
        gpus = of_rank(member.gpus, local_rank, drives_all=member.drives_all)
        if member.gpus and not gpus:
            raise RequestError(
                f"Rank {member.rank} ({member}) is number {local_rank} of its node, which shows {len(member.gpus)} "
                "GPUs; start at most as many ranks on a node as it has GPUs."
            )
        for gpu in gpus:
            other = users.setdefault((member.boot, gpu), member)
            if other is not member:
                raise RequestError(
                    f"Ranks {other.rank} and {member.rank} on {member.host} would share one GPU ({gpu}); "
                    "give each its own with --gpus, or start fewer ranks on this node."
                )


def _member(text: str) -> Member:
    member = parsed(Member, text)
    for address in member.addresses:
        ipaddress.ip_address(address.partition("%")[0])  # a name would be looked up
    return member

"""The roll call: each rank learns of all others in few requests.

Rank 0 opens a *call*: itself as a member (host, process, world size, GPUs), with a nonce. Each other rank answers that
call with its own member, once. Rank 0 gives the *verdict*: all members, or their fault. Another rank that finds a
fault, such as a rank claimed twice or absent, gives the verdict instead, so that all fail with one sentence. An agent's
store may still hold an earlier start's call: that one has its verdict, and another call will come.
"""

from __future__ import annotations

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

_WAIT_S, _LEAD_WAIT_S = 5.0, 1.0  # for an answer of the store; rank 0 then looks whether another one found a fault
_LOOK_S = 0.1
_HEAR_S = 1.0  # for the others to hear of a fault from a store that ends with this process


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
    """The network interface that the process was told to use, whose addresses these are; "" for any."""
    processors: tuple[int, ...] = field(default_factory=hardware.processors)
    """The processors that the process may run on, by the host's numbers."""
    host: str = field(default_factory=socket.gethostname)
    network: str = field(default_factory=hosts.network)
    boot: str = field(default_factory=hosts.boot)
    pid: int = field(default_factory=os.getpid)
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    version: str = field(default_factory=lambda: version_of("lockstep-torch") or "")

    @property
    def who(self) -> str:
        """The process in words."""
        return f"process {self.pid} on {self.host}"

    @property
    def node(self) -> tuple[str, str, str]:
        """(host, boot, network): equal for ranks that share a host's network."""
        return self.host, self.boot, self.network


@dataclass(frozen=True)
class _Verdict:
    claims: tuple[str, ...] = ()
    """All members, as JSON."""
    fault: str = ""
    absent: bool = False
    """Whether the fault is that a rank has not come."""


def take(rendezvous: Rendezvous, mine: Member, timeout_s: float) -> tuple[Member, ...]:
    """Return the members of all ranks once they have come (*collective*).

    Raises `RequestError`, on every rank that can know, if a rank is missing after `timeout_s` seconds or claimed twice,
    or if ranks were started with different versions, world sizes, accelerators, or the same GPU.
    """
    call = _Call(rendezvous, mine, timeout_s)
    try:
        members = call.lead() if mine.rank == 0 else call.answer()
        rendezvous.keys.store.set_timeout(WAIT)
        return members
    except RequestError:
        if rendezvous.hosted:
            time.sleep(_HEAR_S)
        raise
    except ValueError as error:
        raise RequestError(
            f"{rendezvous.where}: what is said there is no roll call ({error}): another program writes to this store; "
            "give each job a meeting place of its own, which nobody else reaches."
        ) from error
    except RuntimeError as error:  # the store's own: its server has gone
        raise AbsentError(
            f"{rendezvous.where}: the store went away during the roll call ({type(error).__name__}); rank 0, or the "
            "agent that serves it, has ended: see its own message."
        ) from error


class _Call:
    """One rank's part in the roll call."""

    def __init__(self, rendezvous: Rendezvous, mine: Member, timeout_s: float) -> None:
        self._rendezvous, self._keys, self._mine, self._timeout_s = rendezvous, rendezvous.keys, mine, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._nonce = mine.nonce if mine.rank == 0 else ""
        """Of the call."""

    def lead(self) -> tuple[Member, ...]:
        places = self._places()
        self._keys.write(places[0], _json(self._mine))
        self._keys.write("call", _json(self._mine))
        while not (texts := self._await(places, _LEAD_WAIT_S)):
            self._read(self._keys.read(self._verdict))
            if time.monotonic() >= self._deadline:
                raise self._fault(self._absent())
            time.sleep(_LOOK_S)
        members = list(map(_member, texts))
        try:
            check_together(members)
        except RequestError as error:
            self._fault(error)
            raise
        found = json.dumps(asdict(_Verdict(claims=tuple(texts))))
        return self._read(self._keys.put(self._verdict, found))

    def answer(self) -> tuple[Member, ...]:
        called = ""
        conflict: RequestError | None = None
        while time.monotonic() < self._deadline:
            text = "".join(self._await(["call"], _WAIT_S))
            if text and text != called:
                called, lead, outlives = text, _member(text), self._rendezvous.outlives
                is_old = outlives and self._keys.check([f"verdict/{lead.nonce}"])
                self._nonce = "" if is_old else lead.nonce
                conflict = None if is_old else self._claim(lead)
                if conflict and not outlives:  # else the call may be that of a start which ended early
                    raise self._fault(conflict)
            if self._nonce and (members := self._read("".join(self._await([self._verdict], _WAIT_S)))):
                return members
            time.sleep(_LOOK_S)
        raise self._fault(conflict or self._absent())

    @property
    def _verdict(self) -> str:
        return f"verdict/{self._nonce}"

    def _places(self) -> list[str]:
        return [f"claim/{self._nonce}/{rank}" for rank in range(self._mine.size)]

    def _await(self, keys: list[str], most_s: float) -> list[str]:
        return self._keys.await_all(keys, min(most_s, max(_LOOK_S, self._deadline - time.monotonic())))

    def _claim(self, lead: Member) -> RequestError | None:
        """Answer rank 0's call; return the fault, if any."""
        mine, where = self._mine, self._rendezvous.where
        if lead.size != mine.size:
            return RequestError(
                f"{where}: the ranks disagree on the world size: rank 0 ({lead.who}) says {lead.size}, rank "
                f"{mine.rank} ({mine.who}) says {mine.size}; give every rank the same --world-size."
            )
        holder = _member(self._keys.put(self._places()[mine.rank], _json(mine)))
        if holder.nonce == mine.nonce:
            return None
        return RequestError(
            f"{where}: rank {mine.rank} is claimed twice, by {holder.who} and by {mine.who}; "
            "give each process its own --rank, and each run its own meeting place."
        )

    def _absent(self) -> AbsentError:
        came = [bool(text) for text in self._keys.read_all(self._places())] if self._nonce else [False]
        absent = [rank for rank, is_here in enumerate(came) if not is_here]
        count = f"{sum(came)} of {self._mine.size} ranks came" if self._nonce else "rank 0 did not come"
        missing = ranks_in_short(absent) if absent else "an answer of rank 0"
        return AbsentError(
            f"{self._rendezvous.where}: {count} within --timeout {self._timeout_s:g} s; missing: {missing}; start "
            f"every rank, or raise --timeout{self._rendezvous.caution}."
        )

    def _fault(self, error: RequestError) -> RequestError:
        """Raise the verdict, by default `error`; return `error` where others went on."""
        if self._nonce:
            verdict = _Verdict(fault=str(error), absent=isinstance(error, AbsentError))
            self._read(self._keys.put(self._verdict, json.dumps(asdict(verdict))))
        return error  # the others have gone on without this rank

    def _read(self, told: str) -> tuple[Member, ...]:
        """Return a verdict's members, () without this rank; raise its fault."""
        if not told:
            return ()
        verdict = parsed(_Verdict, told)
        if verdict.fault:
            raise (AbsentError if verdict.absent else RequestError)(verdict.fault)
        members = tuple(map(_member, verdict.claims))
        if [member.rank for member in members] != [*range(self._mine.size)]:
            raise ValueError("its members are not the ranks")
        return members if any(member.nonce == self._mine.nonce for member in members) else ()


def place(members: Sequence[Member], mine: Member) -> Topology:
    """Return this rank's topology, by the hosts of the members."""
    nodes = list(dict.fromkeys(member.node for member in members))
    here = [member.rank for member in members if member.node == mine.node]
    return Topology(
        rank=mine.rank,
        size=mine.size,
        local_rank=here.index(mine.rank),
        local_size=len(here),
        node=nodes.index(mine.node),
        nodes=len(nodes),
    )


def sharing(members: Sequence[Member], mine: Member) -> int:
    """Return how many ranks may run on this rank's processors."""
    here = [set(member.processors) for member in members if member.boot == mine.boot]
    return max(1, sum(not each.isdisjoint(mine.processors) for each in here))


def interface(members: Sequence[Member], mine: Member) -> str | None:
    """Return the network interface for this rank's traffic; None for no route.

    The one given to this rank, or loopback if all are on this host. Otherwise the one on the route to another host,
    since gloo by default takes the host name's address, often loopback; hosts with an interface given come first.
    """
    if mine.interface:
        return mine.interface
    elsewhere = sorted(
        (member for member in members if member.node != mine.node), key=lambda member: not member.interface
    )
    if not elsewhere:
        return "lo0" if sys.platform == "darwin" else "lo"
    # An address that both hosts have, such as that of a container bridge, leads nowhere.
    theirs = [address for address in elsewhere[0].addresses if address not in mine.addresses]
    own = next(filter(None, map(hosts.own_address, theirs)), "")
    return next((name for name, addresses in hosts.interfaces().items() if own in addresses), None)


def check_together(members: Sequence[Member]) -> None:
    """Raise `RequestError` if the ranks cannot be one world."""
    for what, facts, remedy in (
        ("are of different versions of lockstep", [each.version for each in members], "install one on every node"),
        (
            "compute on different accelerators",
            [each.accelerator for each in members],
            "give --accelerator on each rank",
        ),
    ):
        if len(kinds := dict(zip(facts, members, strict=True))) > 1:
            words = " and ".join(f"{fact} (rank {member.rank}, {member.who})" for fact, member in sorted(kinds.items()))
            raise RequestError(f"The ranks {what}, {words}; {remedy}.")
    users: dict[tuple[str, str], Member] = {}
    seen: Counter[tuple[str, str, str]] = Counter()
    for member in members:
        local_rank = seen[member.node]
        seen[member.node] += 1
        mine = of_rank(member.gpus, local_rank, drives_all=member.drives_all)
        if member.gpus and not mine:
            raise RequestError(
                f"Rank {member.rank} ({member.who}) is number {local_rank} of its node, which shows "
                f"{len(member.gpus)} GPUs; start at most as many ranks on a node as it has GPUs."
            )
        for gpu in mine:
            other = users.setdefault((member.boot, gpu), member)
            if other is not member:
                raise RequestError(
                    f"Ranks {other.rank} and {member.rank} on {member.host} would share one GPU ({gpu}); "
                    "give each its own with --gpus, or start fewer ranks on this node."
                )


def _json(member: Member) -> str:
    return json.dumps(asdict(member))


def _member(text: str) -> Member:
    member = parsed(Member, text)
    for address in member.addresses:
        ipaddress.ip_address(address.partition("%")[0])  # a name would be looked up
    return member

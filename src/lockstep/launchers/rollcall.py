"""The roll call: rank 0 hears of all ranks who they are, and all hear of it, before a process group is formed.

Rank 0 opens a *call*: its claim (host, process, world size, GPUs) with a nonce. Each other rank answers that call with
its own claim, which can be made once. Once all are there, rank 0 reads them in one request and gives its *verdict*: all
claims, or what is wrong with them. Whoever finds a fault, such as a rank that is claimed twice or does not come, gives
the verdict itself, so that all fail with one sentence. A rank makes a handful of requests, and looks for the verdict a
few times a second.

Where an agent keeps the store, an earlier start's call may lie there: who comes finds its verdict given, or hears none,
and waits for the next call.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from .. import hardware
from ..errors import AbsentError, RequestError, ranks_in_short
from ..monitor.failures import RankLostError
from ..monitor.keys import Keys
from ..versions import version_of
from ..world.topology import Topology
from . import hosts
from .devices import of_rank
from .stores import Meeting

if TYPE_CHECKING:
    from .._torch import Store

_LOOK_S = (0.02, 0.25)  # the first looks are quick: as a rule all come at once
_HEAR_S = 5.0  # for the others to hear the verdict from a rank 0 that ends with it
_LEAVE_S = 10.0


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
    begun: str = field(default_factory=lambda: hosts.begun(os.getpid()))
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    version: str = field(default_factory=lambda: version_of("lockstep-torch") or "")

    @property
    def who(self) -> str:
        """The process in words."""
        return f"process {self.pid} on {self.host}"

    @property
    def node(self) -> tuple[str, str, str]:
        """What ranks share that reach one another without leaving the host."""
        return self.host, self.boot, self.network

    @property
    def is_here(self) -> bool:
        """Whether the process can be seen from here."""
        return (self.boot, self.processes) == (hosts.boot(), hosts.namespace("pid"))

    def is_dead(self) -> bool:
        """Return whether the process is seen, from here, to have ended."""
        return self.is_here and hosts.has_ended(self.pid, self.begun)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Claim:
        """Return the claim that `asdict` was taken of, perhaps by another version, with other fields."""
        known = {each.name for each in fields(cls)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{name: value for name, value in {**values, **lists}.items() if name in known})


@dataclass(frozen=True)
class Peers:
    """All ranks of a world, as one of them sees them."""

    meeting: Meeting
    claims: tuple[Claim, ...]
    """In the order of the ranks."""
    mine: Claim

    @functools.cached_property
    def keys(self) -> Keys:
        """Keys that no other world shares."""
        return self.meeting.keys.under(f"world/{_digest(self.claims)}")

    def group_store(self) -> Store:
        """Return the store for the process group of these ranks, apart from any other world's keys."""
        from .._torch import PrefixStore

        return PrefixStore(f"group/{_digest(self.claims)}", self.meeting.store)

    def beats(self) -> Keys:
        """Return the keys for the beats of these ranks, on a connection of their own. Raises RuntimeError."""
        return self.keys.under("watch").clone()

    def dead(self) -> list[Claim]:
        """Return those whose process has ended on this host without having left."""
        ended = [claim for claim in self.claims if claim.is_dead()]
        return [claim for claim in ended if not self._has_left(claim)]

    def has_one_left(self) -> bool:
        """Return whether a rank has left of its own accord; its own message says why."""
        return any(self._has_left(claim) for claim in self.claims)

    def leave(self, *, clean: bool) -> None:
        """Say that this rank needs the others no more; who serves the store stays until all have said so.

        After a failure nobody is waited for.
        """
        keys, serves = self.keys, self.meeting.hosted
        if not self.meeting.is_open():
            return
        with contextlib.suppress(RuntimeError, OSError):
            keys.write(f"left/{self.mine.rank}", "1")
            if clean and serves:
                _until(lambda: keys.check([f"left/{claim.rank}" for claim in self.claims]), _LEAVE_S)
            if self.meeting.file is not None:
                self.meeting.file.unlink(missing_ok=True)

    def _has_left(self, claim: Claim) -> bool:
        with contextlib.suppress(RuntimeError):
            return self.meeting.is_open() and self.keys.check([f"left/{claim.rank}"])
        return False

    @property
    def server(self) -> int | None:
        """The rank that serves the store; None where it outlives the ranks."""
        return None if self.meeting.outlives else 0


def take(meeting: Meeting, mine: Claim, timeout_s: float) -> Peers:
    """Return all ranks, once all have come (*collective*).

    Raises `RequestError`, on every rank that can know, if a rank is missing after `timeout_s` seconds or claimed twice,
    or if ranks were started with different versions, world sizes, accelerators, or the same GPU.
    """
    call = _Call(meeting, mine, timeout_s)
    try:
        claims = call.verdict()
        check_reach(claims, mine)
        return Peers(meeting, claims, mine)
    except RequestError:
        call.let_others_hear()
        raise
    except KeyboardInterrupt:
        with contextlib.suppress(RequestError, RuntimeError):
            who = f"rank {mine.rank} ({mine.who})"
            call.refuse(
                f"{meeting.where}: {who} was stopped while it waited for the others; start all ranks again.",
                absent=True,
            )
        call.let_others_hear()
        raise
    except RuntimeError as error:  # the store's own: its server has gone
        raise AbsentError(
            f"{meeting.where}: the store went away during the roll call ({type(error).__name__}); rank 0, or the agent "
            "that serves it, has ended: its own message tells why."
        ) from error


class _Call:
    """One rank's part in the roll call."""

    def __init__(self, meeting: Meeting, mine: Claim, timeout_s: float) -> None:
        self._meeting, self._keys, self._mine, self._timeout_s = meeting, meeting.keys, mine, timeout_s
        self._lead: Claim | None = mine if mine.rank == 0 else None
        self._call = self._conflict = ""

    def verdict(self) -> tuple[Claim, ...]:
        """Return all claims once rank 0 has found them right; raise what any rank has found."""
        mine, deadline, look_s = self._mine, time.monotonic() + self._timeout_s, _LOOK_S[0]
        self._keys.write(f"came/{mine.rank}", mine.nonce)
        if mine.rank == 0:
            self._keys.write(self._place(0), _json(mine))
            self._keys.write("call", _json(mine))
        while True:
            if claims := self._heard():
                return claims
            if mine.rank == 0:
                self._judge()
            else:
                self._answer()
            if time.monotonic() >= deadline:
                self.refuse(self._conflict or self._absent(), absent=not self._conflict)
            time.sleep(look_s)
            look_s = min(1.2 * look_s, _LOOK_S[1])

    def refuse(self, sentence: str, *, absent: bool = False) -> NoReturn:
        """Give the verdict, unless one is given, and raise it; `absent` says that another start may go better."""
        told = json.dumps({"absent": absent, "fault": sentence})
        if self._lead is not None:
            told = self._keys.put(f"verdict/{self._lead.nonce}", told) or told
        found = json.loads(told)
        if "fault" not in found:  # the others have gone on, and this one was none of them
            found = {"absent": absent, "fault": sentence}
        raise (AbsentError if found["absent"] else RequestError)(found["fault"])

    def let_others_hear(self) -> None:
        """Stay a moment after a fault where the others would lose the store."""
        if self._lead is None:
            return
        size, key = self._mine.size, f"heard/{self._lead.nonce}"
        with contextlib.suppress(RuntimeError):
            self._keys.write(f"{key}/{self._mine.rank}", "1")
            if self._meeting.hosted:
                came = [rank for rank in range(size) if self._keys.check([f"came/{rank}"])]
                _until(lambda: self._keys.check([f"{key}/{rank}" for rank in came]), _HEAR_S)
        if self._meeting.file is not None:
            self._meeting.file.unlink(missing_ok=True)

    def _place(self, rank: int) -> str:
        assert self._lead is not None
        return f"claim/{self._lead.nonce}/{rank}"

    def _heard(self) -> tuple[Claim, ...]:
        """Return the claims of the verdict, () while there is none; raise what is wrong."""
        if self._lead is None or not (told := self._keys.read(f"verdict/{self._lead.nonce}")):
            return ()
        found = json.loads(told)
        if "fault" in found:
            raise (AbsentError if found["absent"] else RequestError)(found["fault"])
        claims = tuple(map(Claim.of, found["claims"]))
        return claims if any(claim.nonce == self._mine.nonce for claim in claims) else ()

    def _judge(self) -> None:
        """Give the verdict on the ranks, once all are there."""
        places = [self._place(rank) for rank in range(self._mine.size)]
        if not self._keys.check(places):
            return
        texts = self._keys.read_all(places)
        if not all(texts):  # a stranger's
            return
        claims = [Claim.of(json.loads(text)) for text in texts]
        try:
            check_together(claims)
        except RequestError as error:
            self.refuse(f"{error}")
        self._keys.put(f"verdict/{self._mine.nonce}", json.dumps({"claims": [asdict(claim) for claim in claims]}))

    def _answer(self) -> None:
        """Answer rank 0's call, if it is a new one."""
        text, mine, where = self._keys.read("call"), self._mine, self._meeting.where
        if not text or text == self._call:
            return
        self._call, lead = text, Claim.of(json.loads(text))
        if self._meeting.outlives and self._keys.read(f"verdict/{lead.nonce}"):
            return  # of an earlier start
        self._lead, self._conflict = lead, ""
        if lead.size != mine.size:
            self._conflict = (
                f"{where}: the ranks disagree on the world size: rank 0 ({lead.who}) says {lead.size}, rank "
                f"{mine.rank} ({mine.who}) says {mine.size}; give every rank the same --world-size."
            )
        else:
            holder = Claim.of(json.loads(self._keys.put(self._place(mine.rank), _json(mine)) or _json(mine)))
            if holder.nonce != mine.nonce:
                self._conflict = (
                    f"{where}: rank {mine.rank} is claimed twice, by {holder.who} and by {mine.who}; "
                    "give each process its own --rank, and each run its own meeting place."
                )
        if self._conflict and not self._meeting.outlives:  # else it may be of an earlier start
            self.refuse(self._conflict)

    def _absent(self) -> str:
        size = self._mine.size
        keys = [self._place(rank) if self._lead else f"came/{rank}" for rank in range(size)]
        absent = [rank for rank, key in enumerate(keys) if not self._keys.check([key])]
        for rank in absent:
            self._keys.read(f"came/{rank}")  # which tells of one with another secret
        return (
            f"{self._meeting.where}: {size - len(absent)} of {size} ranks came within --timeout {self._timeout_s:g} s; "
            f"missing: {ranks_in_short(absent) if absent else 'an answer of rank 0'}; start every rank, or raise "
            f"--timeout{self._meeting.caution}."
        )


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
    """Raise `RequestError` if ranks that are each right by themselves cannot be one world."""
    for what, facts, remedy in (
        ("are of different versions of lockstep", [each.version for each in claims], "install one on every node"),
        ("compute on different accelerators", [each.accelerator for each in claims], "give --accelerator on each rank"),
    ):
        if len(kinds := dict(zip(facts, claims, strict=True))) > 1:
            words = " and ".join(f"{fact} (rank {claim.rank}, {claim.who})" for fact, claim in sorted(kinds.items()))
            raise RequestError(f"The ranks {what}, {words}; {remedy}.")
    users: dict[tuple[str, str], Claim] = {}
    seen: Counter[tuple[str, str, str]] = Counter()
    for claim in claims:
        local_rank = seen[claim.node]
        seen[claim.node] += 1
        mine = of_rank(claim.gpus, local_rank, drives_all=claim.drives_all)
        if claim.gpus and not mine:
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
    """Raise `RequestError` if the interface that this rank was told to use does not lead to a rank elsewhere."""
    for claim in claims if mine.interface else ():
        ways = {address: hosts.own_address(address) for address in claim.addresses}
        if claim.node != mine.node and not any(own in mine.addresses for own in ways.values()):
            roads = ", ".join(f"{address} (by {own or 'no way'})" for address, own in ways.items())
            raise RequestError(
                f"Rank {mine.rank} ({mine.who}): --interface {mine.interface} ({', '.join(mine.addresses)}) does not "
                f"lead to rank {claim.rank} ({claim.who}), which is reached at {roads}; give each rank the interface "
                f"of one network, of those here: {hosts.listed()}."
            )


def server_lost(meeting: Meeting, rank: int) -> RankLostError:
    """Return the error of a rank whose store went away before there was a world."""
    return RankLostError(
        f"Rank {rank}: rank 0, or the agent that serves {meeting.where}, ended before training began: its own message "
        "says why; then start all ranks again."
    )


def _digest(claims: Sequence[Claim]) -> str:
    """Return what tells these processes from any others."""
    return hashlib.sha256("".join(claim.nonce for claim in claims).encode()).hexdigest()[:16]


def _json(claim: Claim) -> str:
    return json.dumps(asdict(claim))


def _until(holds: Callable[[], bool], limit_s: float) -> bool:
    """Return True as soon as `holds()`, False if it does not within `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S[0])
    return True

"""What ranks can only find out together: whether they reach one another, and what comes of computing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .. import bounded
from ..failures import is_echo, one_line
from ..launchers import rank
from . import collectives, copies, devices, network, ports
from .board import Board
from .collectives import Carrier, Measured
from .finding import RED, Finding, Subject, failed
from .patient import Self, present

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed re-exports it unseen by type checkers

    from ..world import World

_PART = 0.8
"""Of the time that a rank is waited for: within it a collective gives up, and there is time to say so."""
_FIX = (
    "see what that rank printed; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL in its environment make it say more"
)


def reach(me: Self, board: Board, names: Sequence[str]) -> list[Finding]:
    """Return whether the ranks reach one another, and how far their clocks are apart (*collective*)."""
    own, size = me.topology.rank, me.topology.size
    with contextlib.ExitStack() as stack:
        trouble = ""
        try:
            door = stack.enter_context(ports.listening(me.wire.address or ports.LOOPBACK))
        except OSError as error:
            trouble = one_line(error)
        told = board.all("doors", {"trouble": trouble} if trouble else {"door": asdict(door), "node": me.topology.node})
        doors = {at: ports.Door(**each["door"]) for at, each in present(told) if "door" in each}
        visits = ports.visit_all({at: each for at, each in doors.items() if at != own})
        told_visits = board.all("visits", {str(at): asdict(each) for at, each in visits.items()})
    findings = [
        replace(failed(Subject("network", "ports"), OSError(each["trouble"])), state=RED, ranks=(at,))
        for at, each in present(told)
        if "trouble" in each
    ]
    been = {(at, int(to)): ports.Visit(**each) for at, visits in present(told_visits) for to, each in visits.items()}
    findings.append(ports.judge({pair: each.trouble for pair, each in been.items()}, doors, names))
    nodes = {at: each["node"] for at, each in present(told) if "node" in each}
    leaders = [at for at, node in nodes.items() if at == min(other for other in nodes if nodes[other] == node)]
    clocks = [
        network.judge_clock(-been[at, 0].offset_s, been[at, 0].bound_s, at)
        for at in leaders
        if (at, 0) in been and not been[at, 0].trouble and nodes[at] != nodes.get(0)
    ]
    return findings + (clocks or ([network.one_clock(size)] if len(set(nodes.values())) == 1 else []))


def compute(me: Self, board: Board, store: Store, names: Sequence[str], *, can: bool) -> list[Finding]:
    """Return what comes of computing together (*collective*); `can` says whether the ranks reach one another."""
    if me.topology.size == 1:
        return [*collectives.judge({}, None, names)]
    if not can or board.absent:
        why = "a rank fell silent" if can else "the ranks cannot reach one another"
        return [Subject("collectives", "all-reduce").unchecked(f"not tried, since {why}")]
    limit_s = _PART * board.patience_s
    carrier = _carrier(me, board)
    worlds: list[World] = []
    _, trouble = _attempt(board, "forming a group", lambda: worlds.append(_form(me, store, limit_s)))
    try:
        return trouble or _in_world(worlds[0], board, carrier, names, limit_s)
    finally:
        for world in worlds:
            rank.close_soon(world)


def _in_world(
    world: World, board: Board, carrier: Carrier | None, names: Sequence[str], limit_s: float
) -> list[Finding]:
    """Return what comes of all-reduces, and of sending bytes from each rank to each (*collective*)."""
    told, trouble = _attempt(
        board, "all-reduce", lambda: [asdict(each) for each in collectives.all_reduces(world, limit_s)]
    )
    if trouble:
        return trouble
    measured = {at: [Measured(**each) for each in rows] for at, rows in told.items()}
    findings = [*collectives.judge(measured, carrier, names)]
    wrong, trouble = _attempt(board, "sending", lambda: copies.between_ranks(world, copies.SEED))
    return findings + (trouble or [copies.judge_between(wrong, names, world.device.type == "cuda")])


def _form(me: Self, store: Store, limit_s: float) -> World:
    import torch
    from torch._C._distributed_c10d import PrefixStore

    from ..world import World

    form_s = min(limit_s, me.config.parallel.timeout)

    def join() -> World:
        if me.device.type == "cuda":
            torch.cuda.set_device(me.device)  # which each thread has its own of
        return World.join(
            me.topology, me.device, PrefixStore("group", store), timeout_s=limit_s, form_s=form_s, collectives="gloo"
        )

    return bounded.within(limit_s, join, "forming the process group")  # NCCL has no limit of its own for it


def _carrier(me: Self, board: Board) -> Carrier | None:
    """Return what all-reduces of these ranks go through, the slowest on any host; None where its rate is unknown."""
    mine: Carrier | None = None
    infiniband = network.infiniband_bytes_per_s() if me.device.type == "cuda" else None
    if me.topology.nodes > 1 and infiniband:
        mine = Carrier("link", "InfiniBand", infiniband)
    elif me.topology.nodes > 1:
        if me.wire.bytes_per_s:
            fast = me.device.type == "cpu" and me.wire.bytes_per_s > collectives.GLOO_FILLS_BYTES_PER_S
            mine = Carrier("fast link" if fast else "link", me.wire.interface, me.wire.bytes_per_s)
    elif me.device.type == "cuda":
        gpu = next((each for each in me.driver.gpus if each.index == me.device.index), None)
        if gpu and (found := devices.link(me.driver, gpu)):
            mine = Carrier(found[0], found[0], found[1])
    elif me.topology.local_rank == 0:  # one at a time
        mine = Carrier("memory", "memory copy", collectives.memory_bytes_per_s())
    told = [Carrier(**each) for _, each in present(board.all("carriers", asdict(mine) if mine else {})) if each]
    return min(told, key=lambda each: each.bytes_per_s, default=None)


def _attempt(board: Board, topic: str, work: Callable[[], Any]) -> tuple[dict[int, Any], list[Finding]]:
    """Do `work` on every rank; return what it gave, by rank, and findings where it failed (*collective*)."""
    try:
        mine = {"value": work()}
    except Exception as error:
        mine = {"error": one_line(error), "is_echo": is_echo(error)}
    told = dict(present(board.all(topic, mine)))
    failures = {at: each for at, each in told.items() if "error" in each}
    # Who has only lost another rank knows less than that one.
    causes = {at: each for at, each in failures.items() if not each["is_echo"]} or failures
    if board.absent:
        causes = {}  # told by the rank that fell silent
    trouble = [Subject("collectives", topic, ranks=(at,)).red(each["error"], _FIX) for at, each in causes.items()]
    if board.absent and not trouble:
        words = "given up, since a rank fell silent"
        trouble = [Subject("collectives", topic).unchecked(words)]
    return {at: each.get("value") for at, each in told.items()}, trouble

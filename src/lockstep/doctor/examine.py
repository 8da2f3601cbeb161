"""The examination: what is looked at, in which order, on which rank.

Each rank looks at its host and its device by itself; what concerns pairs or all is done together. After each part the
ranks tell one another over the board what came out, also where it failed, so that nobody waits for a rank in vain.
Rank 0 judges.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RunConfig
from ..failures import is_echo, one_line
from ..kinds import kind
from ..launchers import hosts, rank, table
from ..topology import Topology
from . import collectives, copies, devices, disk, host, network, nvml, ports, software
from .board import Board
from .bounded import Probe, look
from .collectives import Carrier, Measured
from .finding import RED, Finding, Subject, failed, merged

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store  # torch.distributed re-exports it unseen by type checkers

    from ..world import World

_PROBE_S = 10.0
_PART = 0.8
"""Of the time that a rank is waited for: within it a collective gives up, and there is time to say so."""
_IMPORT_PART = 0.5
"""Of that time, for an import, which on a busy machine or a network disk takes seconds."""
_LOOPBACK = "127.0.0.1"
_SEED = 1
_FIX = (
    "see what that rank printed; NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL in its environment make it say more"
)


@dataclass(frozen=True)
class Asked:
    """What the user asked for beside the ranks."""

    output: Path
    data: Path | None
    """None where none was named."""
    chosen_cpu: bool
    """Whether the ranks compute on the CPU because somebody said so."""


@dataclass(frozen=True)
class Report:
    """What came out, as rank 0 has it."""

    findings: tuple[Finding, ...]
    hosts: tuple[str, ...]
    """Of each rank."""
    accelerator: str
    """cpu or cuda."""
    absent: tuple[int, ...]
    """Ranks that fell silent."""


@dataclass(frozen=True)
class Self:
    """This rank, and what it has found out about itself."""

    config: RunConfig
    topology: Topology
    device: torch.device
    driver: nvml.Driver
    wire: network.Wire
    limit_s: float
    """For one thing that may hang."""

    @property
    def sharers(self) -> host.Sharers:
        """With whom it shares its host."""
        return host.Sharers(self.topology.local_size, self.topology.size, on_cpu=self.device.type == "cpu")


def examine(config: RunConfig, topology: Topology, device: torch.device, store: Store, asked: Asked) -> Report:
    """Look at everything; return the report, which is whole on rank 0 (*collective*)."""
    from torch._C._distributed_c10d import PrefixStore

    patience_s = config.parallel.stall_timeout
    board = Board(PrefixStore("doctor", store), topology.rank, topology.size, patience_s)
    me, found = _introduced(config, topology, device, min(_PROBE_S, patience_s / 4))
    told = board.all(
        "host",
        {
            "host": socket.gethostname(),
            "node": topology.node,
            "versions": software.versions(me.driver.version),
            "mtu": me.wire.mtu,
            "findings": _sent([*found, *_of_rank(me)], topology.rank),
            "of_host": _sent(_of_host(me, asked), None) if topology.local_rank == 0 else [],
        },
    )
    names = [each["host"] if each else "?" for each in told]
    findings = [
        *software.judge({at: each["versions"] for at, each in _present(told)}, software.least_torch()),
        *_received(told),
        *_received_of_hosts(told),
        *network.judge_mtus({at: each["mtu"] for at, each in _present(told)}),
    ]
    reached = _ports(me, board, names)
    findings += reached
    findings += _together(me, board, store, names, can=not any(each.state == RED for each in reached))
    findings += _disk(me, board, asked.output)
    for absent, topic in board.absent.items():
        words = f"it fell silent at {topic}, and was waited for {patience_s:g} s"
        fix = "see whether it was stopped, and what its host is busy with; end it before a job starts"
        findings.append(Subject("collectives", "ranks", ranks=(absent,)).red(words, fix))
    return Report(tuple(merged(findings)), tuple(names), device.type, tuple(board.absent))


def _introduced(
    config: RunConfig, topology: Topology, device: torch.device, limit_s: float
) -> tuple[Self, list[Finding]]:
    """Return this rank with its driver and its wire, and what was found where these could not be asked."""
    drivers: list[nvml.Driver] = []
    wires: list[network.Wire] = []

    def ask_driver() -> Iterator[Finding]:
        drivers.append(nvml.ask(table.visible_gpus()))
        yield from ()

    def find_wire() -> Iterator[Finding]:
        wires.append(network.wire(rank.bound(), topology.address or hosts.ANYWHERE))
        yield from ()

    found = look(Subject("devices", "driver"), ask_driver, limit_s)
    found += look(Subject("network", "interface"), find_wire, limit_s)
    wire = wires[0] if wires else network.Wire("", "", None, None)
    if not wire.address and not wire.interface and topology.nodes == 1:
        wire = replace(wire, interface="loopback", address=_LOOPBACK)  # a laptop without a network
    return Self(config, topology, device, drivers[0] if drivers else nvml.Driver(), wire, limit_s), found


def _of_rank(me: Self) -> list[Finding]:
    """Return what this rank finds about its own process and its own devices."""
    gpus = _own_gpus(me)
    probes: list[tuple[Subject, Probe]] = [
        (Subject("host", "processors"), lambda: host.processors(me.sharers)),
        (Subject("host", "limits"), lambda: host.limits(me.sharers)),
        (Subject("devices", "GPUs"), lambda: devices.gpus(gpus)),
        (Subject("devices", "copies"), lambda: copies.host_and_devices(_own_devices(me), _SEED + me.topology.rank)),
    ]
    return list(itertools.chain.from_iterable(look(about, probe, me.limit_s) for about, probe in probes))


def _of_host(me: Self, asked: Asked) -> list[Finding]:
    """Return what all ranks of this host share, which one of them looks at."""
    own, address, on_cpu = socket.gethostname(), me.wire.address, me.device.type == "cpu"
    others, data = me.topology.nodes > 1, asked.data
    links = [] if on_cpu else me.driver.links
    probes: list[tuple[Subject, Probe]] = [
        (Subject("host", "memory"), host.memory),
        (Subject("host", "shared memory"), lambda: host.shared_memory(me.sharers)),
        (
            Subject("devices", "GPUs"),
            lambda: devices.usable(me.driver, on_cpu=on_cpu, chosen_cpu=asked.chosen_cpu),
        ),
        (Subject("devices", "links"), lambda: devices.links(links, not on_cpu)),
        (Subject("network", "interface"), lambda: network.judge_wire(me.wire, others=others)),
        (
            Subject("network", "host name"),
            lambda: network.names(own, address, is_bound=bool(rank.bound()), others=others),
        ),
        (Subject("disk", "data"), lambda: disk.data(data) if data is not None else ()),
    ]
    found = look(Subject("host", "torchvision"), software.torchvision, _IMPORT_PART * me.config.parallel.stall_timeout)
    return [*found, *itertools.chain.from_iterable(look(about, probe, me.limit_s) for about, probe in probes)]


def _drives_all(me: Self) -> bool:
    return kind(me.config.parallel.strategy).drives_all


def _own_gpus(me: Self) -> list[nvml.GpuState]:
    """Return the GPUs that this process drives."""
    if me.device.type == "cpu":
        return []
    if not _drives_all(me):
        return [gpu for gpu in me.driver.gpus if gpu.index == me.device.index]
    chosen = me.config.parallel.gpu_indices
    return [gpu for gpu in me.driver.gpus if not chosen or gpu.index in chosen][: me.config.parallel.devices]


def _own_devices(me: Self) -> list[torch.device]:
    """Return the devices that this process drives, its own first."""
    import torch

    others = [torch.device("cuda", gpu.index) for gpu in _own_gpus(me) if gpu.index != me.device.index]
    return [me.device, *others]


def _ports(me: Self, board: Board, names: Sequence[str]) -> list[Finding]:
    """Return whether the ranks reach one another, and how far their clocks are apart (*collective*)."""
    own, size = me.topology.rank, me.topology.size
    with contextlib.ExitStack() as stack:
        trouble = ""
        try:
            door = stack.enter_context(ports.listening(me.wire.address or _LOOPBACK))
        except OSError as error:
            trouble = one_line(error)
        told = board.all("doors", {"trouble": trouble} if trouble else {"door": asdict(door), "node": me.topology.node})
        doors = {at: ports.Door(**each["door"]) for at, each in _present(told) if "door" in each}
        visits = ports.visit_all({at: each for at, each in doors.items() if at != own})
        told_visits = board.all("visits", {str(at): asdict(each) for at, each in visits.items()})
    findings = [
        replace(failed(Subject("network", "ports"), OSError(each["trouble"])), state=RED, ranks=(at,))
        for at, each in _present(told)
        if "trouble" in each
    ]
    been = {(at, int(to)): ports.Visit(**each) for at, visits in _present(told_visits) for to, each in visits.items()}
    findings.append(ports.judge({pair: each.trouble for pair, each in been.items()}, doors, names))
    nodes = {at: each["node"] for at, each in _present(told) if "node" in each}
    leaders = [at for at, node in nodes.items() if at == min(other for other in nodes if nodes[other] == node)]
    clocks = [
        network.judge_clock(-been[at, 0].offset_s, been[at, 0].bound_s, at)
        for at in leaders
        if (at, 0) in been and not been[at, 0].trouble and nodes[at] != nodes.get(0)
    ]
    return findings + (clocks or ([network.one_clock(size)] if len(set(nodes.values())) == 1 else []))


def _together(me: Self, board: Board, store: Store, names: Sequence[str], *, can: bool) -> list[Finding]:
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
    wrong, trouble = _attempt(board, "sending", lambda: copies.between_ranks(world, _SEED))
    return findings + (trouble or [copies.judge_between(wrong, names, world.device.type == "cuda")])


def _form(me: Self, store: Store, limit_s: float) -> World:
    from torch._C._distributed_c10d import PrefixStore

    from ..world import World

    form_s = min(limit_s, me.config.parallel.timeout)
    return World.join(me.topology, me.device, PrefixStore("group", store), timeout_s=limit_s, form_s=form_s)


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
    told = [Carrier(**each) for _, each in _present(board.all("carriers", asdict(mine) if mine else {})) if each]
    return min(told, key=lambda each: each.bytes_per_s, default=None)


def _disk(me: Self, board: Board, folder: Path) -> list[Finding]:
    """Return what the output folder is like for rank 0, which writes there, and whether the others see it."""
    found: list[Finding] = []
    marks: list[disk.Mark] = []
    seen: list[bool] = []

    def leave_mark() -> Iterator[Finding]:
        marks.extend(stack.enter_context(disk.marked(folder)))
        yield from ()

    def look_for(mark: disk.Mark) -> Iterator[Finding]:
        seen.append(disk.sees(mark))
        yield from ()

    with contextlib.ExitStack() as stack:
        if me.topology.is_main:
            found += look(Subject("disk", "output"), lambda: disk.output(folder), me.limit_s, hung=RED)
            found += look(Subject("disk", "shared"), leave_mark, me.limit_s) if me.topology.size > 1 else []
        told = board.all("marks", {"findings": _sent(found, None), "mark": asdict(marks[0]) if marks else None})
        findings = _received(told)
        left = disk.Mark(**told[0]["mark"]) if told[0]["mark"] else None
        trouble = look(Subject("disk", "shared"), lambda: look_for(left), me.limit_s) if left else []
        told = board.all("seen", {"findings": _sent(trouble, me.topology.rank), "seen": seen == [True]})
    others = {at: each["seen"] for at, each in _present(told) if at}
    return [*findings, *_received(told), disk.judge_shared(left, others, hosts=me.topology.nodes)]


def _attempt(board: Board, topic: str, work: Callable[[], Any]) -> tuple[dict[int, Any], list[Finding]]:
    """Do `work` on every rank; return what it gave, by rank, and findings where it failed (*collective*)."""
    try:
        mine = {"value": work()}
    except Exception as error:
        mine = {"error": one_line(error), "is_echo": is_echo(error)}
    told = dict(_present(board.all(topic, mine)))
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


def _present(told: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield (rank, what it told) of those that are not absent."""
    return ((at, each) for at, each in enumerate(told) if each is not None)


def _sent(found: Sequence[Finding], own: int | None) -> list[dict[str, Any]]:
    """Return findings for the board; those that name no rank are about `own`, if that is one."""
    about = () if own is None else (own,)
    return [replace(each, ranks=each.ranks or about).to_json() for each in found]


def _received(told: Sequence[Any]) -> list[Finding]:
    return [Finding.from_json(values) for _, each in _present(told) for values in each["findings"]]


def _received_of_hosts(told: Sequence[Any]) -> list[Finding]:
    """Return what was found about hosts, as findings about all ranks there."""
    ranks: dict[int, tuple[int, ...]] = {}
    for at, each in _present(told):
        ranks[each["node"]] = (*ranks.get(each["node"], ()), at)
    return [
        replace(Finding.from_json(values), ranks=ranks[each["node"]])
        for _, each in _present(told)
        for values in each["of_host"]
    ]

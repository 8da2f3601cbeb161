"""The examination: what is looked at, in which order, on which rank.

Each rank looks at its host and its device by itself; what concerns pairs or all is done together. After each part the
ranks tell one another over the board what came out, also where it failed, so that nobody waits for a rank in vain.
Rank 0 judges.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RunConfig
from ..kinds import kind
from ..launchers import hosts, rank, table
from ..topology import Topology
from . import copies, devices, disk, host, network, nvml, ports, software, together
from .board import Board
from .bounded import Probe, look
from .finding import RED, Finding, Subject, merged
from .patient import Self, present, received, sent

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store  # torch.distributed re-exports it unseen by type checkers


_PROBE_S = 10.0
_LONG_PART = 0.5
"""Of --stall-timeout, for an import, which on a busy machine or a network disk takes seconds, and for copies between
many devices, at most."""
_COPY_PART = 0.8
"""Of the time for copies, after which none is begun."""


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
            "findings": sent([*found, *_of_rank(me)], topology.rank),
            "of_host": sent(_of_host(me, asked), None) if topology.local_rank == 0 else [],
        },
    )
    names = [each["host"] if each else "?" for each in told]
    findings = [
        *software.judge({at: each["versions"] for at, each in present(told)}, software.least_torch()),
        *received(told),
        *_received_of_hosts(told),
        *network.judge_mtus({at: each["mtu"] for at, each in present(told)}),
    ]
    reached = together.reach(me, board, names)
    findings += reached
    findings += together.compute(me, board, store, names, can=not any(each.state == RED for each in reached))
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
        wire = replace(wire, interface="loopback", address=ports.LOOPBACK)  # a laptop without a network
    return Self(config, topology, device, drivers[0] if drivers else nvml.Driver(), wire, limit_s), found


def _of_rank(me: Self) -> list[Finding]:
    """Return what this rank finds about its own process and its own devices."""
    gpus = _own_gpus(me)
    probes: list[tuple[Subject, Probe]] = [
        (Subject("host", "processors"), lambda: host.processors(me.sharers)),
        (Subject("host", "limits"), lambda: host.limits(me.sharers)),
        (Subject("devices", "GPUs"), lambda: devices.gpus(gpus)),
    ]
    found = list(itertools.chain.from_iterable(look(about, probe, me.limit_s) for about, probe in probes))
    own, seed = _own_devices(me), copies.SEED + me.topology.rank
    limit_s = copies.limit_s(len(own), me.limit_s, _LONG_PART * me.config.parallel.stall_timeout)
    return [
        *found,
        # They end by themselves before they are left behind, where they would disturb what is timed next.
        *look(Subject("devices", "copies"), lambda: copies.host_and_devices(own, seed, _COPY_PART * limit_s), limit_s),
    ]


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
    found = look(Subject("host", "torchvision"), software.torchvision, _LONG_PART * me.config.parallel.stall_timeout)
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
        told = board.all("marks", {"findings": sent(found, None), "mark": asdict(marks[0]) if marks else None})
        findings = received(told)
        left = disk.Mark(**told[0]["mark"]) if told[0]["mark"] else None
        trouble = look(Subject("disk", "shared"), lambda: look_for(left), me.limit_s) if left else []
        told = board.all("seen", {"findings": sent(trouble, me.topology.rank), "seen": seen == [True]})
    others = {at: each["seen"] for at, each in present(told) if at}
    return [*findings, *received(told), disk.judge_shared(left, others, hosts=me.topology.nodes)]


def _received_of_hosts(told: Sequence[Any]) -> list[Finding]:
    """Return what was found about hosts, as findings about all ranks there."""
    ranks: dict[int, tuple[int, ...]] = {}
    for at, each in present(told):
        ranks[each["node"]] = (*ranks.get(each["node"], ()), at)
    return [
        replace(Finding.from_json(values), ranks=ranks[each["node"]])
        for _, each in present(told)
        for values in each["of_host"]
    ]

"""The examination: what is looked at, in which order, on which rank.

Each rank looks at its devices by itself, and one of each host at that; what concerns pairs or all is done together.
After each part the ranks tell one another over the board what came out. Rank 0 judges.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import hardware
from ..config.schema import RunConfig
from ..hardware import Gpu
from ..launchers import hosts, rank, table
from ..launchers.devices import drives_all
from ..world.topology import Topology
from . import collectives, devices, disk, host, network
from .finding import RED, UNCHECKED, Finding, Probe, look, merged

if TYPE_CHECKING:
    import torch

    from .._torch import Store
    from ..world.world import World
    from .board import Board

_PROBE_PART = 1 / 3
"""Of --stall-timeout, for one thing that may hang."""


@dataclass(frozen=True)
class Report:
    """What came out, as rank 0 has it; `hosts` are those of the ranks."""

    findings: tuple[Finding, ...]
    hosts: tuple[str, ...]
    accelerator: str


@dataclass(frozen=True)
class Examination:
    """What every rank runs: it forms the world itself, and says so where none can be formed."""

    output: Path
    """Absolute, as `data`."""
    data: Path | None
    chosen_cpu: bool
    """Whether ranks compute on the CPU because somebody said so."""
    tell: Callable[[Report], None]
    """Called on rank 0 where ranks fell silent: whoever waits for all of them would wait for ever."""

    def __call__(self, config: RunConfig, world: World) -> Any:
        raise AssertionError("the launchers let this entry form its own world")

    def before_world(self, config: RunConfig, topology: Topology, device: torch.device, store: Store) -> Report:
        """Look at everything; return the report, which is whole on rank 0 (*collective*)."""
        from .._torch import PrefixStore
        from .board import Board

        seen = hardware.survey(table.visible_gpus())
        wire = network.wire(rank.bound(), topology.address or hosts.ANYWHERE)
        board = Board(PrefixStore("doctor", store), topology.rank, topology.size, config.parallel.stall_timeout)
        limit_s = _PROBE_PART * board.patience_s
        probes = self._probes(config, topology, device, seen.gpus, wire)
        alone = [each for group, name, probe in probes for each in look(group, name, probe, limit_s)]
        told = board.all("host", [socket.gethostname(), host.versions(seen.driver)])
        names = [told[at][0] if at in told else "?" for at in range(topology.size)]
        findings = [*host.judge_versions({at: versions for at, (_, versions) in told.items()})]
        findings += board.findings("what each found", alone)
        findings.append(reached := network.reach(topology, wire.address or "127.0.0.1", board, names))
        if topology.size > 1 and not board.absent and reached.state != RED:
            computed = collectives.compute(topology, device, store, board, config.parallel.collectives)
            findings += collectives.judge(computed, names) if not board.absent else []
        else:
            why = (
                "not all ranks are reached" if topology.size > 1 else "one rank; lockstep doctor --devices 2 starts two"
            )
            findings.append(Finding("collectives", "all-reduce", UNCHECKED, f"not tried: {why}"))
        findings += [*_disk(board, self.output, limit_s), *board.absent.values()]
        report = Report(tuple(merged(findings)), tuple(names), device.type)
        if topology.is_main and board.absent:
            self.tell(report)
        return report

    def _probes(
        self, config: RunConfig, topology: Topology, device: torch.device, gpus: Sequence[Gpu], wire: network.Wire
    ) -> Iterator[tuple[str, str, Probe]]:
        """Yield what this rank looks at: its GPUs and, as first of its host, the host."""
        if device.type == "cuda":
            chosen = list(config.parallel.gpu_indices or range(len(gpus)))[: config.parallel.devices]
            own = chosen if drives_all(config.parallel) else [device.index]
            yield "devices", "GPUs", lambda: itertools.chain(*(devices.judge(at, gpus[at]) for at in own))
        if topology.local_rank == 0:
            yield "host", "host", lambda: host.look_at(topology, device.type == "cpu")
            yield "devices", "GPUs", lambda: devices.usable(len(gpus), chosen_cpu=self.chosen_cpu)
            yield "network", "interface", lambda: network.look_at(wire, others=topology.nodes > 1)
            yield "disk", "data", lambda: disk.data(self.data) if self.data else ()


def _disk(board: Board, folder: Path, limit_s: float) -> list[Finding]:
    """Return what rank 0 finds in the output folder, and whether the others see it."""
    left: list[Path] = []
    try:
        findings = look("disk", "output", lambda: disk.output(folder, left), limit_s, RED) if board.rank == 0 else []
        is_red = any(each.state == RED for each in findings)
        written = board.all("output", None if is_red or not left else str(left[0]))[0]
        if written is None or board.size == 1:
            return findings
        return findings + board.findings("shared", look("disk", "shared", lambda: disk.shared(Path(written)), limit_s))
    finally:
        with contextlib.suppress(OSError):
            for path in left:
                path.unlink()

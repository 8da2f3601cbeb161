"""The examination: its probes, their order and their ranks.

Each rank probes its own devices, and one rank of each host probes the host; probes of pairs or of all run together.
After each part the ranks exchange their results over the board. Rank 0 judges.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import hardware
from ..config.schema import RunConfig
from ..launchers import hosts, rank
from ..launchers.devices import visible_gpus
from ..world.topology import Topology
from .finding import RED, UNCHECKED, Finding, Probe, look, merged

if TYPE_CHECKING:
    import torch

    from .._torch import Store
    from ..world.world import World

_PROBE_PART = 1 / 3
"""Of --stall-timeout, for one thing that may hang."""


@dataclass(frozen=True)
class Report:
    """The examination's findings, complete on rank 0; `hosts` are the ranks'."""

    findings: tuple[Finding, ...]
    hosts: tuple[str, ...]
    accelerator: str


@dataclass(frozen=True)
class Examination:
    """The entry of every rank, which forms the world itself, if possible."""

    output: Path
    """Absolute, as `data`."""
    data: Path | None
    chosen_cpu: bool
    """Whether ranks compute on the CPU by the user's choice."""
    tell: Callable[[Report], None]
    """Called on rank 0 where ranks fell silent: a wait for all of them would never end."""

    def __call__(self, config: RunConfig, world: World) -> Any:
        raise AssertionError("the launchers let this entry form its own world")

    def before_world(self, config: RunConfig, topology: Topology, device: torch.device, store: Store) -> Report:
        """Run all probes, and return the report (*collective*)."""
        # Here, since they import torch, and the process that starts ranks does not.
        from .._torch import PrefixStore
        from . import alone, together

        parallel, is_cpu = config.parallel, device.type == "cpu"
        seen = hardware.survey(visible_gpus())
        interface = rank.bound()
        address = alone.address_of(interface, topology.address or hosts.ANYWHERE)
        board = together.Board(PrefixStore("doctor", store), topology.rank, topology.size, parallel.stall_timeout)
        limit_s = _PROBE_PART * board.patience_s
        probes: list[tuple[str, str, Probe]] = []
        if not is_cpu:
            chosen = list(parallel.gpu_indices or range(len(seen.gpus)))[: parallel.devices]
            own = chosen if parallel.drives_all else [device.index]
            probes.append(("devices", "GPUs", lambda: [alone.judge_gpu(at, seen.gpus[at]) for at in own]))
        if topology.local_rank == 0:
            gpus, several = len(seen.gpus), topology.nodes > 1
            probes += [
                ("host", "host", lambda: alone.host(topology, is_cpu)),
                ("devices", "GPUs", lambda: alone.usable_gpus(gpus, chosen_cpu=self.chosen_cpu)),
                ("network", "interface", lambda: alone.network(address, is_chosen=bool(interface), others=several)),
                ("disk", "data", lambda: alone.data(self.data) if self.data else ()),
            ]
        looked = [each for group, name, probe in probes for each in look(group, name, probe, limit_s)]
        told = board.all("host", [socket.gethostname(), alone.versions(seen.driver)])
        names = [told[at][0] if at in told else "?" for at in range(topology.size)]
        findings = [*alone.judge_versions({at: versions for at, (_, versions) in told.items()})]
        findings += board.findings("what each found", looked)
        findings.append(reached := together.reach(address, board, names))
        if topology.size > 1 and not board.absent and reached.state != RED:
            computed = together.compute(topology, device, store, board, parallel.collectives)
            findings += together.judge(computed, names) if not board.absent else []
        else:
            single = "one rank; lockstep doctor --devices 2 starts two"
            why = "not all ranks are reached" if topology.size > 1 else single
            findings.append(Finding("collectives", "all-reduce", UNCHECKED, f"not tried: {why}"))
        findings += [*together.folder(self.output, board, limit_s), *board.absent.values()]
        report = Report(tuple(merged(findings)), tuple(names), device.type)
        if topology.is_main and board.absent:
            self.tell(report)
        return report

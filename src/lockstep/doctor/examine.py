"""Run the doctor's probes on their ranks, in order.

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
from ..config.schema import ParallelConfig, RunConfig
from ..launchers import hosts, rank
from ..launchers.devices import visible_gpus
from ..world.topology import Topology
from .finding import RED, UNCHECKED, Finding, Probe, conclude, look, merged

if TYPE_CHECKING:
    import torch

    from .._torch import Store
    from ..world.world import World

_PROBE_PART = 1 / 3
"""The share of --stall-timeout for one probe that may hang."""


@dataclass(frozen=True)
class Report:
    """The examination's findings, complete on rank 0; `hosts` are the ranks'."""

    findings: tuple[Finding, ...]
    hosts: tuple[str, ...]
    accelerator: str


@dataclass(frozen=True)
class Examination:
    """The entry of every rank. It forms the world itself, if possible."""

    output: Path
    """Absolute, as `data`."""
    data: Path | None
    chosen_cpu: bool
    """Whether ranks compute on the CPU by the user's choice."""
    print_report: Callable[[Report], None]
    """Called on rank 0 if ranks fell silent: a wait for all of them would never end."""

    def __call__(self, config: RunConfig, world: World) -> Any:
        raise AssertionError("the launchers let this entry form its own world")

    def before_world(self, config: RunConfig, topology: Topology, device: torch.device, store: Store) -> Report:
        """Run all probes; return the report (*collective*)."""
        # A late import: it imports torch, which the process that starts ranks does without.
        from .together import SilentRankError

        findings, names = list[Finding](), ["?"] * topology.size
        try:
            self._examine(config.parallel, topology, device, store, findings, names)
        except SilentRankError as error:
            fix = "see whether it was stopped, and what its host is busy with; end it before a job starts"
            findings.append(conclude("collectives", "ranks", str(error).removesuffix("."), fix, bad=RED))
            if topology.is_main:
                self.print_report(Report(tuple(merged(findings)), tuple(names), device.type))
            raise
        return Report(tuple(merged(findings)), tuple(names), device.type)

    def _examine(
        self,
        parallel: ParallelConfig,
        topology: Topology,
        device: torch.device,
        store: Store,
        findings: list[Finding],
        names: list[str],
    ) -> None:
        """Extend `findings`, and replace `names` by the ranks' host names."""
        from .._torch import PrefixStore
        from . import alone, gpus, together

        seen, interface, is_cpu = hardware.survey(visible_gpus()), rank.bound(), device.type == "cpu"
        addresses = hosts.interfaces().get(interface) or hosts.own_addresses(topology.address or hosts.ANYWHERE)
        address = next(iter(addresses), "127.0.0.1")  # a laptop without a network
        board = together.Board(PrefixStore("doctor", store), topology.rank, topology.size, parallel.stall_timeout)
        limit_s = _PROBE_PART * board.patience_s
        probes: list[tuple[str, str, Probe]] = []
        if not is_cpu:
            chosen = list(parallel.gpu_indices or range(len(seen.gpus)))[: parallel.devices]
            indices = chosen if parallel.drives_all else [device.index]
            probes.append(("devices", "GPUs", lambda: [alone.judge_gpu(index, seen.gpus[index]) for index in indices]))
        if topology.local_rank == 0:
            by_name = topology.nodes > 1 and not interface
            probes += [
                ("host", "host", lambda: alone.host(topology, is_cpu)),
                ("devices", "GPUs", lambda: gpus.usable(seen.gpus, chosen_cpu=self.chosen_cpu)),
                ("network", "interface", lambda: alone.network(address, by_name=by_name)),
                ("disk", "data", lambda: alone.data(self.data) if self.data else ()),
            ]
        looked = [finding for group, name, probe in probes for finding in look(group, name, probe, limit_s)]
        names[:], versions = zip(*board.all("host", [socket.gethostname(), alone.versions(seen.driver)]), strict=True)
        findings += alone.judge_versions(versions)
        findings += board.findings("looked", looked)
        findings += together.folder(self.output, board, limit_s)
        findings.append(reached := together.reach(address, board, names))
        if topology.size > 1 and reached.state != RED:
            findings += together.judge(together.compute(topology, device, store, board, parallel.collectives), names)
        else:
            reason = (
                "not all ranks are reached" if topology.size > 1 else "one rank; lockstep doctor --devices 2 starts two"
            )
            findings.append(Finding("collectives", "all-reduce", UNCHECKED, f"not tried: {reason}"))

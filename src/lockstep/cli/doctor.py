"""`lockstep doctor [flags]`: whether a job can run here, and what would slow it or put it at risk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import folders, hardware
from ..config import ParallelConfig, RunConfig
from ..errors import RequestError, RunError, choose, counted
from ..kinds import KINDS
from ..launchers import table as launchers
from ..options import leaves
from . import flags, output, words
from .symptoms import show

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store  # torch.distributed re-exports it unseen by type checkers

    from ..doctor.examine import Report
    from ..topology import Topology
    from ..world import World

_USAGE = """\
usage: lockstep doctor [--json] [flags]

Looks at this machine, or under any launcher at all machines of a job: versions, processors, memory, limits, GPUs and
their links, names, clocks, ports between each pair of ranks, all-reduce by size, whether copied bytes arrive unchanged,
and the output folder. Each finding is green, yellow (a job runs, but slowly or at a risk) or red (no job can run), with
what to do about it. Nothing is trained, and nothing stays behind.

  --json          print one JSON object and nothing else
  --output FOLDER the folder that the job will write to (default: runs); it is not made
  --data-dir FOLDER
                  the folder of its data, if that is to be there already

The flags of lockstep train that say which devices and how ranks meet mean the same here: --devices, --gpus,
--accelerator, --strategy, --launcher, --nodes, --init-method, --rank, --world-size, --timeout, and --stall-timeout
(default here: 30), after which a rank that is silent is given up.

Exit code: 0 a job can run (nothing is red), 1 none can, 2 the request cannot be honoured.
"""
_STALL_S = 30.0
_PATHS = ("output", "data-dir")
_OF_TRAINING = ("batchnorm", "find-unused")
"""Options of the parallel section that say nothing of devices and ranks."""


def main(given: list[str]) -> int:
    """Examine, print what was found, and return 0; raise `RunError` where no job can run."""
    if output.helped(given, _USAGE):
        return 0
    own, rest = words.take(given, {"--json": bool})
    named = {word.partition("=")[0].replace("_", "-") for word in rest}
    base = RunConfig(parallel=ParallelConfig(stall_timeout=_STALL_S))
    config = flags.parse(rest, prog="lockstep doctor", base=base, check=_check_flags)
    choose("strategy", config.parallel.strategy, ["auto", *KINDS])
    chosen_cpu = config.parallel.accelerator == "cpu"
    visit = _Visit(
        output=(config.record.output or folders.RUNS).absolute(),
        data=config.data.dir.absolute() if "--data-dir" in named else None,
        chosen_cpu=chosen_cpu,
        as_json=own.get("--json", False),
        since_s=time.time(),
    )
    config = _placed(config)
    launchers.least_ranks(config)  # devices that this machine lacks are refused before anything starts
    report = launchers.launch(visit, config)
    if report is None:
        return 0  # this process is another rank than the one that tells
    visit.say(report)
    if red := _red(report):
        raise _refusal(red)
    return 0


def _check_flags(given: Collection[str], config: RunConfig) -> None:
    useful = {leaf.key for leaf in leaves() if leaf.section == "parallel" and leaf.key not in _OF_TRAINING} | {*_PATHS}
    for key in given:
        if key not in useful | {"config"}:
            raise RequestError(f"lockstep doctor has no use for --{key}: it trains nothing; leave it out.")


def _placed(config: RunConfig) -> RunConfig:
    """Return the config for the launcher: on the CPU where auto would take GPUs that torch cannot use.

    That is a finding here, and no end. A failure leaves nothing in the output folder either.
    """
    parallel = config.parallel
    if parallel.accelerator == "auto" and hardware.gpus(launchers.visible_gpus()):
        import torch  # late, and only where there are GPUs: it takes seconds

        if not torch.cuda.is_available():
            parallel = dataclasses.replace(parallel, accelerator="cpu", gpus="")
    config = dataclasses.replace(config, parallel=parallel, record=dataclasses.replace(config.record, output=None))
    if parallel.max_restarts:  # they choose the launcher; ranks that fail are a finding, and are not examined again
        launcher = launchers.chosen(config)
        config = dataclasses.replace(config, parallel=dataclasses.replace(parallel, launcher=launcher, max_restarts=0))
    return config


@dataclass(frozen=True)
class _Visit:
    """What every rank runs: it forms the world itself, and says so where none can be formed."""

    output: Path
    data: Path | None
    chosen_cpu: bool
    as_json: bool
    since_s: float
    """When the command was given, in seconds since the epoch."""

    def __call__(self, config: RunConfig, world: World) -> Any:
        raise AssertionError("the launchers let this entry form its own world")

    def before_world(self, config: RunConfig, topology: Topology, device: torch.device, store: Store) -> Report:
        """Examine this rank with the others; return the report, which is whole on rank 0 (*collective*)."""
        from ..doctor.examine import Asked, examine

        output.survive()  # a rank is a process of its own
        report = examine(config, topology, device, store, Asked(self.output, self.data, self.chosen_cpu))
        if topology.is_main and report.absent:
            # Whoever waits for all ranks would wait for ever: it is told here, and by a failure, that one is silent.
            self.say(report)
            raise _refusal(_red(report))
        return report

    def say(self, report: Report) -> None:
        """Print the report, as far as somebody reads it: the verdict does not depend on that."""
        with contextlib.suppress(BrokenPipeError, SystemExit), output.written():  # rich exits where a pipe is broken
            self.show(report)

    def show(self, report: Report) -> None:
        """Print the report, as JSON if that was asked for."""
        took_s = time.time() - self.since_s
        if not self.as_json:
            show(report.findings, report.hosts, report.accelerator, took_s)
            return
        from ..doctor.finding import verdict

        told = {
            "verdict": verdict(report.findings),
            "ranks": len(report.hosts),
            "hosts": report.hosts,
            "accelerator": report.accelerator,
            "seconds": round(took_s, 3),
            "findings": [
                each.to_json()
                | {"words": " ".join(each.words.split())}  # without the columns of a screen
                | {"nodes": list(dict.fromkeys(report.hosts[rank] for rank in each.ranks))}
                for each in report.findings
            ],
        }
        print(json.dumps(told, indent=2))


def _red(report: Report) -> list[str]:
    return [each.name for each in report.findings if each.state == "red"]


def _refusal(red: list[str]) -> RunError:
    named = ", ".join(dict.fromkeys(red))
    return RunError(
        f"No job can run here: {counted(len(red), 'finding')} {'is' if len(red) == 1 else 'are'} red ({named}); what "
        "to do stands with each."
    )

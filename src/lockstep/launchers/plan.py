"""The launch plan: launcher, strategy and processes, resolved once from config and environment.

`auto` asks in this order: do flags set the rendezvous (manual)? Has a program started the ranks (environment)? Are lost
ranks restarted, or do nodes meet (elastic)? Are several processes needed (spawn)? Otherwise it is inline.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.registry import KINDS, LAUNCHERS, per_device, resolved, with_ranks, with_several
from ..config.schema import ParallelConfig, RunConfig
from ..errors import RequestError, counted
from .devices import find
from .environments import check_started, of_array, started_ranks, starter, variables

if TYPE_CHECKING:
    from ..world.world import World  # which imports torch; a plan is made without it

Entry = Callable[[RunConfig, "World"], Any]
"""The function of every rank. Importable by name, since a launcher may start processes that look it up."""


@dataclass(frozen=True)
class LaunchPlan:
    """A run's resolved config, and its processes on this node."""

    config: RunConfig
    """With strategy, accelerator and launcher resolved from `auto`."""
    processes: int
    """The number of ranks on this node."""
    least_ranks: int
    """The least number of ranks on all nodes."""
    starts_here: bool
    """Whether this process starts all ranks or is the only one, so that rank 0 sees this host's files."""

    @property
    def launcher(self) -> str:
        """The launcher's name."""
        return self.config.parallel.launcher

    def __str__(self) -> str:
        """Describe the run's processes in two or three lines."""
        parallel = self.config.parallel
        at_least = "at least " if parallel.nodes != parallel.most_nodes else ""
        meets = f"\nranks meet at {parallel.init_method}" if parallel.init_method else ""
        return (
            f"launcher {self.launcher}, strategy {parallel.strategy}, accelerator {parallel.accelerator}, devices "
            f"{parallel.gpus or parallel.devices or 'all'} on each node\n{counted(self.processes, 'rank')} of "
            f"{at_least}{self.least_ranks} on this node, of {counted(parallel.nodes, 'node')}{meets}"
        )


def plan(config: RunConfig, env: Mapping[str, str] | None = None) -> LaunchPlan:
    """Return a run's plan from config and environment, by default this process's.

    Raises `RequestError` for contradictory flags, for a strategy that cannot use the devices or ranks, for devices that
    this machine lacks, and for nodes without a rendezvous.
    """
    env = os.environ if env is None else env
    ranks = _least_ranks(config.parallel, env)
    parallel = _resolved(config.parallel, ranks, env)
    processes = _devices(parallel, env) if parallel.process_per_device else 1
    if parallel.launcher == "auto":
        parallel = dataclasses.replace(parallel, launcher=_auto(parallel, processes, env))
    _check(parallel, processes, env)
    starts_here = parallel.launcher in ("inline", "spawn", "elastic") and parallel.most_nodes == 1
    ranks = max(processes * parallel.nodes, ranks)
    return LaunchPlan(dataclasses.replace(config, parallel=parallel), processes, ranks, starts_here)


def _least_ranks(parallel: ParallelConfig, env: Mapping[str, str]) -> int:
    """Return the least world size that flags and environment imply, devices aside."""
    array = of_array(env) if parallel.world_size is None and parallel.has_rendezvous_url else None
    return max(parallel.nodes, parallel.world_size or 1, started_ranks(env), array[1] if array else 1)


def _resolved(parallel: ParallelConfig, ranks: int, env: Mapping[str, str]) -> ParallelConfig:
    """Return `parallel` with `auto` strategy and accelerator resolved."""
    parallel = dataclasses.replace(parallel, accelerator=_accelerator(parallel, env))
    devices, ranks = _devices(parallel, env), max(parallel.most_nodes, ranks)
    strategy = resolved(parallel.strategy, distributed=max(devices, ranks) > 1)
    parallel, kind = dataclasses.replace(parallel, strategy=strategy), KINDS[strategy]
    if ranks > 1 and not kind.has_ranks:
        raise RequestError(
            f"--strategy {strategy} is one process, but --nodes, --world-size or the environment ask for {ranks} "
            f"ranks; take --strategy {with_ranks()}."
        )
    if parallel.exchange != "full" and kind.drives_all and not kind.has_ranks:
        raise RequestError(
            f"--exchange {parallel.exchange}: --strategy {strategy} is one process, whose replicas send nothing; "
            f"take --strategy {with_ranks()}, or leave --exchange out."
        )
    if kind.drives_all and parallel.accelerator not in ("cpu", "cuda"):
        raise RequestError(
            f"--strategy {strategy} drives several GPUs of CUDA, or threads, by one process, and the accelerator is "
            f"{parallel.accelerator}; take --strategy {per_device()}."
        )
    if kind.process_per_device:
        return parallel
    requested = parallel.devices or len(parallel.gpu_indices)
    if requested > 1 and not kind.drives_all:
        raise RequestError(
            f"--strategy {strategy} uses one device, but {requested} were asked for; take {with_several()}, or one "
            "device."
        )
    return dataclasses.replace(parallel, devices=devices if kind.drives_all else 1)


def _accelerator(parallel: ParallelConfig, env: Mapping[str, str]) -> str:
    """Return the accelerator's name, or cpu. Raises `RequestError` for devices that do not exist."""
    if parallel.accelerator == "cpu":
        return "cpu"
    name, gpus = find(parallel.accelerator, env)
    kind = "NPU" if name == "npu" else "GPU"
    shown = f"this machine shows {counted(gpus, kind) if gpus else f'no {kind}'}"
    if missing := [index for index in parallel.gpu_indices if index >= gpus]:
        instead = "counted from 0" if gpus else f"take --devices {len(parallel.gpu_indices)} --accelerator cpu"
        raise RequestError(f"--gpus {parallel.gpus}: there is no {kind} {missing[0]}; {shown}; {instead}.")
    if parallel.accelerator == "auto" and not gpus:
        return "cpu"
    if (parallel.devices or 1) > gpus:
        flag = f"--devices {parallel.devices}" if gpus else f"--accelerator {name}"
        hint = "see nvidia-smi and CUDA_VISIBLE_DEVICES, or " if name == "cuda" else ""
        raise RequestError(f"{flag}: {shown}; {hint}take --accelerator cpu.")
    return name


def _devices(parallel: ParallelConfig, env: Mapping[str, str]) -> int:
    """Return this node's device count: --devices, --gpus, all GPUs, or 1 (CPU)."""
    return parallel.devices or len(parallel.gpu_indices) or find(parallel.accelerator, env)[1] or 1


def _auto(parallel: ParallelConfig, processes: int, env: Mapping[str, str]) -> str:
    by_hand = parallel.rank is not None or parallel.world_size is not None
    if parallel.has_rendezvous_url and (by_hand or parallel.most_nodes == 1):
        return "manual"
    if starter(env):
        return "environment"
    if not by_hand and (parallel.max_restarts or (parallel.most_nodes > 1 and parallel.init_method)):
        return "elastic"
    if by_hand or parallel.init_method:
        return "manual"
    check_started(env)
    if parallel.most_nodes > 1:
        raise RequestError(
            f"--nodes {parallel.nodes_asked} needs a rendezvous; give each node the same --init-method "
            f"tcp://HOST:PORT, where HOST is one of them, or start them with torchrun --nnodes {parallel.nodes_asked}."
        )
    return "spawn" if processes > 1 else "inline"


def _check(parallel: ParallelConfig, processes: int, env: Mapping[str, str]) -> None:
    """Raise `RequestError` if flags or environment do not fit the launcher."""
    name, launcher = parallel.launcher, LAUNCHERS[parallel.launcher]
    flags = {
        "--init-method": parallel.init_method if parallel.has_rendezvous_url else None,
        "--interface": parallel.interface or None,
        "--rank": parallel.rank,
        "--world-size": parallel.world_size,
    }
    accepted = () if launcher.on_several and parallel.most_nodes == 1 else launcher.takes
    unused = [f"{flag} {value}" for flag, value in flags.items() if value is not None and flag not in accepted]
    started, nodes = started_ranks(env), counted(parallel.most_nodes, "node")
    problem = ""
    if started > 1 and (name == "inline" or not launcher.joins):
        problem = (
            f"would begin anew: another program, such as torchrun, has started {started} ranks, of which this is one; "
            f"leave --launcher out, or, if left over: unset {' '.join(variables(env))}."
        )
    elif unused:
        problem = f"sets the rendezvous itself: {', '.join(unused)} belongs to --launcher manual; drop one of them."
    elif name != "elastic" and parallel.max_restarts:
        problem = "starts ranks once: drop --max-restarts, take --launcher elastic, or give torchrun its own."
    elif name == "manual" and parallel.nodes != parallel.most_nodes:
        problem = "keeps its nodes: give --nodes one number, or take --launcher elastic."
    elif (name == "inline" and processes > 1) or (name in ("inline", "spawn") and parallel.most_nodes > 1):
        problem = (
            f"is one process, or one host's, but needs {processes} on each of {nodes}; take --launcher auto, or "
            "torchrun."
        )
    if problem:
        raise RequestError(f"--launcher {name} {problem}")

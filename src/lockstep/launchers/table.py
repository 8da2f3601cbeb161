"""The launch plan, resolved once from config and environment, and its start. No torch.

`auto` asks in this order: do flags say where ranks meet (manual)? Has a program started the ranks (environment)? Are
lost ranks to be started again, or do nodes meet (elastic)? Are several processes needed (spawn)? Else it is inline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.schema import ParallelConfig, RunConfig
from ..errors import RequestError, choose, counted
from .devices import Entry, has_rendezvous_url, known_ranks, processes, resolve
from .environments import check_started, started_ranks, starter, variables

if TYPE_CHECKING:
    from ..world.world import World


class Launcher(NamedTuple):
    """A launcher's module and flags. The module's `launch(entry, config, env)` returns rank 0's value or None."""

    module: str
    joins: bool
    """Whether this process, which runs already, is a rank; else ranks are started."""
    takes: tuple[str, ...] = ()
    """The flags on how ranks meet that the launcher takes."""
    on_several: str = ""
    """The module that replaces `module` with several nodes; only then are the flags taken."""


LAUNCHERS = {
    "inline": Launcher(".join", joins=True),  # this process is the only rank
    "spawn": Launcher(".supervisor", joins=False),  # this process starts its host's ranks
    # The same, again where one is lost; on several nodes with agents that agree.
    "elastic": Launcher(".supervisor", False, ("--init-method", "--interface"), ".nodes"),
    "environment": Launcher(".join", True, ("--rank", "--world-size", "--interface")),  # torchrun, srun or mpirun has
    "manual": Launcher(".join", True, ("--init-method", "--rank", "--world-size", "--interface")),  # a person has
    "ray": Launcher(".ray", joins=False),  # Ray starts the ranks, on the nodes of its cluster
}


@dataclass(frozen=True)
class LaunchPlan:
    """A run's resolved config, and its processes on this node."""

    config: RunConfig
    """With strategy, accelerator and launcher resolved from `auto`; under Ray, only the launcher."""
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
    """Return a run's plan from config and environment. By default this process's environment.

    Raises `RequestError` for contradictory flags, for devices that this machine lacks, and for nodes that cannot meet.
    """
    env = os.environ if env is None else env
    config = resolve(config, env)
    here, name = processes(config, env), choose("launcher", config.parallel.launcher, ["auto", *LAUNCHERS])
    parallel = dataclasses.replace(
        config.parallel, launcher=_auto(config.parallel, here, env) if name == "auto" else name
    )
    _check(parallel, here, env)
    least = max(here * parallel.nodes, known_ranks(parallel, env))
    starts_here = parallel.launcher in ("inline", "spawn", "elastic") and parallel.most_nodes == 1
    return LaunchPlan(dataclasses.replace(config, parallel=parallel), here, least, starts_here)


def launch(entry: Entry, config: RunConfig, env: Mapping[str, str] | None = None) -> Any | None:
    """Run `entry(config, world)` on all ranks; return rank 0's value. None on other ranks.

    Raises the errors of `plan`, and a `LockstepError` for a failure in any rank.
    """
    return start(entry, plan(config, env), env)


def start(entry: Entry, planned: LaunchPlan, env: Mapping[str, str] | None = None) -> Any | None:
    """Run `entry(config, world)` on a plan's ranks; return rank 0's value. None on other ranks."""
    launcher = LAUNCHERS[planned.launcher]
    module = launcher.module
    if launcher.on_several and planned.config.parallel.most_nodes > 1:
        from .stores import import_torch

        import_torch()
        module = launcher.on_several
    return import_module(module, __package__).launch(entry, planned.config, os.environ if env is None else env)


@contextlib.contextmanager
def joined(config: RunConfig, env: Mapping[str, str] | None = None) -> Iterator[tuple[RunConfig, World]]:
    """Join the world as this process's rank within the block (*collective*).

    For a script that runs already; a lone process is the only rank. Yields the resolved config and the world. Raises as
    `launch` does, and `RequestError` where the config asks for processes that are not started yet.
    """
    from . import join

    env = os.environ if env is None else env
    planned = joining(config, env)
    with join.seat(planned.config, env) as seat, seat.world() as world:
        yield planned.config, world


def joining(config: RunConfig, env: Mapping[str, str]) -> LaunchPlan:
    """Return the plan under which this running process is a rank."""
    planned, asked = plan(config, env), config.parallel
    if planned.launcher == "spawn" and asked.devices is None and not asked.gpus:
        # `python train.py` on a machine with several GPUs has not asked for more processes than this one.
        planned = plan(dataclasses.replace(config, parallel=dataclasses.replace(asked, devices=1)), env)
    if not LAUNCHERS[planned.launcher].joins:
        raise RequestError(
            f"--launcher {planned.launcher} would start processes, and this script runs in one already: start it with "
            "lockstep run [flags] SCRIPT."
        )
    return planned


def visible_gpus() -> str | None:
    """Return this process's CUDA_VISIBLE_DEVICES; None if unset."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _auto(parallel: ParallelConfig, here: int, env: Mapping[str, str]) -> str:
    by_hand = parallel.rank is not None or parallel.world_size is not None
    if has_rendezvous_url(parallel) and (by_hand or parallel.most_nodes == 1):
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
            f"--nodes {parallel.nodes_asked}: nothing says how they meet; give each the same --init-method "
            f"tcp://HOST:PORT, HOST being one of them, or start them with torchrun --nnodes {parallel.nodes_asked}."
        )
    return "spawn" if here > 1 else "inline"


def _check(parallel: ParallelConfig, here: int, env: Mapping[str, str]) -> None:
    """Raise `RequestError` where flags or environment do not fit the launcher."""
    name, launcher = parallel.launcher, LAUNCHERS[parallel.launcher]
    flags = {
        "--init-method": parallel.init_method if has_rendezvous_url(parallel) else None,
        "--interface": parallel.interface or None,
        "--rank": parallel.rank,
        "--world-size": parallel.world_size,
    }
    taken = () if launcher.on_several and parallel.most_nodes == 1 else launcher.takes
    given = [f"{flag} {value}" for flag, value in flags.items() if value is not None and flag not in taken]
    started, several = started_ranks(env), counted(parallel.most_nodes, "node")
    why = ""
    if started > 1 and (name == "inline" or not launcher.joins):
        why = (
            f"would begin anew: another program, such as torchrun, has started {started} ranks, of which this is one; "
            f"leave --launcher out, or, if left over: unset {' '.join(variables(env))}."
        )
    elif given:
        why = f"settles how ranks meet: {', '.join(given)} belongs to --launcher manual; drop it, or take that."
    elif name != "elastic" and parallel.max_restarts:
        why = "starts ranks once: drop --max-restarts, take --launcher elastic, or give torchrun its own."
    elif name in ("manual", "ray") and parallel.nodes != parallel.most_nodes:
        why = "keeps its nodes: give --nodes one number, or take --launcher elastic."
    elif (name == "inline" and here > 1) or (name in ("inline", "spawn") and parallel.most_nodes > 1):
        why = (
            f"is one process, or one host's, but needs {here} on each of {several}; take --launcher auto, or torchrun."
        )
    if why:
        raise RequestError(f"--launcher {name} {why}")

"""What a run will be: resolved once, without torch, from its config and the environment; and started so.

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
from .devices import Entry, known_ranks, meets_by_url, processes, resolve
from .environments import check_started, started_ranks, starter, variables

if TYPE_CHECKING:
    from ..world.world import World


class Launcher(NamedTuple):
    """One line a launcher: a module with `launch(entry, config, env)`, which has rank 0's value or None."""

    module: str
    joins: bool
    """Whether this process, which runs already, is a rank; else ranks are started."""
    takes: tuple[str, ...] = ()
    """Which it takes of the flags that say how ranks meet."""
    on_several: str = ""
    """The module in its place where there may be several nodes, and the flags are taken."""


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
    """What will run, and where."""

    config: RunConfig
    """With the strategy, the accelerator and the launcher that `auto` stands for; under Ray it is found out there."""
    processes: int
    """Ranks that this node will have."""
    least_ranks: int
    """The least number of ranks on all nodes."""
    starts_here: bool
    """Whether this process starts all ranks or is the only one, so that rank 0 sees this host's files."""

    @property
    def launcher(self) -> str:
        """The launcher's name."""
        return self.config.parallel.launcher

    def __str__(self) -> str:
        """Return what runs where, in a few lines."""
        parallel = self.config.parallel
        at_least = "at least " if parallel.nodes != parallel.most_nodes else ""
        meets = f"\nranks meet at {parallel.init_method}" if parallel.init_method else ""
        return (
            f"launcher {self.launcher}, strategy {parallel.strategy}, accelerator {parallel.accelerator}, devices "
            f"{parallel.gpus or parallel.devices or 'all'} on each node\n{counted(self.processes, 'rank')} of "
            f"{at_least}{self.least_ranks} on this node, of {counted(parallel.nodes, 'node')}{meets}"
        )


def plan(config: RunConfig, env: Mapping[str, str] | None = None) -> LaunchPlan:
    """Return what a run will be by its flags and the environment, by default this process's own.

    Raises `RequestError` for what does not go together, devices that this machine lacks, and nodes that cannot meet.
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
    """Run `entry(config, world)` on all ranks of the run; return rank 0's value, None on other ranks.

    Raises what `plan` does, and a `LockstepError` for whatever went wrong in any rank.
    """
    return start(entry, plan(config, env), env)


def start(entry: Entry, planned: LaunchPlan, env: Mapping[str, str] | None = None) -> Any | None:
    """Run `entry(config, world)` on all ranks of a plan; return rank 0's value, None on other ranks."""
    launcher = LAUNCHERS[planned.launcher]
    module = launcher.module
    if launcher.on_several and planned.config.parallel.most_nodes > 1:
        from .stores import import_torch

        import_torch()
        module = launcher.on_several
    return import_module(module, __package__).launch(entry, planned.config, os.environ if env is None else env)


@contextlib.contextmanager
def joined(config: RunConfig, env: Mapping[str, str] | None = None) -> Iterator[tuple[RunConfig, World]]:
    """Be the rank that flags or the environment name, or the only one, while the block runs (*collective*).

    For a script that runs already. Gives the resolved config and the world. Raises what `launch` does, and
    `RequestError` where the config asks for processes that are not started yet.
    """
    from . import join

    env = os.environ if env is None else env
    planned = joining(config, env)
    with join.seat(planned.config, env) as seat, seat.world() as world:
        yield planned.config, world


def joining(config: RunConfig, env: Mapping[str, str]) -> LaunchPlan:
    """Return the plan by which this process, which runs already, is a rank."""
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
    """Return what CUDA_VISIBLE_DEVICES leaves of the GPUs to this process; None where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _auto(parallel: ParallelConfig, here: int, env: Mapping[str, str]) -> str:
    by_hand = parallel.rank is not None or parallel.world_size is not None
    if meets_by_url(parallel) and (by_hand or parallel.most_nodes == 1):
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
    """Raise `RequestError` where flags, or the environment, ask for what a launcher does not do."""
    name, launcher = parallel.launcher, LAUNCHERS[parallel.launcher]
    flags = {
        "--init-method": parallel.init_method if meets_by_url(parallel) else None,
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

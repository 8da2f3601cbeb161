"""What a run will be: resolved once, without torch, from its config and the environment; and started so.

    inline        this process is the only rank
    spawn         this process starts its host's ranks
    elastic       the same, again where one is lost; on several nodes with agents that agree
    environment   another program, such as torchrun, srun or mpirun, has started this rank
    manual        a person has: the ranks meet at --init-method
    ray           Ray starts the ranks, on the nodes of its cluster

`auto` asks, in this order: do flags say where ranks meet (manual)? Has somebody started the ranks already
(environment)? Are lost ranks to be started again, or do nodes meet (elastic)? Are several processes needed (spawn)?
Else this process is enough (inline).
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
from ..errors import RequestError, counted, unknown
from .devices import Entry, meets_by_url, processes, ranks_elsewhere
from .devices import resolve as resolve
from .environments import check_started, is_spoken, ranks_told, started_elsewhere

if TYPE_CHECKING:
    from ..world.world import World


class Launcher(NamedTuple):
    """One line a launcher: a module with `launch(entry, config, env)`, which has rank 0's value or None."""

    module: str
    joins: bool
    """Whether this process, which runs already, is a rank; else ranks are started."""
    refuses: str
    """Why flags that say how ranks meet are none of its; "" where they are."""
    on_several: str = ""
    """The module in its place where there may be several nodes."""


LAUNCHERS = {
    "inline": Launcher(".join", True, "is this process alone"),
    "spawn": Launcher(".supervisor", False, "starts its ranks itself"),
    "elastic": Launcher(".supervisor", False, "numbers the ranks itself", ".nodes"),
    "environment": Launcher(".join", True, "lets ranks meet at the environment's MASTER_ADDR and MASTER_PORT"),
    "manual": Launcher(".join", True, ""),
    "ray": Launcher(".ray", False, "starts its ranks itself"),
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
        meets = f"\nranks meet at {parallel.init_method}" if parallel.init_method else ""
        here = f"{counted(self.processes, 'rank')} of {'at least ' if parallel.nodes != parallel.most_nodes else ''}"
        return (
            f"launcher {self.launcher}, strategy {parallel.strategy}, accelerator {parallel.accelerator}, devices "
            f"{parallel.gpus or parallel.devices or 'all'} on each node\n"
            f"{here}{self.least_ranks} on this node, of {counted(parallel.nodes, 'node')}{meets}"
        )


def plan(config: RunConfig, env: Mapping[str, str] | None = None) -> LaunchPlan:
    """Return what a run will be by its flags and the environment, by default this process's own.

    Raises `RequestError` for an unknown launcher, for flags of another one, for devices that this machine lacks, and
    for several nodes without a way to meet.
    """
    env = os.environ if env is None else env
    config = resolve(config, env)
    name = _choose(config, env)
    parallel = dataclasses.replace(config.parallel, launcher=name)
    here = processes(config, env)
    least = max(here * parallel.nodes, ranks_elsewhere(parallel, env))
    starts_here = name in ("inline", "spawn") or (name == "elastic" and parallel.most_nodes == 1)
    return LaunchPlan(dataclasses.replace(config, parallel=parallel), here, least, starts_here)


def launch(entry: Entry, config: RunConfig, env: Mapping[str, str] | None = None) -> Any | None:
    """Run `entry(config, world)` on all ranks of the run; return rank 0's value, None on other ranks.

    Raises what `plan` does, and a `LockstepError` for whatever went wrong in any rank.
    """
    if not isinstance(config, RunConfig):
        raise RequestError(f"launch takes a RunConfig, such as recipe('digits') returns; found {config!r}.")
    if not callable(entry):
        raise RequestError(f"launch takes a function of (config, world) that each rank calls; found {entry!r}.")
    return start(entry, plan(config, env), env)


def start(entry: Entry, planned: LaunchPlan, env: Mapping[str, str] | None = None) -> Any | None:
    """Run `entry(config, world)` on all ranks of a plan; return rank 0's value, None on other ranks."""
    env = os.environ if env is None else env
    found = LAUNCHERS[planned.launcher]
    module = found.module
    if found.on_several and planned.config.parallel.most_nodes > 1:
        from .stores import import_torch

        import_torch()
        module = found.on_several
    return import_module(module, __package__).launch(entry, planned.config, env)


@contextlib.contextmanager
def joined(config: RunConfig, env: Mapping[str, str] | None = None) -> Iterator[tuple[RunConfig, World]]:
    """Be the rank that flags or the environment name, or the only one, while the block runs (*collective*).

    For a process whose own code goes on: a script that torchrun, srun, mpirun or a person has started. Gives the
    resolved config and the world. Raises what `launch` does, and `RequestError` where the config asks for processes
    that somebody has yet to start; errors of the block come out as they do there.
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
        # `python train.py` on a machine with several GPUs: nobody has asked for more processes than there are.
        planned = plan(dataclasses.replace(config, parallel=dataclasses.replace(asked, devices=1)), env)
    if not LAUNCHERS[planned.launcher].joins:
        raise RequestError(
            f"--launcher {planned.launcher} would start processes, and this script runs in one already: start it with "
            "lockstep run [flags] SCRIPT."
        )
    return planned


def names() -> tuple[str, ...]:
    """Return the names that --launcher takes besides auto."""
    return tuple(LAUNCHERS)


def least_ranks(config: RunConfig) -> int:
    """Return the least number of ranks that a run will have; raises as `resolve` does."""
    config = resolve(config, os.environ)
    return max(processes(config, os.environ) * config.parallel.nodes, ranks_elsewhere(config.parallel, os.environ))


def starts_here(config: RunConfig) -> bool:
    """Return whether the run's ranks are started by this process, or are this process."""
    return plan(config).starts_here


def visible_gpus() -> str | None:
    """Return what CUDA_VISIBLE_DEVICES leaves of the GPUs to this process; None where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _choose(config: RunConfig, env: Mapping[str, str]) -> str:
    parallel = config.parallel
    name = _auto(config, env) if parallel.launcher == "auto" else parallel.launcher
    if name not in LAUNCHERS:
        raise unknown("launcher", name, ["auto", *LAUNCHERS])
    if (name == "inline" or not LAUNCHERS[name].joins) and (told := started_elsewhere(env)):
        variables = ", ".join(f"{variable}={value}" for variable, value in told.items())
        raise RequestError(
            f"--launcher {name}: the environment's {variables} say that another program, such as torchrun, has started "
            f"{ranks_told(env)[1]} ranks, and each would be a run of its own; leave --launcher out, or, if they are "
            f"left over: unset {' '.join(told)}."
        )
    _check_meeting(name, parallel)
    _check_starts(name, parallel, processes(config, env))
    return name


def _auto(config: RunConfig, env: Mapping[str, str]) -> str:
    parallel = config.parallel
    by_hand = parallel.rank is not None or parallel.world_size is not None
    if meets_by_url(parallel) and (by_hand or parallel.most_nodes == 1):
        return "manual"
    if is_spoken(env):
        return "environment"
    if not by_hand and (parallel.max_restarts or (parallel.most_nodes > 1 and parallel.init_method)):
        return "elastic"
    if by_hand or parallel.init_method:
        return "manual"
    check_started(env)
    if parallel.most_nodes > 1:
        raise RequestError(
            f"--nodes {parallel.nodes_asked}: nothing says how the nodes meet; give the same command with "
            "--init-method tcp://HOST:PORT on each node, HOST being one of them, or start it with "
            f"torchrun --nnodes {parallel.nodes_asked}."
        )
    return "spawn" if processes(config, env) > 1 else "inline"


def _check_meeting(name: str, parallel: ParallelConfig) -> None:
    """Raise where flags say how ranks meet, and the launcher settles that otherwise."""
    flags = {
        "--init-method": parallel.init_method or None,
        "--rank": parallel.rank,
        "--world-size": parallel.world_size,
        "--interface": parallel.interface or None,
    }
    if name == "elastic" and parallel.most_nodes > 1:  # whose nodes meet there
        flags |= {"--init-method": None, "--interface": None}
    if name == "environment":  # which compares rank and world size with the environment's
        flags = {"--init-method": parallel.init_method if meets_by_url(parallel) else None}
    given = [f"{flag} {value}" for flag, value in flags.items() if value is not None]
    if (why := LAUNCHERS[name].refuses) and given:
        raise RequestError(
            f"--launcher {name} {why}: {', '.join(given)} {'belong' if given[1:] else 'belongs'} to --launcher "
            f"manual; drop {'them' if given[1:] else 'it'}, or take --launcher manual."
        )
    if name == "elastic" and parallel.most_nodes > 1 and not parallel.init_method.startswith("tcp:"):
        raise RequestError(
            f"--nodes {parallel.nodes_asked}: nothing says where the nodes meet; give the same --init-method "
            "tcp://HOST:PORT on each, with the address of a node that will not leave, or start with torchrun."
        )


def _check_starts(name: str, parallel: ParallelConfig, here: int) -> None:
    """Raise where flags ask for ranks, nodes or further starts that a launcher does not have."""
    if name != "elastic" and parallel.max_restarts:
        instead = "drop it, or give torchrun its own" if name == "environment" else "drop it, or take that"
        raise RequestError(
            f"--launcher {name} starts ranks once: --max-restarts {parallel.max_restarts} belongs to --launcher "
            f"elastic; {instead}."
        )
    if name in ("manual", "ray") and parallel.nodes != parallel.most_nodes:
        raise RequestError(
            f"--nodes {parallel.nodes_asked}: under --launcher {name} the number of nodes stays as it is; give one "
            "number, or take --launcher elastic."
        )
    if name == "inline" and (here > 1 or parallel.nodes > 1):
        raise RequestError(
            f"--launcher inline is one process, but --strategy {parallel.strategy} needs {here} on each of "
            f"{counted(parallel.nodes, 'node')}; take --launcher auto, or --devices 1."
        )
    if name == "spawn" and parallel.nodes > 1:
        raise RequestError(
            f"--launcher spawn starts processes on this host alone, but --nodes {parallel.nodes} were "
            "asked for; start the command on each node with torchrun, or give --init-method."
        )

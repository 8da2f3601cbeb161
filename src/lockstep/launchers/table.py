"""The launchers by name, and which of them a run takes.

`auto` asks, in this order: do flags say where ranks meet (manual)? Has somebody started the ranks already, such as
torchrun (environment)? Are lost ranks to be started again, or do nodes meet (elastic)? Are several processes needed
(spawn)? Else this process is enough (inline).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ..config import ParallelConfig, RunConfig
from ..errors import RequestError, unknown
from .base import Entry, Launcher
from .devices import least_ranks as _least_ranks
from .devices import meets_by_url, processes, resolve
from .dialects import check_started, ranks_told, started_elsewhere
from .elastic import ElasticLauncher
from .environment import EnvironmentLauncher
from .inline import InlineLauncher
from .manual import ManualLauncher
from .ray import RayLauncher
from .spawn import SpawnLauncher

__all__ = ["choose", "chosen", "launch", "least_ranks", "names", "resolve", "starts_here", "visible_gpus"]


_STARTING = (InlineLauncher.name, SpawnLauncher.name, ElasticLauncher.name, RayLauncher.name)
"""Launchers by which each process would begin ranks of its own."""


def names() -> tuple[str, ...]:
    """Return the names that --launcher takes besides auto."""
    return tuple(_table())


def choose(config: RunConfig, env: Mapping[str, str]) -> Launcher:
    """Return the launcher that was asked for, or the one that `auto` finds; starts nothing, imports no torch.

    Raises `RequestError` for an unknown name, for flags of another launcher, and for several nodes without a way to
    meet.
    """
    return _choose(resolve(config, env), env)


def launch(entry: Entry, config: RunConfig, env: Mapping[str, str] | None = None) -> Any | None:
    """Run `entry(config, world)` on all ranks of the run; return rank 0's value, None on other ranks.

    The entry's config says which strategy, accelerator and launcher `auto` has found. `env` is the environment to
    decide by, by default this process's own.
    """
    if not isinstance(config, RunConfig):
        raise RequestError(f"launch takes a RunConfig, such as recipe('digits') returns; found {config!r}.")
    if not callable(entry):
        raise RequestError(f"launch takes a function of (config, world) that each rank calls; found {entry!r}.")
    env = os.environ if env is None else env
    config = resolve(config, env)
    launcher = _choose(config, env)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, launcher=launcher.name))
    return launcher.launch(entry, config, env)


def least_ranks(config: RunConfig) -> int:
    """Return the least number of ranks that a run will have by its flags and this process's environment.

    Raises `RequestError` for devices that this machine lacks; starts nothing, imports no torch.
    """
    return _least_ranks(resolve(config, os.environ), os.environ)


def chosen(config: RunConfig) -> str:
    """Return the name of the launcher that a run takes by its flags and this process's environment."""
    return choose(config, os.environ).name


def starts_here(config: RunConfig) -> bool:
    """Return whether the run's ranks are started by this process, or are this process."""
    return choose(config, os.environ).starts_here(config)


def visible_gpus() -> str | None:
    """Return what CUDA_VISIBLE_DEVICES leaves of the GPUs to this process; None where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _choose(config: RunConfig, env: Mapping[str, str]) -> Launcher:
    table = _table()
    asked = config.parallel.launcher
    name = _auto(config, env, table) if asked == "auto" else asked
    if name not in table:
        raise unknown("launcher", name, ["auto", *table])
    if name in _STARTING and (told := started_elsewhere(env)):
        variables = ", ".join(f"{variable}={value}" for variable, value in told.items())
        raise RequestError(
            f"--launcher {name}: the environment's {variables} say that another program, such as torchrun, has started "
            f"{ranks_told(env)[1]} ranks, and each would be a run of its own; leave --launcher out, or, if they are "
            f"left over: unset {' '.join(told)}."
        )
    _check_meeting_flags(name, config.parallel)
    _check_starts(name, config.parallel)
    return table[name]


def _check_meeting_flags(name: str, parallel: ParallelConfig) -> None:
    """Raise where flags say how ranks meet, and the launcher settles that otherwise."""
    flags = {
        "--init-method": parallel.init_method or None,
        "--rank": parallel.rank,
        "--world-size": parallel.world_size,
        "--interface": parallel.interface or None,
        "--clear-meeting": "" if parallel.clear_meeting else None,
    }
    if name == "elastic":  # whose nodes meet there
        flags |= {"--init-method": None, "--interface": None}
    if name == "environment":  # which compares rank and world size with the environment's
        at_variables = parallel.init_method.rstrip("/") == "env:"
        flags = {"--init-method": None if at_variables else flags["--init-method"]}
    given = [f"{flag} {value}".strip() for flag, value in flags.items() if value is not None]
    how = {
        "inline": "is this process alone",
        "spawn": "starts its ranks itself",
        "elastic": "numbers the ranks itself",
        "ray": "starts its ranks itself",
        "environment": "lets ranks meet at the environment's MASTER_ADDR and MASTER_PORT",
    }.get(name)
    if how and given:
        raise RequestError(
            f"--launcher {name} {how}: {', '.join(given)} {'belong' if given[1:] else 'belongs'} to --launcher "
            f"manual; drop {'them' if given[1:] else 'it'}, or take --launcher manual."
        )


def _check_starts(name: str, parallel: ParallelConfig) -> None:
    """Raise where flags ask for ranks that are started again, or on other nodes, of a launcher that does not do it."""
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


def _table() -> dict[str, Launcher]:
    launchers: tuple[Launcher, ...] = (
        *(InlineLauncher(), SpawnLauncher(), ElasticLauncher(), EnvironmentLauncher(), ManualLauncher()),
        RayLauncher(),
    )
    return {launcher.name: launcher for launcher in launchers}


def _auto(config: RunConfig, env: Mapping[str, str], table: Mapping[str, Launcher]) -> str:
    parallel = config.parallel
    by_hand = parallel.rank is not None or parallel.world_size is not None
    if meets_by_url(parallel) and (by_hand or parallel.most_nodes == 1):
        return ManualLauncher.name
    for launcher in table.values():
        if launcher.detect(config, env):
            return launcher.name
    if not by_hand and (parallel.max_restarts or (parallel.most_nodes > 1 and parallel.init_method)):
        return ElasticLauncher.name
    if by_hand or parallel.init_method:
        return ManualLauncher.name
    check_started(env)
    if parallel.most_nodes > 1:
        raise RequestError(
            f"--nodes {parallel.nodes_asked}: nothing says how the nodes meet; give the same command with "
            "--init-method tcp://HOST:PORT on each node, HOST being one of them, or start it with "
            f"torchrun --nnodes {parallel.nodes_asked}."
        )
    return SpawnLauncher.name if processes(config, env) > 1 else InlineLauncher.name

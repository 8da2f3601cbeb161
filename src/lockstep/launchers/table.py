"""The launchers by name, and which of them a run takes.

`auto` asks, in this order: do flags say where ranks meet (manual)? Has somebody started the ranks already, such as
torchrun (environment)? Are several processes needed (spawn)? Else this process is enough (inline).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..errors import RequestError, unknown
from .base import Entry, Launcher
from .devices import least_ranks as _least_ranks
from .devices import processes, resolve
from .environment import EnvironmentLauncher
from .inline import InlineLauncher
from .manual import ManualLauncher
from .spawn import SpawnLauncher

__all__ = ["Choice", "choose", "launch", "least_ranks", "names", "resolve", "visible_gpus"]


@dataclass(frozen=True)
class Choice:
    """The launcher of a run, and why it is this one, in words."""

    launcher: Launcher
    name: str
    why: str


def names() -> tuple[str, ...]:
    """Return the names that --launcher takes besides auto."""
    return tuple(_table())


def choose(config: RunConfig, env: Mapping[str, str]) -> Choice:
    """Return the launcher that was asked for, or the one that `auto` finds; starts nothing, imports no torch.

    Raises `RequestError` for an unknown name, and for several nodes without a way to meet.
    """
    return _choose(resolve(config, env), env)


def launch(entry: Entry, config: RunConfig, env: Mapping[str, str] | None = None) -> Any | None:
    """Run `entry(config, world)` on all ranks of the run; return rank 0's value, None on other ranks.

    The entry's config says which strategy, accelerator and launcher `auto` has found. `env` is the environment to
    decide by, by default this process's own.
    """
    env = os.environ if env is None else env
    config = resolve(config, env)
    choice = _choose(config, env)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, launcher=choice.name))
    return choice.launcher.launch(entry, config, env)


def least_ranks(config: RunConfig) -> int:
    """Return the least number of ranks that a run will have by its flags and this process's environment.

    Raises `RequestError` for devices that this machine lacks; starts nothing, imports no torch.
    """
    return _least_ranks(resolve(config, os.environ), os.environ)


def visible_gpus() -> str | None:
    """Return what CUDA_VISIBLE_DEVICES leaves of the GPUs to this process; None where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _choose(config: RunConfig, env: Mapping[str, str]) -> Choice:
    table = _table()
    asked = config.parallel.launcher
    name, why = _auto(config, env, table) if asked == "auto" else (asked, "it was asked for")
    if name not in table:
        raise unknown("launcher", name, ["auto", *table])
    started = next((each.name for each in table.values() if each.detect(env)), name)
    if name in ("inline", "spawn") and started != name:
        raise RequestError(
            f"--launcher {name}, but another program, such as torchrun, has started several ranks already, and each "
            f"would be a run of its own; leave --launcher out, or start the command by itself."
        )
    return Choice(table[name], name, why)


def _table() -> dict[str, Launcher]:
    launchers: tuple[Launcher, ...] = (InlineLauncher(), SpawnLauncher(), EnvironmentLauncher(), ManualLauncher())
    return {launcher.name: launcher for launcher in launchers}


def _auto(config: RunConfig, env: Mapping[str, str], table: Mapping[str, Launcher]) -> tuple[str, str]:
    parallel = config.parallel
    by_hand = "manual", "--init-method, --rank and --world-size say where ranks meet"
    if parallel.init_method not in ("", "env://"):
        return by_hand
    for launcher in table.values():
        if launcher.detect(env):
            return launcher.name, "another program, such as torchrun, has started the ranks and set their variables"
    if parallel.init_method or parallel.world_size is not None:
        return by_hand
    if parallel.nodes > 1:
        raise RequestError(
            f"--nodes {parallel.nodes}: nothing says how the nodes meet; start the command on each node with "
            f"torchrun --nnodes {parallel.nodes}, or give --init-method, --rank and --world-size."
        )
    wanted = processes(config, env)
    if wanted > 1:
        return "spawn", f"--strategy {parallel.strategy} needs {wanted} processes here"
    return "inline", "one process is enough"

"""Starting the ranks of a launch plan, or joining them as one. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..config.registry import LAUNCHERS
from ..config.schema import RunConfig
from ..errors import RequestError
from .plan import Entry, LaunchPlan, plan

if TYPE_CHECKING:
    from ..world.world import World  # which imports torch; ranks are started without it


def launch(entry: Entry, config: RunConfig, env: Mapping[str, str] | None = None) -> Any | None:
    """Run `entry(config, world)` on all ranks; return rank 0's value. None on other ranks.

    Raises the errors of `plan`, and a `LockstepError` for a failure in any rank.
    """
    return run(entry, plan(config, env), env)


def run(entry: Entry, launch_plan: LaunchPlan, env: Mapping[str, str] | None = None) -> Any | None:
    """Run `entry(config, world)` on a plan's ranks; return rank 0's value. None on other ranks."""
    launcher = LAUNCHERS[launch_plan.launcher]
    module = launcher.module
    if launcher.on_several and launch_plan.config.parallel.most_nodes > 1:
        from .stores import import_torch

        import_torch()
        module = launcher.on_several
    return import_module(module, __package__).launch(entry, launch_plan, os.environ if env is None else env)


@contextlib.contextmanager
def joined(config: RunConfig, env: Mapping[str, str] | None = None) -> Iterator[tuple[RunConfig, World]]:
    """Join the world as this process's rank within the block (*collective*).

    For a script that runs already; a lone process is the only rank. Yields the resolved config and the world. Raises as
    `launch` does, and `RequestError` where the config asks for processes that are not started yet.
    """
    from . import join

    env = os.environ if env is None else env
    resolved = joining(config, env).config
    with join.join(resolved, env) as joined_rank, joined_rank.world() as world:
        yield resolved, world


def joining(config: RunConfig, env: Mapping[str, str]) -> LaunchPlan:
    """Return the plan under which this running process is a rank."""
    launch_plan, parallel = plan(config, env), config.parallel
    if launch_plan.launcher == "spawn" and parallel.devices is None and not parallel.gpus:
        # `python train.py` on a machine with several GPUs requests no process other than this one.
        launch_plan = plan(dataclasses.replace(config, parallel=dataclasses.replace(parallel, devices=1)), env)
    if not LAUNCHERS[launch_plan.launcher].joins:
        raise RequestError(
            f"--launcher {launch_plan.launcher} would start processes, and this script runs in one already: start it "
            "with lockstep run [flags] SCRIPT."
        )
    return launch_plan

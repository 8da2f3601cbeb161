"""`lockstep train RECIPE [flags]`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..config.options import recipes
from ..config.schema import RunConfig
from ..errors import RequestError
from ..launchers import start
from ..runs import folders
from ..screen import Screen
from ..sessions.hooks import NO_HOOKS, Hooks
from . import flags, output, preflight

if TYPE_CHECKING:
    from ..record.result import RunResult
    from ..world.world import World


def main(words: list[str]) -> int:
    """Train, and return the exit code."""
    if not words:
        raise RequestError(f"No recipe given: give one ({', '.join(recipes())}), or flags.")
    config = flags.parse([word for word in words if word != "--dry-run"], prog="lockstep train")
    launch_plan, batches = preflight.check(config)
    if launch_plan.starts_here:
        folders.check(config)
    if "--dry-run" in words:
        with output.written():
            Screen().print(f"{launch_plan}\n{batches}", soft_wrap=True)
    elif launch_plan.starts_here:
        with folders.begun(launch_plan.config) as begun:
            start.run(entry, dataclasses.replace(launch_plan, config=begun))
    else:
        start.run(entry, launch_plan)
    return 0


def entry(config: RunConfig, world: World, hooks: Hooks = NO_HOOKS) -> RunResult | dict[str, float]:
    """Train as one rank (*collective*). `hooks` follow the session."""
    from .. import trainer

    return (trainer.run_own_step if config.optim.step else trainer.run)(config, world, hooks)

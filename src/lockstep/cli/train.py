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


def main(given: list[str]) -> int:
    """Train, and return the exit code."""
    if not given:
        raise RequestError(f"lockstep train lacks what to train: give a recipe ({', '.join(recipes())}), or flags.")
    config = flags.parse([word for word in given if word != "--dry-run"], prog="lockstep train")
    planned, batches = preflight.check(config)
    if planned.starts_here:
        folders.check(config)
    if "--dry-run" in given:
        with output.written():
            Screen().print(f"{planned}\n{batches}", soft_wrap=True)
    elif planned.starts_here:
        with folders.begun(planned.config) as begun:
            start.run(entry, dataclasses.replace(planned, config=begun))
    else:
        start.run(entry, planned)
    return 0


def entry(config: RunConfig, world: World, hooks: Hooks = NO_HOOKS) -> RunResult | dict[str, float]:
    """Train as one rank (*collective*). `hooks` follow the session."""
    from .. import trainer

    return (trainer.run_own_step if config.optim.step else trainer.run)(config, world, hooks)

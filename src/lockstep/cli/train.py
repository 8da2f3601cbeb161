"""`lockstep train RECIPE [flags]`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..batching import BatchPlan
from ..config.options import recipes
from ..config.registry import KINDS
from ..config.schema import RunConfig
from ..data import sets
from ..errors import RequestError, choose
from ..launchers import table as launchers
from ..launchers.devices import drives_all
from ..launchers.table import LaunchPlan
from ..models import table as models
from ..runs import folders
from ..screen import Screen
from . import flags, output

if TYPE_CHECKING:
    from ..record.result import RunResult
    from ..world.world import World


def main(given: list[str]) -> int:
    """Train, and return the exit code."""
    if not given:
        raise RequestError(f"lockstep train lacks what to train: give a recipe ({', '.join(recipes())}), or flags.")
    config = flags.parse([word for word in given if word != "--dry-run"], prog="lockstep train")
    planned, batches = check(config)
    if planned.starts_here:
        folders.check(config)
    if "--dry-run" in given:
        with output.written():
            Screen().print(f"{planned}\n{batches}", soft_wrap=True)
    elif planned.starts_here:
        with folders.begun(planned.config) as begun:
            launchers.start(entry, dataclasses.replace(planned, config=begun))
    else:
        launchers.start(entry, planned)
    return 0


def check(config: RunConfig) -> tuple[LaunchPlan, BatchPlan]:
    """Return the launch plan and the batch plan. Refuses impossible requests, also a batch that cannot be split."""
    preflight(config)
    planned, batch = launchers.plan(config), config.batch
    parallel, ranks = planned.config.parallel, planned.least_ranks
    micro, accumulate = batch.micro_batch, batch.accumulate
    devices = (parallel.devices or 1) if drives_all(parallel) else 1
    return planned, BatchPlan.solve(batch.size, ranks, micro_size=micro, accumulation=accumulate, devices=devices)


def preflight(config: RunConfig) -> None:
    """Refuse impossible requests early. No process is started, and torch is not imported."""
    choose("strategy", config.parallel.strategy, ["auto", *KINDS])
    models.preflight(config.model.name)
    sets.preflight(config.data)


def entry(config: RunConfig, world: World) -> RunResult | dict[str, float]:
    """Train as one rank (*collective*)."""
    if config.optim.step:
        from .. import task

        return task.train(config, world)
    from ..engine import run

    return run(config, world)

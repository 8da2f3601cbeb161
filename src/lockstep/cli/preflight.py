"""Checks of a request before any process starts. No torch."""

from __future__ import annotations

from ..batching import BatchPlan
from ..config.schema import RunConfig
from ..data import sets
from ..launchers.plan import LaunchPlan, plan
from ..models import table


def check_names(config: RunConfig) -> None:
    """Raise `RequestError` for an unknown model or data set."""
    table.preflight(config.model.name)
    sets.preflight(config.data)


def check(config: RunConfig) -> tuple[LaunchPlan, BatchPlan]:
    """Return the launch plan and the batch plan. Raises `RequestError` if the request is impossible."""
    check_names(config)
    launch_plan, batch = plan(config), config.batch
    parallel, ranks = launch_plan.config.parallel, launch_plan.least_ranks
    devices = (parallel.devices or 1) if parallel.drives_all else 1
    micro, accumulate = batch.micro_batch, batch.accumulate
    return launch_plan, BatchPlan.solve(batch.size, ranks, micro_size=micro, accumulation=accumulate, devices=devices)

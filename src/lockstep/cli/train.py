"""`lockstep train RECIPE [flags]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..batching import BatchPlan
from ..config import RunConfig
from ..data import sets
from ..errors import choose
from ..launchers import table as launchers
from ..models import table as models
from ..strategies import table as strategies
from . import flags

if TYPE_CHECKING:
    from ..result import RunResult
    from ..world import World


def main(given: list[str]) -> int:
    """Train, and return the exit code."""
    config = flags.parse(given, prog="lockstep train")
    preflight(config)
    launchers.launch(_entry, config)
    return 0


def preflight(config: RunConfig) -> None:
    """Refuse what can be seen to be impossible before any process is started or torch is imported."""
    choose("strategy", config.parallel.strategy, ["auto", *strategies.TABLE])
    models.preflight(config.model.name)
    sets.preflight(config.data)
    BatchPlan.solve(
        config.batch.size,
        launchers.least_ranks(config),
        micro_size=config.batch.micro_batch,
        accumulation=config.batch.accumulate,
    )


def _entry(config: RunConfig, world: World) -> RunResult:
    # Imported by the ranks alone: a parent that starts and watches them needs no torch.
    from ..runs import run

    return run(config, world)

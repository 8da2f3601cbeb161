"""`lockstep train RECIPE [flags]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import folders
from ..batching import BatchPlan
from ..config import RunConfig
from ..data import sets
from ..errors import choose
from ..kinds import KINDS
from ..launchers import table as launchers
from ..models import table as models
from . import flags, output

if TYPE_CHECKING:
    from ..result import RunResult
    from ..world import World


def main(given: list[str]) -> int:
    """Train, and return the exit code."""
    config = flags.parse(given, prog="lockstep train")
    preflight(config)
    BatchPlan.solve(
        config.batch.size,
        launchers.least_ranks(config),
        micro_size=config.batch.micro_batch,
        accumulation=config.batch.accumulate,
    )
    if not launchers.starts_here(config):
        launchers.launch(_entry, config)
        return 0
    folders.check(config)
    with folders.begun(config) as begun:
        launchers.launch(_entry, begun)
    return 0


def preflight(config: RunConfig) -> None:
    """Refuse what can be seen to be impossible before any process is started or torch is imported."""
    choose("strategy", config.parallel.strategy, ["auto", *KINDS])
    models.preflight(config.model.name)
    sets.preflight(config.data)


def _entry(config: RunConfig, world: World) -> RunResult:
    # Imported by the ranks alone: a parent that starts and watches them needs no torch.
    from ..runs import run

    output.survive()  # a rank is a process of its own
    return run(config, world)

"""`lockstep train RECIPE [flags]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..batching import BatchPlan
from ..config.options import recipes
from ..config.registry import KINDS
from ..config.schema import RunConfig
from ..data import sets
from ..errors import RequestError, choose
from ..launchers import table as launchers
from ..models import table as models
from ..runs import folders
from . import flags, output

if TYPE_CHECKING:
    from ..record.result import RunResult
    from ..world.world import World


def main(given: list[str]) -> int:
    """Train, and return the exit code."""
    if not given:
        raise RequestError(f"lockstep train lacks what to train: give a recipe ({', '.join(recipes())}), or flags.")
    config = flags.parse(given, prog="lockstep train")
    check(config)
    if not launchers.starts_here(config):
        launchers.launch(entry, config)
        return 0
    folders.check(config)
    with folders.begun(config) as begun:
        launchers.launch(entry, begun)
    return 0


def check(config: RunConfig) -> None:
    """Refuse what can be seen to be impossible, a batch that cannot be shared out included."""
    preflight(config)
    BatchPlan.solve(
        config.batch.size,
        launchers.least_ranks(config),
        micro_size=config.batch.micro_batch,
        accumulation=config.batch.accumulate,
    )


def preflight(config: RunConfig) -> None:
    """Refuse what can be seen to be impossible before any process is started or torch is imported."""
    choose("strategy", config.parallel.strategy, ["auto", *KINDS])
    models.preflight(config.model.name)
    sets.preflight(config.data)


def entry(config: RunConfig, world: World) -> RunResult | dict[str, float]:
    # Imported by the ranks alone: a parent that starts and watches them needs no torch.
    output.survive()  # a rank is a process of its own
    if config.optim.step:
        from .. import task

        return task.train(config, world)
    from ..engine import run

    return run(config, world)

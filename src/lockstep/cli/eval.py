"""`lockstep eval RUN [flags]`: the exact scores of a checkpoint, on any world."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..config import ParallelConfig, RecordConfig, RunConfig, read_toml
from ..errors import RequestError
from ..launchers import table as launchers
from . import flags
from .train import preflight

if TYPE_CHECKING:
    from ..world import World

_USAGE = """\
usage: lockstep eval RUN [flags]

RUN is a run's folder (its last checkpoint is taken) or one checkpoint, such as runs/digits-resnet8/checkpoints/best.
Model and data are those of the run's config.toml. Scores do not depend on the devices, so the run's own are not asked
for again: this machine's are used, or those of --strategy, --devices and the other flags of lockstep train.
"""


def main(given: list[str]) -> int:
    """Evaluate, print the scores, and return the exit code."""
    if not given or given[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    path = Path(given[0])
    config = flags.parse(given[1:], prog="lockstep eval RUN", base=_config_of(path))
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=str(path)))
    preflight(config)
    scores = launchers.launch(_entry, config)
    if scores is not None:
        Console(highlight=False).print(
            f"test accuracy {scores['top1']:.2%}  top-5 {scores['top5']:.2%}  loss {scores['loss']:.4f}  "
            f"{scores['samples']:,} images"
        )
    return 0


def _config_of(path: Path) -> RunConfig:
    """Return the config of the run that `path` lies in, without what belonged to that start: devices, ranks, output."""
    for folder in (path, *path.parents):
        if (folder / "config.toml").is_file():
            config = read_toml(folder / "config.toml")
            return dataclasses.replace(config, parallel=ParallelConfig(), record=RecordConfig())
    raise RequestError(f"{path} lies in no run's folder: there is no config.toml; give a folder such as runs/NAME.")


def _entry(config: RunConfig, world: World) -> dict[str, Any]:
    from ..engine import evaluate_checkpoint

    return dataclasses.asdict(evaluate_checkpoint(config, world))

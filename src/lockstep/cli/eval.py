"""`lockstep eval RUN [flags]`: the exact scores of a checkpoint, on any world."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..config import ParallelConfig, RecordConfig, RunConfig
from ..errors import RequestError
from ..launchers import table as launchers
from ..options import leaves, read_toml
from . import flags, output, unread
from .train import preflight

if TYPE_CHECKING:
    from ..world import World

_USAGE = """\
usage: lockstep eval RUN [flags]

RUN is a run's folder (its last checkpoint is taken) or one checkpoint, such as runs/digits-resnet8/checkpoints/best.
Model and data are those of the run's config.toml. Scores do not depend on the devices, so the run's own are not asked
for again: this machine's are used, or those of --strategy, --devices and the other flags of lockstep train.
"""

_OF_TRAINING = ("augment", "accumulate", "micro-batch", "drop-last", "epochs", "max-steps", "find-unused")
_OF_SECTIONS = ("optim", "checkpoint", "record", "proof")
"""Options, one by one and by section, that an evaluation could only ignore: it takes no step and writes nothing."""


def main(given: list[str]) -> int:
    """Evaluate, print the scores, and return the exit code."""
    if output.helped(given, _USAGE):
        return 0
    if not given or given[0].startswith("-"):
        raise RequestError(
            "lockstep eval lacks the run to evaluate, which comes first, as in lockstep eval runs/digits-resnet8."
        )
    if given[1:] and not given[1].startswith("-"):
        raise RequestError(f"lockstep eval takes one run at a time, found {given[0]} and {given[1]}.")
    path = Path(given[0])
    base = _config_of(path)
    config = flags.parse(given[1:], prog="lockstep eval RUN", base=base, check=_check_flags)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=str(path)))
    preflight(config)
    launchers.least_ranks(config)  # devices that this machine lacks are refused before anything starts
    scores = launchers.launch(_entry, config)
    if scores is not None:
        with output.written():
            Console(highlight=False).print(
                f"test accuracy {scores['top1']:.2%}  top-5 {scores['top5']:.2%}  loss {scores['loss']:.4f}  "
                f"{scores['samples']:,} images  "
                f"step {scores['step']:,}",
                soft_wrap=True,
            )
    return 0


def _config_of(path: Path) -> RunConfig:
    """Return the config of the run that `path` lies in, without what belonged to that start: devices, ranks, output."""
    for folder in (path, *path.parents):
        if (folder / "config.toml").is_file():
            config = read_toml(folder / "config.toml")
            return dataclasses.replace(config, parallel=ParallelConfig(), record=RecordConfig())
    found = "lies in no run's folder: there is no config.toml" if path.exists() else "is not there"
    raise RequestError(f"{path} {found}; give a run's folder, such as runs/NAME, or one of its checkpoints.")


def _check_flags(given: Collection[str], config: RunConfig) -> None:
    idle = [leaf.key for leaf in leaves() if leaf.section in _OF_SECTIONS or leaf.key in _OF_TRAINING]
    for key in given:
        if key in idle:
            raise RequestError(
                f"lockstep eval has no use for --{key}: it trains nothing and writes nothing; leave it out."
            )
    unread.check(given, config)


def _entry(config: RunConfig, world: World) -> dict[str, Any]:
    from ..engine import evaluate_checkpoint

    output.survive()  # a rank is a process of its own
    step, scores = evaluate_checkpoint(config, world)
    return dataclasses.asdict(scores) | {"step": step}

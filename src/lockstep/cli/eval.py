"""`lockstep eval RUN [flags]`: the exact scores of a checkpoint, on any world."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.options import leaves, read_toml
from ..config.schema import DataConfig, ParallelConfig, RecordConfig, RunConfig
from ..errors import RequestError, choose
from ..files import DEFECTS, parse_json, read, shown
from ..launchers import table as launchers
from ..screen import Screen
from . import flags, output, unread, words
from .train import preflight

if TYPE_CHECKING:
    from ..world.world import World

_USAGE = """\
usage: lockstep eval RUN [--split SPLIT] [--predictions FILE.csv] [flags]

RUN is a run's folder (its last checkpoint is taken) or one checkpoint, such as runs/digits-resnet8/checkpoints/best.
Model and data are those of the run's config.toml; code of your own has to be named anew (--model mine:Net). Scores do
not depend on the devices, so the run's own are not asked for again: this machine's are used, or those of --strategy,
--devices and the other flags of lockstep train.

  --split SPLIT         validation, test or train (default: test); train without augmentation
  --predictions FILE    write what the model says of each sample: index, label, predicted class, its probability
  --output FOLDER       where scores.json goes: all scores, and those of each class (default: the run's folder)
"""

_OF_TRAINING = (
    *("augment", "accumulate", "micro-batch", "drop-last", "epochs", "max-steps", "eval-every", "patience"),
    "find-unused",
)
SPLITS = ("validation", "test", "train")
_AT_ONCE = 1024
"""The most images of 224 pixels that a rank evaluates at once because the run, which many may have trained, says so."""
_OF_SECTIONS = ("optim", "checkpoint", "record", "proof")
"""Options, one by one and by section, that an evaluation could only ignore: it takes no step."""
_READ = ("loss", "output")
"""Options of these sections that it does not ignore."""


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
    source = _file_of(path)
    _check_loop(source.parent)
    own, given = words.take(given[1:], {"--split": str, "--predictions": str})
    split = choose("split", own.get("--split", "test"), SPLITS)
    predictions = Path(own["--predictions"]).absolute() if "--predictions" in own else None
    base = read_toml(source)
    most = max(1, min(_AT_ONCE, _AT_ONCE * 224**2 // base.data.image_size**2))
    size, at_once = (min(number or most, most) for number in (base.batch.size, base.batch.eval_batch))
    batch = dataclasses.replace(base.batch, size=size, eval_batch=base.batch.eval_batch and at_once)
    # Not that start's own devices, workers and folders; and nothing is downloaded to where only the run says.
    downloads = base.data.download and base.data.dir.exists()
    data = dataclasses.replace(base.data, workers=DataConfig().workers, download=downloads)
    base = dataclasses.replace(base, batch=batch, data=data, parallel=ParallelConfig(), record=RecordConfig())
    config = flags.parse(given, prog="lockstep eval RUN", base=base, source=source, check=_check_flags)
    folder = (config.record.output or source.parent).absolute()
    resuming = dataclasses.replace(config.checkpoint, resume=str(path))
    config = dataclasses.replace(config, checkpoint=resuming, record=RecordConfig())
    preflight(config)
    _check_writable(folder, predictions)
    launchers.least_ranks(config)  # devices that this machine lacks are refused before anything starts
    scores = launchers.launch(partial(_entry, split=split, folder=folder, predictions=predictions), config)
    if scores is not None:
        # Of five classes or fewer it is 100 % whatever the model does.
        top5 = f"  top-5 {scores['top5']:.2%}" if len(scores["classes"]) > 5 else ""
        with output.written():
            Screen().say(
                f"{split} accuracy {scores['top1']:.2%}{top5}  loss {scores['loss']:.4f}  "
                f"{scores['samples']:,} samples  step {scores['step']:,}",
            )
    return 0


def _file_of(path: Path) -> Path:
    """Return the config.toml of the run that `path` is, or is a checkpoint of."""
    above, *higher = path.absolute().parents
    is_checkpoint = above.name == "checkpoints"
    file = (higher[0] if is_checkpoint else above if path.name == "checkpoints" else path) / "config.toml"
    if file.is_file():
        return file
    found = "lies in no run's folder: there is no config.toml" if path.exists() else "is not there"
    raise RequestError(f"{path} {found}; give a run's folder, such as runs/NAME, or one of its checkpoints.")


def _check_loop(run: Path) -> None:
    """Raise `RequestError` for a run whose model and scores only a loop or step of the user's own knows."""
    with contextlib.suppress(*DEFECTS):  # what else is wrong with the run is told by what reads it
        if parse_json(read(run / "manifest.json"))["chosen"].get("loop") == "own":
            raise RequestError(
                f"{shown(run)} is of a loop or a step of your own, which alone knows its scores: evaluate in a "
                "script, over session.evaluating(loader); --step evaluates after each epoch."
            )


def _check_flags(given: Collection[str], config: RunConfig) -> None:
    idle = {leaf.key for leaf in leaves() if leaf.section in _OF_SECTIONS or leaf.key in _OF_TRAINING} - {*_READ}
    for key in given:
        if key in idle:
            raise RequestError(f"lockstep eval has no use for --{key}: it trains nothing; leave it out.")
    unread.check(given, config)


def _check_writable(folder: Path, predictions: Path | None) -> None:
    """Raise `RequestError` where the files of an evaluation cannot be written: known before it takes its time."""
    if predictions is not None and (predictions.suffix != ".csv" or not predictions.parent.is_dir()):
        raise RequestError(f"--predictions {predictions}: give a file .csv in a folder that is there.")
    if folder.exists() and not os.access(folder, os.W_OK):
        raise RequestError(f"{shown(folder)} cannot be written, where scores.json goes; give --output FOLDER.")


def _entry(config: RunConfig, world: World, **asked: Any) -> dict[str, Any]:
    from ..sessions.scoring import evaluate_checkpoint

    output.survive()  # a rank is a process of its own
    return evaluate_checkpoint(config, world, **asked)

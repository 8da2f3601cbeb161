"""`lockstep eval RUN [flags]`: a checkpoint's exact scores, on any world."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.options import leaves, read_toml
from ..config.schema import DataConfig, ParallelConfig, RecordConfig, RunConfig
from ..config.validity import is_url
from ..errors import RequestError, choose
from ..files import DEFECTS, check_own, own_folder, parse_json, read, shown, write_json
from ..launchers import start
from ..runs import folders
from ..screen import Screen
from . import flags, output
from .preflight import check_names

if TYPE_CHECKING:
    from ..world.world import World


SPLITS = ("validation", "test", "train")
_AT_ONCE = 1024
"""Limit on a rank's evaluation batch, in images of 224 pixels, since more ranks may have trained the run."""
_OF_TRAINING = (
    *("augment", "accumulate", "micro-batch", "drop-last", "epochs", "max-steps", "eval-every", "patience"),
)
_OF_SECTIONS = ("optim", "checkpoint", "record", "proof")
"""Options, single and by section, that an evaluation does not read, except for `_READ`."""
_READ = ("loss", "output")


def main(words: list[str]) -> int:
    """Evaluate, print the scores, and return the exit code."""
    if not words or words[0].startswith("-"):
        raise RequestError("No run given; example: lockstep eval runs/digits-resnet8.")
    options, flag_words = flags.take(words[1:], {"--split": str, "--predictions": str}, prog="lockstep eval")
    split, path = choose("split", options.get("--split", "test"), SPLITS), Path(words[0])
    if is_url(words[0]):
        from ..runs.remote import fetched  # late: it imports torch

        path = fetched(words[0])
    source = folders.find(path, "config.toml") / "config.toml"
    if has_own_loop(source.parent):
        raise RequestError(
            f"{shown(source.parent)} was trained by your own loop or step, which alone computes its scores: evaluate "
            "in a script, over session.evaluating(loader); --step evaluates after each epoch."
        )
    predictions = Path(options["--predictions"]).absolute() if "--predictions" in options else None
    if predictions is not None and (predictions.suffix != ".csv" or not predictions.parent.is_dir()):
        raise RequestError(f"--predictions {predictions}: give a file .csv in a folder that is there.")
    config = flags.parse(flag_words, prog="lockstep eval RUN", base=base_of(source), source=source, check=check_flags)
    is_requested, folder = config.record.output is not None, (config.record.output or source.parent).absolute()
    if is_requested and folder.exists() and not folder.is_dir():
        raise RequestError(f"--output {folder} is a file; give a folder.")
    check_names(config)
    resuming = dataclasses.replace(config.checkpoint, resume=str(path))
    config = dataclasses.replace(config, checkpoint=resuming, record=RecordConfig())
    scores = start.launch(partial(_entry, split=split, predictions=predictions), config)
    if scores is not None:
        # With five classes or fewer, it is always 100 %.
        top5 = f"  top-5 {scores['top5']:.2%}" if len(scores["classes"]) > 5 else ""
        name = "scores.json" if split == "test" else f"scores-{split}.json"
        trouble = _write_scores(folder / name, scores)
        with output.written():
            Screen().say(
                f"{split} accuracy {scores['top1']:.2%}{top5}  loss {scores['loss']:.4f}  "
                f"{scores['samples']:,} samples  step {scores['step']:,}",
            )
            for warning in (*scores["warnings"], *((str(trouble),) if trouble and not is_requested else ())):
                Screen().say((f"warning: {warning}", "yellow"))
        if trouble and is_requested:
            raise trouble
    return 0


def has_own_loop(run: Path) -> bool:
    """Return whether the user's own loop or step trained the run in this folder."""
    with contextlib.suppress(*DEFECTS):  # later reads report other defects of the run
        return bool(parse_json(read(run / "manifest.json"))["chosen"].get("loop") == "own")
    return False


def base_of(source: Path) -> RunConfig:
    """Return the run's config without machine-specific options: devices, workers, folders, large batches."""
    run = read_toml(source)
    cap, eval_size = max(1, min(_AT_ONCE, _AT_ONCE * 224**2 // run.data.image_size**2)), run.batch.eval_batch
    batch = dataclasses.replace(run.batch, size=min(run.batch.size, cap), eval_batch=eval_size and min(eval_size, cap))
    downloads = run.data.download and run.data.dir.exists()  # never download to a folder that only the run names
    data = dataclasses.replace(run.data, workers=DataConfig().workers, download=downloads)
    return dataclasses.replace(run, batch=batch, data=data, parallel=ParallelConfig(), record=RecordConfig())


def check_flags(names: Collection[str], config: RunConfig, verb: str = "eval") -> None:
    """Raise `RequestError` for flags that a verb without training does not read."""
    idle = {leaf.key for leaf in leaves() if leaf.section in _OF_SECTIONS or leaf.key in _OF_TRAINING} - {*_READ}
    for key in names:
        if key in idle:
            raise RequestError(f"lockstep {verb} has no use for --{key}: it trains nothing; leave it out.")
    flags.check_read(names, config)


def _write_scores(path: Path, scores: dict[str, Any]) -> RequestError | None:
    """Write the scores. Returns the error if that fails."""
    try:
        own_folder(path.parent)
        check_own(path)
        write_json(path, scores)
    except OSError as error:
        return folders.unwritable(path, error)
    return None


def _entry(config: RunConfig, world: World, **options: Any) -> dict[str, Any]:
    from ..jobs.classifier import evaluate_checkpoint

    return evaluate_checkpoint(config, world, **options)

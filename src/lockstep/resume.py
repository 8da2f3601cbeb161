"""What a run continues from, and whether it is the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import checkpoint
from .config import RunConfig, flatten
from .errors import RequestError
from .state import State

# The options that make a run the run it is. Others (strategy, devices, launcher, epochs, precision, logging …) may
# change when it is continued.
_IDENTITY = (
    "model",
    "classes",
    "data",
    "augment",
    "image-size",
    "samples",
    "optimizer",
    "lr",
    "momentum",
    "nesterov",
    "weight-decay",
    "schedule",
    "milestones",
    "gamma",
    "warmup",
    "lr-rule",
    "base-batch",
    "clip",
    "label-smoothing",
    "ema",
    "batch",
    "drop-last",
    "seed",
)


def identity(config: RunConfig) -> dict[str, Any]:
    """Return the options that a continued run has to share with the one it continues."""
    flat = flatten(config)
    return {key: flat[key] for key in _IDENTITY}


def source(config: RunConfig) -> Path | None:
    """Return the checkpoint that `config` asks to continue from; None for a fresh start."""
    asked = config.checkpoint.resume
    if not asked:
        return None
    if asked == "auto":
        return checkpoint.find(config.record.output) if config.record.output else None
    return Path(asked)


def load(config: RunConfig) -> State | None:
    """Return the state to continue from, or None for a fresh start.

    Raises `RequestError` for a checkpoint that cannot be used, or that is another run's.
    """
    path = source(config)
    if path is None:
        return None
    loaded = checkpoint.load(path)
    _check_same_run(loaded.meta, config, path)
    return loaded


def _check_same_run(meta: dict[str, Any], config: RunConfig, path: Path) -> None:
    saved, asked = meta["config"], identity(config)
    differ = [f"--{key} {asked[key]} (it has {saved.get(key)})" for key in asked if asked[key] != saved.get(key)]
    if differ:
        raise RequestError(
            f"{path} is another run's: asked for {', '.join(differ)}; continue it with its own values, "
            "or start anew without --resume."
        )
    accumulate = config.batch.accumulate
    if accumulate is not None and accumulate != meta["accumulation"]:
        raise RequestError(
            f"{path} was trained with {meta['accumulation']} global micro-batches, asked for --accumulate "
            f"{accumulate}: they are part of the model; leave --accumulate out to continue."
        )


def check_samples(meta: dict[str, Any], samples: int, config: RunConfig) -> None:
    """Raise `RequestError` if the training set has another size than the one the checkpoint was trained on."""
    if meta["samples"] != samples:
        raise RequestError(
            f"The checkpoint was trained on {meta['samples']} samples, and {config.data.name} has {samples} here: "
            "its order would be another; give it the same data, or start anew without --resume."
        )

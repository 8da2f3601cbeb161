"""Find the checkpoint to continue; check that it belongs to the same run."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from pathlib import Path
from types import NoneType
from typing import Any

from ..config.options import IDENTITY, flatten
from ..config.schema import RunConfig
from ..errors import RequestError, counted
from ..world.world import World
from . import read
from .state import State

_META: dict[tuple[type, ...], tuple[str, ...]] = {
    (int,): (
        "step",
        "epochs",
        "within",
        "evaluated",
        "stale",
        "accumulation",
        "replicas",
        "samples",
        "batch",
        "passes",
    ),
    (int, NoneType): ("planned_epochs",),
    (float,): ("partial_s",),
    (float, NoneType): ("best_top1",),
    (list,): ("epoch_s", "generators", "trained", "names"),
    (dict,): ("config", "contents"),
    (dict, NoneType): ("scores",),
    (str,): ("batchnorm", "precision"),
    (bool,): ("is_recipe", "is_open", "is_cut"),
}
"""The fields of a checkpoint's `meta`, by type; integers are not negative."""

EVALUATED = ("model", "classes", "data", "image-size", "holdout", "seed", "ema")
"""The options in which an evaluation must agree with the run whose weights it loads."""
_APPEAR_S, _POLL_S = 10.0, 0.2  # time for another host's checkpoint to appear here; interval between polls


def identity(config: RunConfig) -> dict[str, Any]:
    """Return the options that a continued run must keep."""
    flat = flatten(config)
    return {key: flat[key] for key in IDENTITY}


def source(config: RunConfig) -> Path | None:
    """Return the checkpoint that `config` continues; None for a fresh start."""
    requested = config.checkpoint.resume
    if requested == "auto":
        return read.find(config.record.output) if config.record.output else None
    return Path(requested) if requested else None


def load(config: RunConfig, world: World, *, keys: Collection[str] = IDENTITY) -> State | None:
    """Return the state to continue (*collective*); None for a fresh start. `keys` are the options that must agree.

    Raises `RequestError`, on every rank, for a checkpoint that a rank cannot load, for one of another run, and if the
    ranks see different checkpoints: a node without the run's folder would start from scratch while others continue.
    """
    path, is_auto = source(config), config.checkpoint.resume == "auto"
    if is_auto:
        path = _newest(path, config.record.output, world)

    def attempt() -> State | None:
        if path is None:
            return None
        loaded = read.load(path, fall_back=is_auto)
        _check_meta(loaded.meta, path)
        _check_same_run(loaded.meta, config, path, keys)
        return loaded

    state = world.together(attempt)
    fingerprints = world.gather("none" if state is None or state.origin is None else read.fingerprint(state.origin))
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise RequestError(
                f"The ranks see different checkpoints, rank 0 {fingerprints[0]} and rank {rank} {fingerprint}: "
                "put the run's folder on storage that all nodes share, or copy it to each node."
            )
    return state


def _newest(path: Path | None, folder: Path | None, world: World) -> Path | None:
    """Return the newest checkpoint of any rank (*collective*). Waits for network storage to show it here.

    If it does not appear, returns `path`, the newest one that this rank sees.
    """
    local_name = Path(os.path.realpath(path)).name if path else ""
    newest_name = max(world.gather(local_name))  # steps in names have leading zeros
    if folder is None or newest_name == local_name:
        return path
    # Through the folder's name: a host caches the target of `last`, and would not look it up again.
    newest_path, until_s = folder / "checkpoints" / newest_name, time.monotonic() + _APPEAR_S
    while folder.is_dir() and not newest_path.exists() and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    return newest_path if newest_path.exists() else path


def _check_meta(meta: dict[str, Any], path: Path) -> None:
    """Raise `RequestError` for an invalid `meta`. Its checksums may be correct."""
    for name, types in ((name, types) for types, names in _META.items() for name in names):
        value, minimum = meta.get(name, ...), int(name in ("replicas", "accumulation"))
        is_valid = type(value) in types and (not isinstance(value, int) or minimum <= value < 2**63)
        if name == "epoch_s" and is_valid:
            is_valid = all(type(duration_s) in (int, float) and 0 <= duration_s < math.inf for duration_s in meta[name])
        if not is_valid:
            raise RequestError(f"{path} is no valid lockstep checkpoint: its {name} is invalid; give another one.")


def _check_same_run(meta: dict[str, Any], config: RunConfig, path: Path, keys: Collection[str]) -> None:
    saved, requested = meta["config"], identity(config)
    differences = [
        f"--{key} {requested[key]} (the checkpoint has {saved.get(key)})"
        for key in keys
        if requested[key] != saved.get(key)
    ]
    if differences:
        alternative = f", or begin a new run with its weights by --init-from {path} in place of --resume" * (
            "lr" in keys
        )
        raise RequestError(
            f"{path} belongs to another run: this one has {', '.join(differences)}; "
            f"give these flags the checkpoint's values{alternative}."
        )
    accumulate = config.batch.accumulate
    if accumulate is not None and accumulate != meta["accumulation"]:
        raise RequestError(
            f"{path} was trained with {counted(meta['accumulation'], 'global micro-batch')}, asked for --accumulate "
            f"{accumulate}: they are part of the model; leave --accumulate out to continue."
        )


def accumulation(state: State | None, config: RunConfig) -> int | None:
    """Return the accumulation to continue with; None to derive it again.

    Without batch statistics it is no part of the model, and follows --micro-batch and the number of ranks.
    """
    if state is None or (state.meta["batchnorm"] == "none" and config.batch.micro_batch_asked is not None):
        return None
    return int(state.meta["accumulation"])

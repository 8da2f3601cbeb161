"""Find the checkpoint to continue; check that the run is the same."""

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
}
"""The fields of a checkpoint's `meta`, by type; whole numbers are not negative."""

EVALUATED = ("model", "classes", "data", "image-size", "holdout", "seed", "ema")
"""The options that an evaluation has to share with the run whose weights it takes."""
_SEEN_S, _LOOK_S = 10.0, 0.2  # for another host's checkpoint to be seen here, and between two looks


def identity(config: RunConfig) -> dict[str, Any]:
    """Return the options that a continued run must keep."""
    flat = flatten(config)
    return {key: flat[key] for key in IDENTITY}


def source(config: RunConfig) -> Path | None:
    """Return the checkpoint that `config` continues; None for a fresh start."""
    asked = config.checkpoint.resume
    if asked == "auto":
        return read.find(config.record.output) if config.record.output else None
    return Path(asked) if asked else None


def load(config: RunConfig, world: World, *, keys: Collection[str] = IDENTITY) -> State | None:
    """Return the state to continue (*collective*); None for a fresh start. `keys` are the options that must agree.

    Raises `RequestError`, on every rank, for a checkpoint that one cannot use or that is another run's, and where the
    ranks see different ones: a node without the run's folder would start anew beside others that continue.
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
    seen = world.gather("none" if state is None or state.origin is None else read.fingerprint(state.origin))
    for rank, theirs in enumerate(seen):
        if theirs != seen[0]:
            raise RequestError(
                f"The ranks see different checkpoints, rank 0 {seen[0]} and rank {rank} {theirs}: "
                "put the run's folder where all nodes see it, or copy it to each of them."
            )
    return state


def _newest(path: Path | None, folder: Path | None, world: World) -> Path | None:
    """Return the newest checkpoint of any rank (*collective*). Waits for a slow network to show it here.

    If it does not appear, returns `path`, the one that this rank sees.
    """
    own = Path(os.path.realpath(path)).name if path else ""
    newest = max(world.gather(own))  # steps have leading zeros there
    if folder is None or newest == own:
        return path
    # By its own name, which makes a host look it up again: a host caches the target of `last`.
    awaited, until_s = folder / "checkpoints" / newest, time.monotonic() + _SEEN_S
    while folder.is_dir() and not awaited.exists() and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    return awaited if awaited.exists() else path


def _check_meta(meta: dict[str, Any], path: Path) -> None:
    """Raise `RequestError` for an invalid `meta`. A checkpoint can have one with correct checksums."""
    for name, kinds in ((name, kinds) for kinds, names in _META.items() for name in names):
        found, least = meta.get(name, ...), int(name in ("replicas", "accumulation"))
        ok = type(found) in kinds and (not isinstance(found, int) or least <= found < 2**63)
        if name == "epoch_s" and ok:
            ok = all(type(each) in (int, float) and 0 <= each < math.inf for each in meta[name])
        if not ok:
            raise RequestError(f"{path} is no checkpoint of lockstep's: its {name} cannot be; give another one.")


def _check_same_run(meta: dict[str, Any], config: RunConfig, path: Path, keys: Collection[str]) -> None:
    saved, asked = meta["config"], identity(config)
    differ = [f"--{key} {asked[key]} (it has {saved.get(key)})" for key in keys if asked[key] != saved.get(key)]
    if differ:
        anew = f", or begin a new run with its weights by --init-from {path} in place of --resume" * ("lr" in keys)
        raise RequestError(
            f"{path} is another run's: asked for {', '.join(differ)}; give these flags the values that it has{anew}."
        )
    accumulate = config.batch.accumulate
    if accumulate is not None and accumulate != meta["accumulation"]:
        raise RequestError(
            f"{path} was trained with {counted(meta['accumulation'], 'global micro-batch')}, asked for --accumulate "
            f"{accumulate}: they are part of the model; leave --accumulate out to continue."
        )


def accumulation(state: State | None, config: RunConfig) -> int | None:
    """Return the number of global micro-batches to continue with. None to solve it anew.

    Without batch statistics it is not part of the model, and follows --micro-batch and the number of ranks.
    """
    if state is None or (state.meta["batchnorm"] == "none" and config.batch.micro_batch is not None):
        return None
    return int(state.meta["accumulation"])

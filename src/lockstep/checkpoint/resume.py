"""What a run continues from, and whether it is the same run."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection
from pathlib import Path
from types import NoneType
from typing import Any

from .. import checkpoint
from ..config.options import IDENTITY, flatten
from ..config.schema import RunConfig
from ..errors import RequestError, counted
from ..world.world import World
from .state import State

_META: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("step", "epochs", "within", "evaluated", "stale", "replicas", "accumulation", "samples", "batch"), (int,)
    ),
    "planned_epochs": (int, NoneType),
    **dict.fromkeys(("partial_s", "best_top1"), (float,)),
    "epoch_s": (list,),
    "scores": (dict, NoneType),
    "config": (dict,),
    "batchnorm": (str,),
    "generators": (list,),
}
"""What a checkpoint says of itself, and its types; numbers are not negative."""

EVALUATED = ("model", "classes", "data", "image-size", "holdout", "seed", "ema")
"""The options that an evaluation has to share with the run whose weights it takes."""
_SEEN_S = 10.0  # for another host's checkpoint to be seen here
_LOOK_S = 0.2


def identity(config: RunConfig) -> dict[str, Any]:
    """Return the options that a continued run has to share with the one it continues."""
    flat = flatten(config)
    return {key: flat[key] for key in IDENTITY}


def source(config: RunConfig) -> Path | None:
    """Return the checkpoint that `config` asks to continue from; None for a fresh start."""
    asked = config.checkpoint.resume
    if not asked:
        return None
    if asked == "auto":
        return checkpoint.find(config.record.output) if config.record.output else None
    return Path(asked)


def load(config: RunConfig, world: World, *, keys: Collection[str] = IDENTITY) -> State | None:
    """Return the state to continue from, None for a fresh start (*collective*); `keys` are the options it must share.

    A rank that does not see the newest one yet, over a network that is slow to tell, waits for it for some seconds.

    Raises `RequestError`, on every rank, for a checkpoint that one cannot use or that is another run's, and where
    the ranks see different ones: a node without the run's folder would begin anew beside others that go on.
    """
    state = world.together(lambda: _load(config, keys))
    seen: list[str | None] = world.gather(_fingerprint(state))
    if config.checkpoint.resume == "auto" and len(set(seen)) > 1:
        steps: list[int] = world.gather(-1 if state is None else state.meta["step"])
        newest = seen[max(range(world.size), key=lambda rank: steps[rank])]
        state = world.together(lambda: _patiently(state, newest, config, keys))
        seen = world.gather(_fingerprint(state))
    for rank, theirs in enumerate(seen):
        if theirs != seen[0]:
            raise RequestError(
                f"The ranks see different checkpoints, rank 0 {seen[0] or 'none'} and rank {rank} {theirs or 'none'}: "
                "put the run's folder where all nodes see it, or copy it to each of them."
            )
    return state


def _fingerprint(state: State | None) -> str | None:
    return None if state is None or state.origin is None else checkpoint.fingerprint(state.origin)


def _patiently(state: State | None, newest: str | None, config: RunConfig, keys: Collection[str]) -> State | None:
    """Return the state of the checkpoint with that fingerprint, or `state` where it does not come to be seen here."""
    assert newest is not None, "one rank has another one than the others"
    folder = config.record.output
    until_s = time.monotonic() + _SEEN_S
    while _fingerprint(state) != newest and folder is not None and folder.is_dir() and time.monotonic() < until_s:
        # By its own name, which makes a host ask for it anew: what it remembers is where `last` pointed.
        path = folder / "checkpoints" / newest.partition(" ")[0]
        with contextlib.suppress(RequestError):  # it may be there in part
            found = checkpoint.load(path)
            _check_meta(found.meta, path)
            _check_same_run(found.meta, config, path, keys)
            if _fingerprint(found) == newest:
                return found
        time.sleep(_LOOK_S)
    return state


def _load(config: RunConfig, keys: Collection[str]) -> State | None:
    path = source(config)
    if path is None:
        return None
    loaded = checkpoint.load_good(path) if config.checkpoint.resume == "auto" else checkpoint.load(path)
    _check_meta(loaded.meta, path)
    _check_same_run(loaded.meta, config, path, keys)
    return loaded


def _check_meta(meta: dict[str, Any], path: Path) -> None:
    """Raise `RequestError` where a checkpoint, whole by its checksums, says of itself what none of ours does."""
    meta = {"stale": 0, "within": 0, "batch": 0} | meta  # which older ones lack, and those of lockstep train
    for name, kinds in _META.items():
        found, least = meta.get(name), int(name in ("replicas", "accumulation"))
        ok = name in meta and type(found) in kinds and (int not in kinds or found is None or least <= found < 2**63)
        if ok and name == "epoch_s":
            ok = all(type(each) in (int, float) and 0 <= each < math.inf for each in meta[name])
        if not ok:
            raise RequestError(f"{path} is no checkpoint of lockstep's: its {name} cannot be; give another one.")


def _check_same_run(meta: dict[str, Any], config: RunConfig, path: Path, keys: Collection[str]) -> None:
    saved, asked = identity(RunConfig()) | meta["config"], identity(config)  # older ones lack newer options
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


def accumulation(meta: dict[str, Any], config: RunConfig) -> int | None:
    """Return the number of global micro-batches to go on with; None to solve it anew.

    Without batch statistics it is no part of the model, and follows --micro-batch and the ranks that there are now.
    """
    if meta["batchnorm"] == "none" and config.batch.micro_batch is not None:
        return None
    return int(meta["accumulation"])

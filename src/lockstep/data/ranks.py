"""Data on several ranks: one copy per host, equal samples everywhere.

Lengths and digests are compared exactly, and a few samples by means: last bits differ between decoders.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..errors import LockstepError, RequestError
from ..world.world import World

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Signature = list[float]
COMPARED = 4
"""Samples at most, spread over the data set, that each rank reads before its first batch."""
_PARTS = 64
"""Of a sample, at most, that are compared."""
_NEAR = 1e-3


def shared(world: World, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that `build` makes, held once a host (*collective*).

    Each node's local rank 0 runs `build`, which must not communicate; the others map its files, which are then removed.
    Every rank raises the errors of `build`, as `RequestError`.
    """
    node, is_alone = world.topology.node, world.topology.local_size == 1
    with ExitStack() as leaving:

        def make() -> tuple[Arrays, str]:
            if world.topology.local_rank != 0:
                return {}, ""
            try:
                arrays = build()
                return (arrays, "") if is_alone else ({}, _write(arrays, leaving))
            except (LockstepError, OSError, MemoryError) as error:
                raise RequestError(str(error) or type(error).__name__) from error

        arrays, folder = world.together(make)
        folders = {node: folder for node, folder in world.gather([node, folder]) if folder}

        def mapped() -> Arrays:
            try:
                files = [] if is_alone else sorted(Path(folders[node]).iterdir())
                # Private (copy on write) rather than read-only: torch warns of arrays that it could not write to.
                return arrays | {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in files}
            except OSError as error:
                raise RequestError(
                    f"Ranks of one node must see the same {folders[node]} ({error.strerror})."
                ) from error

        return world.together(mapped)  # all have, before the files are removed


def _write(arrays: Arrays, leaving: ExitStack) -> str:
    """Write `arrays` to a new folder; return its path. The folder is removed with `leaving`."""
    size, memory = sum(array.nbytes + 4096 for array in arrays.values()), "/dev/shm"
    is_roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > size * 1.1 + 2**20
    folder = leaving.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-", dir=memory if is_roomy else None))
    for name, array in arrays.items():
        np.save(Path(folder, name), array, allow_pickle=False)
    return folder


def digest(*arrays: Array) -> str:
    """Return a hash of the arrays' contents."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def check_alike(world: World, asked: str, facts: dict[str, Any]) -> None:
    """Raise `RequestError` on every rank where `facts` differ from rank 0's (*collective*).

    `facts` is {name: number or text}, the same keys on each rank; `asked` names the data.
    """
    if found := world.find_mismatch(facts):
        rank, differ = found
        advice = "give every rank the same samples, in the same order"
        raise RequestError(f"{asked} is not the same on every rank: rank {rank} has {differ}; {advice}.")


def signature(value: Any) -> Signature:
    """Return a sample's or batch's signature. Size and means of each array, number and text in it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        value = [part for key in sorted(value, key=repr) for part in (repr(key), value[key])]
    if isinstance(value, list | tuple):
        return [number for part in value[:_PARTS] for number in signature(part)]
    if isinstance(value, str):
        value = int(digest(np.array(value.rpartition("/")[2]))[:8], 16)  # each node may have a file in another folder
    try:
        value = value.double().numpy(force=True) if isinstance(value, Tensor) else value  # NumPy has no bfloat16
        flat = np.abs(np.asarray(value)).astype(np.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError):  # an object that is no number
        return []
    flat = flat[np.isfinite(flat)]
    weights = 1 + np.arange(len(flat)) % 7  # by position: an image that is turned has the same mean
    return [len(flat), float(flat.mean()), float((flat * weights).mean())] if len(flat) else []


def spread(samples: int, most: int = COMPARED) -> npt.NDArray[np.int64]:
    """Return the samples to compare, spread over the data set."""
    return np.linspace(0, samples - 1, min(samples, most)).astype(np.int64)


def compare(world: World, asked: str, own: Sequence[Signature | None]) -> str:
    """Compare the ranks' samples; return a warning or "" (*collective*).

    `own` has None for samples that differ from one reading to the next. Raises `RequestError`, on every rank, where one
    has other samples than rank 0. Where only some differ, they may just be drawn.
    """
    first, *others = world.gather(list(own))
    drawn = (
        f"{asked}: samples differ from one reading to the next, or between ranks: lockstep seeds torch's, NumPy's and "
        "Python's generators for each sample, and this data set draws from one of its own"
    )
    if any(None in each for each in (first, *others)):
        return drawn
    for rank, each in enumerate(others, start=1):
        same = [alike(*pair) for pair in zip(first, each, strict=False)]
        if (same or len(first) != len(each)) and not any(same):
            raise RequestError(
                f"{asked} is not the same on every rank: rank {rank} reads other samples than rank 0. Give every rank "
                "the same, in the same order: sort what a disk lists, seed what is drawn, and give each rank the whole "
                "of a stream."
            )
        if not all(same):
            return drawn
    return ""


def is_changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two `Splits.contents` of a split are of other labels or samples, or of another order."""
    if saved["labels"] and now["labels"] and saved["labels"] != now["labels"]:
        return True
    pairs = zip(saved["samples"], now["samples"], strict=False)
    return not all(alike(one, other) for one, other in pairs if one is not None and other is not None)


def alike(one: Signature, other: Signature) -> bool:
    """Return whether two signatures agree, up to a decoder's last bits."""
    return len(one) == len(other) and np.allclose(one, other, rtol=_NEAR, atol=0)

"""Data on several ranks: one copy per host, the same samples on every rank.

Lengths and digests are compared exactly, and a few samples by their means: decoders differ in the last bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
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
"""Most samples, spread over the data set, that each rank reads before its first batch."""
_PARTS = 64
"""Most parts of a sample that are compared."""
_TOLERANCE = 1e-3


def shared(world: World, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that `build` makes, stored once per host (*collective*).

    Each node's local rank 0 runs `build`, which must not communicate; the node's other ranks map the files that it
    writes, which are then removed. Every rank raises the errors of `build`, as `RequestError`.
    """
    node, is_alone = world.topology.node, world.topology.local_size == 1
    with ExitStack() as stack:

        def make() -> tuple[Arrays, str]:
            if world.topology.local_rank != 0:
                return {}, ""
            try:
                arrays = build()
                return (arrays, "") if is_alone else ({}, _write(arrays, stack))
            except (LockstepError, OSError, MemoryError) as error:
                raise RequestError(str(error) or type(error).__name__) from error

        arrays, folder = world.together(make)
        folders = {node: folder for node, folder in world.gather([node, folder]) if folder}

        def map_files() -> Arrays:
            try:
                files = [] if is_alone else sorted(Path(folders[node]).iterdir())
                # Copy on write, not read-only: torch warns about arrays that it cannot write to.
                return arrays | {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in files}
            except OSError as error:
                raise RequestError(
                    f"Ranks of one node must see the same {folders[node]} ({error.strerror})."
                ) from error

        return world.together(map_files)  # every rank has mapped the files before they are removed


def _write(arrays: Arrays, stack: ExitStack) -> str:
    """Write `arrays` to a new folder; return its path. `stack` removes the folder."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-"))
    for name, array in arrays.items():
        np.save(Path(folder, name), array, allow_pickle=False)
    return folder


def digest(*arrays: Array) -> str:
    """Return a hash of the arrays' contents."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def check_alike(world: World, subject: str, facts: dict[str, Any]) -> None:
    """Raise `RequestError` on every rank if a rank's `facts` differ from rank 0's (*collective*).

    `facts` is {name: number or text}, the same keys on each rank; `subject` names the data.
    """
    if mismatch := world.find_mismatch(facts):
        rank, differences = mismatch
        advice = "give every rank the same samples, in the same order"
        raise RequestError(f"{subject} is not the same on every rank: rank {rank} has {differences}; {advice}.")


def signature(value: Any) -> Signature:
    """Return the signature of a sample or batch: size and means of each array, number and text in it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        value = [part for key in sorted(value, key=repr) for part in (repr(key), value[key])]
    if isinstance(value, list | tuple):
        return [number for part in value[:_PARTS] for number in signature(part)]
    if isinstance(value, str):
        value = int(digest(np.array(value.rpartition("/")[2]))[:8], 16)  # the folder of a file may differ between nodes
    try:
        value = value.double().numpy(force=True) if isinstance(value, Tensor) else value  # NumPy has no bfloat16
        flat = np.abs(np.asarray(value)).astype(np.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError):  # not numeric
        return []
    flat = flat[np.isfinite(flat)]
    weights = 1 + np.arange(len(flat)) % 7  # by position: a rotated image has the same mean
    return [len(flat), float(flat.mean()), float((flat * weights).mean())] if len(flat) else []


def spread(samples: int, limit: int = COMPARED) -> npt.NDArray[np.int64]:
    """Return the samples to compare, spread over the data set."""
    return np.linspace(0, samples - 1, min(samples, limit)).astype(np.int64)


def compare(world: World, subject: str, signatures: Sequence[Signature | None]) -> str:
    """Compare the ranks' samples; return a warning or "" (*collective*).

    `signatures` has None for samples that differ between two readings. Raises `RequestError`, on every rank, if all
    samples of a rank differ from rank 0's. If only some differ, they may be random.
    """
    reference, *other_ranks = world.gather(list(signatures))
    warning = (
        f"{subject}: samples differ between two readings, or between ranks: lockstep seeds torch's, NumPy's and "
        "Python's generators for each sample, and this data set draws from another one"
    )
    if any(None in samples for samples in (reference, *other_ranks)):
        return warning
    for rank, samples in enumerate(other_ranks, start=1):
        same = [is_alike(*pair) for pair in zip(reference, samples, strict=False)]
        if (same or len(reference) != len(samples)) and not any(same):
            raise RequestError(
                f"{subject} is not the same on every rank: rank {rank} reads other samples than rank 0. Give every "
                "rank the same, in the same order: sort lists of files, seed random draws, and give each rank the "
                "complete stream."
            )
        if not all(same):
            return warning
    return ""


def is_changed(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Return whether two `Splits.contents` of a split differ in labels, samples or order."""
    if saved["labels"] and current["labels"] and saved["labels"] != current["labels"]:
        return True
    pairs = zip(saved["samples"], current["samples"], strict=False)
    return not all(is_alike(one, other) for one, other in pairs if one is not None and other is not None)


def is_alike(one: Signature, other: Signature) -> bool:
    """Return whether two signatures agree within decoders' rounding."""
    return len(one) == len(other) and np.allclose(one, other, rtol=_TOLERANCE, atol=0)

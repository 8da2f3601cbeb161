"""The same data for every rank: what differs is named before training, instead of a hang or a wrong model.

Ranks with data sets of different lengths take different numbers of steps; ranks with other labels, or the same ones in
another order (files as the disk lists them, a set of names), train on samples twice and on others never. So their
facts are compared, and some samples in a few numbers: means of images and other measurements, whose last bits differ
between processors and decoders; whole numbers and texts exactly.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import RequestError

if TYPE_CHECKING:
    from ..world.world import World

COMPARED = 4
"""Samples at most, spread over the data set, that each rank reads before its first batch."""
_PARTS = 64
"""Of a sample, at most, that are looked at."""
_NEAR = 1e-3
Signature = list[float | str]


def digest(*arrays: npt.NDArray[Any]) -> str:
    """Return a hash of the arrays' contents."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def check_alike(world: World, asked: str, facts: dict[str, Any]) -> None:
    """Raise `RequestError`, on every rank, where one has other `facts` than rank 0 (*collective*).

    `facts` is {what it is: a number or text}, the same keys on each rank; `asked` is the data's name in the sentence.
    """
    if found := world.unlike(facts):
        rank, differ = found
        raise RequestError(
            f"{asked} is not the same on every rank: rank {rank} has {differ}; "
            "give every rank the same samples, in the same order."
        )


def signature(value: Any) -> Signature:
    """Return numbers and texts that stand for a sample or a batch: for its tensors, arrays, numbers and texts."""
    return [each for part in islice(_leaves(value), _PARTS) for each in part]


def _leaves(value: Any) -> Iterator[Signature]:
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_nested and not value.is_quantized:
            value = value.double() if value.is_floating_point() else value  # NumPy knows no bfloat16
            yield _array(value.numpy(force=True))
    elif isinstance(value, str):
        yield [value.rpartition("/")[2]]  # the folder of a file may be each node's own
    elif isinstance(value, bool | int | bytes):
        yield [repr(value)]
    elif isinstance(value, np.ndarray | np.generic | float | complex):
        array = np.asarray(value)
        if array.dtype.hasobject:
            yield from _leaves(array.tolist())
        else:
            yield _array(array)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield [repr(key)]
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))


def _array(array: npt.NDArray[Any]) -> Signature:
    shape = "x".join(map(str, array.shape))
    if array.dtype.kind not in "fc" and array.dtype != np.uint8:
        return [shape, digest(array)]
    flat = np.abs(array.reshape(-1)).astype(np.float64)
    flat = flat[np.isfinite(flat)]
    weights = 1 + np.arange(len(flat)) % 7  # by place: a sample that is turned has the same mean
    return [shape, float(flat.mean()), float((flat * weights).mean())] if len(flat) else [shape]


def stable(readings: Sequence[Signature]) -> Signature | None:
    """Return what several readings of a sample have in common; None where they differ."""
    return readings[0] if all(_alike(each, readings[0]) for each in readings) else None


def compare(world: World, asked: str, own: Sequence[Signature | None]) -> str:
    """Compare samples that every rank has read; return a warning, "" for none (*collective*).

    `own` has None for those that are others each time they are read. Raises `RequestError`, on every rank, where one
    has other samples than rank 0. Where some are the same and some are not, they may just be drawn.
    """
    first, *others = world.gather(list(own))
    draws = f"{asked}: samples differ from one reading to the next, or between ranks: lockstep seeds torch's, NumPy's "
    draws += "and Python's generators for each sample, and this data set draws from one of its own"
    if any(None in theirs for theirs in (first, *others)):
        return draws
    for rank, theirs in enumerate(others, start=1):
        same = [_alike(a, b) for a, b in zip(first, theirs, strict=False)]
        if (same or len(first) != len(theirs)) and not any(same):
            raise RequestError(
                f"{asked} is not the same on every rank: rank {rank} reads other samples than rank 0. Give every rank "
                "the same, in the same order: sort what a disk lists, let the seed that lockstep gives decide what is "
                "drawn, and give each rank the whole of a stream."
            )
        if not all(same):
            return draws
    return ""


def _alike(one: Signature, other: Signature) -> bool:
    return len(one) == len(other) and all(map(_near, one, other))


def _near(one: float | str, other: float | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return abs(one - other) <= _NEAR * max(abs(one), abs(other))

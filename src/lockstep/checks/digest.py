"""A 64-bit digest of tensors, computed on their device. Any single bit changes it.

A tensor's bytes are read once, as 64-bit words. Long tensors are cut into layers, which are summed modulo 2⁶⁴; each sum
is mixed, multiplied by an odd key of its own, and added up. A change of one sum changes the digest, and changes of
several cancel with a chance of 2⁻⁶³; unseen are changes that cancel within a sum, such as two words a multiple of a
layer apart that change places. Sums of integers do not depend on order: every device gives the same digest.
(torch.hash_tensor does not see elements that change places, and is slower on a CPU.)

Ranks and devices compare digests; tensors travel only where these differ, to measure the difference.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.state import laid_out_as
from ..data import counter
from ..world.world import World
from .difference import INTEGERS, distance, plain

_LAYERS = 31  # more slow down the sums, fewer the rest; a prime, as distances in memory are powers of two
_LAYERED = 1 << 14  # least words for layers; below, each word has a key of its own
_PIECE = 1 << 22  # words that are cut into layers at a time, which bounds the number of keys
_GROUP = 1 << 16  # words that are mixed and summed at a time: they stay in the processor's caches
_SMALL_BYTES = 1 << 17  # below, tensors are digested together: a call costs as much as reading ten thousand bytes


class Found(NamedTuple):
    """A tensor whose bits differ between ranks."""

    name: str
    ranks: tuple[int, ...]  # those that are unlike most; all of them where no more than half agree
    gap: float | None
    """Largest |difference| from rank 0's, infinite where a value is no number; None where a rank lacks the tensor."""


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digest of all `tensors`, in their order. 0-dim int64, on their device; does not synchronize.

    Tensors are taken in memory order: ranks that compare have the same memory format.
    """
    small: dict[torch.dtype, list[Tensor]] = {}
    bodies = []
    for flat in map(_flat, tensors):
        if flat.nbytes < _SMALL_BYTES:
            small.setdefault(flat.dtype, []).append(flat)
        else:
            bodies.append(flat)
    bodies += [torch.cat(group) for group in small.values()]
    return _folded(part for body in bodies for part in _parts(body))


def differing(own: Mapping[str, Tensor], copy: Mapping[str, Tensor]) -> list[str]:
    """Return the names in `copy` whose bits differ from `own`. On any device, in any memory order.

    The host compares the digests: copies between devices are not relied on.
    """
    ours = [own[name] for name in copy]
    theirs = [
        each if mine.stride() == each.stride() else laid_out_as(mine, each)
        for mine, each in zip(ours, copy.values(), strict=True)
    ]
    if not ours or int(digest(ours)) == int(digest(theirs)):
        return []
    pairs = zip(copy, ours, theirs, strict=True)
    return [name for name, mine, their in pairs if int(digest([mine])) != int(digest([their]))]


def compare(world: World, tensors: Mapping[str, Tensor]) -> list[Found]:
    """Return the tensors whose bits differ between ranks (*collective*).

    Tensors that some rank lacks come first, then the largest difference.
    """
    by_rank: list[dict[str, int]] = world.gather({name: int(digest([each])) for name, each in tensors.items()})
    names = dict.fromkeys(name for theirs in by_rank for name in theirs)
    values = {name: [theirs.get(name) for theirs in by_rank] for name in names}
    unlike = [name for name, each in values.items() if len(set(each)) > 1]
    gaps = {name: _gap(world, tensors[name]) for name in unlike if None not in values[name]}
    found = [Found(name, _unlike_most(values[name]), gaps.get(name)) for name in unlike]
    return sorted(found, key=lambda each: -math.inf if each.gap is None else -each.gap)


def _unlike_most(values: Sequence[int | None]) -> tuple[int, ...]:
    (value, count), *_ = Counter(values).most_common(1)
    has_majority = 2 * count > len(values)
    return tuple(rank for rank, theirs in enumerate(values) if not has_majority or theirs != value)


def _gap(world: World, tensor: Tensor) -> float:
    """Return the largest |difference| of any rank's tensor from rank 0's (*collective*)."""
    own = plain(tensor).reshape(-1).to(world.device, torch.float64)
    reference = own.clone()
    world.broadcast([reference])
    return float(world.max(torch.tensor(distance(own, reference), dtype=torch.float64, device=world.device)))


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements (n,) as integers of their size. In memory order where that needs no copy."""
    tensor = plain(tensor)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    flat = tensor.reshape(-1).contiguous()  # of one dimension, reshape keeps a stride
    return flat.view(INTEGERS[flat.element_size()])


def _parts(flat: Tensor) -> Iterator[Tensor]:
    """Yield the numbers to digest for integers (n,), (m,) int64 each. Sums over layers, and plain words."""
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # words begin where memory has them
    whole = len(flat) // per_word * per_word
    for piece in torch.split(flat[:whole].view(torch.int64), _PIECE):
        deep = len(piece) // _LAYERS if len(piece) >= _LAYERED else 0
        if deep:
            yield piece[: _LAYERS * deep].view(_LAYERS, deep).sum(0)
        if _LAYERS * deep < len(piece):
            yield piece[_LAYERS * deep :]
    if whole < len(flat) or whole == 0:  # nothing at all is a part as well
        yield flat[whole:].long()


def _folded(parts: Iterable[Tensor]) -> Tensor:
    """Return the digest (0-dim int64) of integers, (m,) int64 each."""
    sums: list[Tensor] = []
    held: list[Tensor] = []
    count = 0
    for part in parts:
        held.append(part)
        count += len(part)
        if count >= _GROUP:
            sums.append(_sum_of(torch.cat(held)))
            held, count = [], 0
    if held:
        sums.append(_sum_of(torch.cat(held)))
    return _sum_of(torch.stack(sums))


def _sum_of(numbers: Tensor) -> Tensor:
    """Return the keyed sum (0-dim) of integers (n,), both int64. Overwrites them."""
    # Mixed, since an odd factor leaves a difference in the highest bit as it is, and two of these would cancel.
    halves = numbers.view(torch.int32).view(-1, 2)
    halves[:, 0] ^= halves[:, 1]
    count = len(numbers)
    return numbers.mul_(_keys(1 << (count - 1).bit_length(), numbers.device)[:count]).sum()


@functools.cache  # powers of two up to the words of two layers: some megabytes a device
def _keys(count: int, device: torch.device) -> Tensor:
    """Return (count,) odd int64 weights without a pattern. Evenly spaced ones would let swaps cancel."""
    found = counter.bits(np.zeros(1, np.uint64), np.arange(count))[0] | np.uint64(1)
    return torch.from_numpy(found.view(np.int64)).to(device)

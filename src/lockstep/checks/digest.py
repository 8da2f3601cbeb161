"""A 64-bit digest of tensors, computed on their device. Any single bit changes it.

A tensor's bytes are read once, as 64-bit words. Long tensors are cut into layers, which are summed modulo 2⁶⁴; each sum
is mixed, multiplied by a distinct odd key, and added up. A change of one sum changes the digest; changes of several
sums cancel with a probability of 2⁻⁶³. Changes that cancel within a sum are not detected, such as swapping two words
a multiple of a layer apart. Sums of integers do not depend on order: every device computes the same digest.
(torch.hash_tensor does not detect swapped elements, and is slower on a CPU.)

Ranks and devices compare digests; tensors are exchanged only if digests differ, to measure the difference.
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

_LAYERS = 31  # more slow down the sums, fewer the keyed part; prime, since strides are powers of two
_LAYERED = 1 << 14  # fewest words to cut into layers; with fewer, each word has its own key
_PIECE = 1 << 22  # words cut into layers at a time, which bounds the number of keys
_GROUP = 1 << 16  # words mixed and summed at a time: they stay in the processor's caches
_SMALL_BYTES = 1 << 17  # smaller tensors are concatenated: a call costs as much as reading 10 kB


class DifferingTensor(NamedTuple):
    """A tensor whose bits differ between ranks."""

    name: str
    ranks: tuple[int, ...]  # ranks outside the majority; all ranks without a majority
    gap: float | None
    """Largest |difference| from rank 0's, infinite for a NaN; None if a rank lacks the tensor."""


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digest of all `tensors` in order: 0-dim int64, on their device. Does not synchronize.

    Tensors are read in memory order: ranks must use the same memory format.
    """
    small: dict[torch.dtype, list[Tensor]] = {}
    bodies = []
    for flat in map(_flat, tensors):
        if flat.nbytes < _SMALL_BYTES:
            small.setdefault(flat.dtype, []).append(flat)
        else:
            bodies.append(flat)
    bodies += [torch.cat(group) for group in small.values()]
    return _fold(part for body in bodies for part in _parts(body))


def find_differing(original: Mapping[str, Tensor], copy: Mapping[str, Tensor]) -> list[str]:
    """Return the names in `copy` whose bits differ from `original`. On any device, in any memory order.

    The host compares the digests, since copies between devices may themselves be faulty.
    """
    originals = [original[name] for name in copy]
    copies = [
        second if first.stride() == second.stride() else laid_out_as(first, second)
        for first, second in zip(originals, copy.values(), strict=True)
    ]
    if not originals or int(digest(originals)) == int(digest(copies)):
        return []
    pairs = zip(copy, originals, copies, strict=True)
    return [name for name, first, second in pairs if int(digest([first])) != int(digest([second]))]


def compare(world: World, tensors: Mapping[str, Tensor]) -> list[DifferingTensor]:
    """Return the tensors whose bits differ between ranks (*collective*).

    Tensors that some rank lacks come first, then the largest difference.
    """
    by_rank: list[dict[str, int]] = world.gather({name: int(digest([tensor])) for name, tensor in tensors.items()})
    names = dict.fromkeys(name for digests in by_rank for name in digests)
    values = {name: [digests.get(name) for digests in by_rank] for name in names}
    mismatches = [name for name, digests in values.items() if len(set(digests)) > 1]
    gaps = {name: _gap(world, tensors[name]) for name in mismatches if None not in values[name]}
    differing_tensors = [DifferingTensor(name, _find_minority(values[name]), gaps.get(name)) for name in mismatches]
    return sorted(differing_tensors, key=lambda item: -math.inf if item.gap is None else -item.gap)


def _find_minority(values: Sequence[int | None]) -> tuple[int, ...]:
    (majority_value, count), *_ = Counter(values).most_common(1)
    has_majority = 2 * count > len(values)
    return tuple(rank for rank, rank_value in enumerate(values) if not has_majority or rank_value != majority_value)


def _gap(world: World, tensor: Tensor) -> float:
    """Return the largest |difference| of any rank's tensor from rank 0's (*collective*)."""
    values = plain(tensor).reshape(-1).to(world.device, torch.float64)
    reference = values.clone()
    world.broadcast([reference])
    return float(world.max(torch.tensor(distance(values, reference), dtype=torch.float64, device=world.device)))


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements (n,) as integers of their size, in memory order if that needs no copy."""
    tensor = plain(tensor)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    flat = tensor.reshape(-1).contiguous()  # reshape keeps the stride of a one-dimensional tensor
    return flat.view(INTEGERS[flat.element_size()])


def _parts(flat: Tensor) -> Iterator[Tensor]:
    """Yield sums over layers, and further words, of integers (n,); each (m,) int64."""
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # words must be aligned in memory
    aligned_count = len(flat) // per_word * per_word
    for piece in torch.split(flat[:aligned_count].view(torch.int64), _PIECE):
        layer_size = len(piece) // _LAYERS if len(piece) >= _LAYERED else 0
        if layer_size:
            yield piece[: _LAYERS * layer_size].view(_LAYERS, layer_size).sum(0)
        if _LAYERS * layer_size < len(piece):
            yield piece[_LAYERS * layer_size :]
    if aligned_count < len(flat) or aligned_count == 0:  # an empty tensor yields an empty part
        yield flat[aligned_count:].long()


def _fold(parts: Iterable[Tensor]) -> Tensor:
    """Return the digest (0-dim int64) of `parts`, each (m,) int64."""
    sums: list[Tensor] = []
    pending: list[Tensor] = []
    count = 0
    for part in parts:
        pending.append(part)
        count += len(part)
        if count >= _GROUP:
            sums.append(_sum_of(torch.cat(pending)))
            pending, count = [], 0
    if pending:
        sums.append(_sum_of(torch.cat(pending)))
    return _sum_of(torch.stack(sums))


def _sum_of(numbers: Tensor) -> Tensor:
    """Return the keyed sum (0-dim int64) of `numbers`, (n,) int64. Overwrites them."""
    # Mixed, since an odd factor preserves a difference in the highest bit, and two such differences would cancel.
    halves = numbers.view(torch.int32).view(-1, 2)
    halves[:, 0] ^= halves[:, 1]
    count = len(numbers)
    return numbers.mul_(_keys(1 << (count - 1).bit_length(), numbers.device)[:count]).sum()


@functools.cache  # powers of two up to the words of two layers: some megabytes per device
def _keys(count: int, device: torch.device) -> Tensor:
    """Return (count,) odd int64 keys from a hash. With evenly spaced keys, swaps would cancel."""
    keys = counter.bits(np.zeros(1, np.uint64), np.arange(count))[0] | np.uint64(1)
    return torch.from_numpy(keys.view(np.int64)).to(device)

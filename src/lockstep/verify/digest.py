"""A digest of tensors, computed where they lie: one 64-bit number, which is another one if a single bit is.

A tensor's bytes are read once, as 64-bit integers. The tensor is cut into 31 layers that are laid upon each other and
summed, wrapping around at 2⁶⁴: so a word meets those an odd number of words away, about a 31st of the tensor, and
never a neighbour, nor one at a power of two, as rows and blocks of memory mostly lie. Each sum is then mixed and
multiplied by an odd key of its own, and all are added. Every step can be undone modulo 2⁶⁴: whatever changes one sum,
such as a flipped bit or an element of another value, changes the digest for certain; differences in several sums, such
as elements that change places, cancel with a chance of 2⁻⁶⁴. Whole numbers add up to the same in any order, so that
the digest is the same on every device, with any number of threads.

torch.hash_tensor, which combines bits by exclusive or, does not see elements that change places at all, and on a CPU
takes longer.

Digests are what tensors are compared by here, between ranks and between the devices of one process, since bytes need
not travel for it; only of tensors that differ are the values exchanged, to tell by how much.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..state import laid_out_as
from ..world import World
from .difference import INTEGERS

_LAYERS = 31  # with fewer, what follows takes longer; with more, the sum
_LAYERED = 1 << 14
"""Words from which on layers are worth it; below, each word has a key of its own."""
_PIECE = 1 << 22
"""Words that are digested at a time: keys are as many as the words of a layer, and kept."""
_SMALL_BYTES = 1 << 17
"""Tensors below this size are digested together: each call on one costs as much as reading some ten thousand bytes."""
_KEY = 0x9E3779B97F4A7C15 - (1 << 64)
MEASURED = 3
"""Tensors of which the size of the difference is looked for, where many differ."""


class Found(NamedTuple):
    """A tensor that is not the same bits on all ranks."""

    name: str
    ranks: tuple[int, ...]
    """Those that are unlike most; all of them where no more than half agree."""
    gap: float | None
    """Largest |difference| from rank 0's; NaN where a value is none, None where it was not looked for."""


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digest (0-dim int64, on their device) of all `tensors`, in their order; nothing is waited for.

    Tensors are taken in memory order: ranks that compare have the same memory format.
    """
    flats = [_flat(tensor) for tensor in tensors]
    small: dict[torch.dtype, list[Tensor]] = {}
    bodies = []
    for flat in flats:
        if flat.nbytes < _SMALL_BYTES:
            small.setdefault(flat.dtype, []).append(flat)
        else:
            bodies.append(flat)
    bodies += [torch.cat(group) for group in small.values()]
    return _weighed([_folded(body) for body in bodies])


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digest of each tensor by itself, (n,) int64."""
    return torch.stack([_folded(_flat(tensor)) for tensor in tensors])


def differing(own: Mapping[str, Tensor], copy: Mapping[str, Tensor]) -> list[str]:
    """Return the names in `copy`, on whatever device, that are not the same bits as the tensors of that name in `own`.

    The order in memory may be another one. The host waits for both devices, and compares the numbers itself: what
    carries tensors from one device to another is not relied on.
    """
    ours = [own[name] for name in copy]
    theirs = [
        each if mine.stride() == each.stride() else laid_out_as(mine, each)
        for mine, each in zip(ours, copy.values(), strict=True)
    ]
    if not ours or int(digest(ours)) == int(digest(theirs)):
        return []
    pairs = zip(copy, digests(ours).tolist(), digests(theirs).tolist(), strict=True)
    return [name for name, mine, their in pairs if mine != their]


def compare(world: World, tensors: Mapping[str, Tensor]) -> list[Found]:
    """Return the tensors that are not the same bits on all ranks, or that some lack (*collective*)."""
    by_rank: list[dict[str, int]] = world.gather(_by_name(tensors))
    found: list[Found] = []
    for name in dict.fromkeys(name for theirs in by_rank for name in theirs):
        values = [theirs.get(name) for theirs in by_rank]
        if len(set(values)) > 1:
            measurable = None not in values and len(found) < MEASURED
            found.append(Found(name, _unlike_most(values), _gap(world, tensors[name]) if measurable else None))
    return found


def spread(world: World, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return, of tensors that differ, the largest |difference| of any rank's from rank 0's, by name (*collective*).

    The tensors are named in the same order on every rank. The difference is infinite where one side is not a finite
    number and the other has another value.
    """
    by_rank = world.stack(torch.tensor(list(_by_name(tensors).values()), device=world.device))
    differ = (by_rank != by_rank[0]).any(0).tolist()
    parts = [
        _plain(tensor).reshape(-1).to(world.device, torch.float64)
        for tensor, differs in zip(tensors.values(), differ, strict=True)
        if differs
    ]
    if not parts:
        return {}
    own = torch.cat(parts)
    reference = own.clone()
    world.broadcast([reference])
    same = (own == reference) | (own.isnan() & reference.isnan())
    gaps = (own - reference).abs().masked_fill(same, 0).nan_to_num(nan=math.inf, posinf=math.inf)
    most = world.max(torch.stack([part.max() for part in torch.split(gaps, [len(part) for part in parts])]))
    names = [name for name, differs in zip(tensors, differ, strict=True) if differs]
    return dict(zip(names, most.tolist(), strict=True))


def largest_gap(a: Tensor, b: Tensor) -> float:
    """Return the largest |a - b| of two tensors of one shape and device; NaN where a value is none."""
    return float((_plain(a).double() - _plain(b).double()).abs().max()) if a.numel() else 0.0


def device_groups(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of each kind of device, in the order in which these come: the same on every rank."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.device.type, {})[name] = tensor
    return list(groups.values())


def _by_name(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digest of each tensor, in their order."""
    found = {
        name: value
        for group in device_groups(tensors)
        for name, value in zip(group, digests(list(group.values())).tolist(), strict=True)
    }
    return {name: found[name] for name in tensors}


def _unlike_most(values: Sequence[int | None]) -> tuple[int, ...]:
    """Return the ranks whose value is not that of the majority; all ranks where there is none."""
    (value, count), *_ = Counter(values).most_common(1)
    if 2 * count <= len(values):
        return tuple(range(len(values)))
    return tuple(rank for rank, theirs in enumerate(values) if theirs != value)


def _gap(world: World, tensor: Tensor) -> float:
    """Return the largest |difference| of any rank's `tensor` from rank 0's (*collective*)."""
    reference = _plain(tensor).contiguous().clone()
    world.broadcast([reference])
    gaps: list[float] = world.gather(largest_gap(_plain(tensor), reference))
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def _plain(tensor: Tensor) -> Tensor:
    """Return the numbers, a complex one as two, without their history."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements (n,), as whole numbers of their size, in memory order where that needs no copy."""
    tensor = _plain(tensor)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    flat = tensor.reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])


def _folded(flat: Tensor) -> Tensor:
    """Return the digest (0-dim int64) of whole numbers (n,)."""
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # words begin where memory has them
    whole = len(flat) // per_word * per_word
    words, rest = flat[:whole].view(torch.int64), flat[whole:].long()
    if len(words) > _PIECE:
        pieces = [words[at : at + _PIECE] for at in range(0, len(words), _PIECE)]
        return _weighed([_folded(each) for each in (*pieces, rest)])
    deep = 0 if len(words) < _LAYERED else (len(words) // _LAYERS - 1) | 1  # odd
    sums = words[: deep * _LAYERS].view(_LAYERS, deep).sum(0)
    return _sum_of(torch.cat([sums, words[deep * _LAYERS :], rest]))


def _sum_of(parts: Tensor) -> Tensor:
    """Return the keyed sum (0-dim int64) of whole numbers (n,)."""
    # Mixed, since an odd factor leaves a difference in the highest bit as it is, and two of these would cancel.
    mixed = (parts >> 32) ^ parts
    return (mixed * _keys(len(parts), parts.device)).sum()


def _weighed(digests: Sequence[Tensor]) -> Tensor:
    return _sum_of(torch.stack([*digests]))


def _keys(count: int, device: torch.device) -> Tensor:
    """Return (count,) odd int64 numbers, each another one."""
    return _computed_keys(1 << (count - 1).bit_length(), device)[:count]


@functools.cache  # powers of two up to the words of a layer: two megabytes a device
def _computed_keys(count: int, device: torch.device) -> Tensor:
    return (torch.arange(1, count + 1, device=device) * _KEY) | 1

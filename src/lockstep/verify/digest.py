"""A digest of tensors, computed where they lie: one 64-bit number, which is another one if a single bit is.

A tensor's bytes are read once, as 64-bit integers. The tensor is cut into layers that are laid upon each other and
summed, wrapping around at 2⁶⁴: so a word meets only those a multiple of a layer away. Each sum is then mixed and
multiplied by an odd key of its own, and all are added. A change of one sum changes the digest for certain, such as a
flipped bit; changes of several cancel with a chance of 2⁻⁶³, such as those of elements that change places. What cancels
within a sum, such as words one layer apart that change places, is not seen: but the layers are 31 and 29 by turns, and
no two words meet in both, so that the next comparison sees it. Whole numbers add up to the same in any order, so that
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..state import laid_out_as
from ..world import World
from .difference import INTEGERS

_LAYERS = 31, 29
"""With fewer, what follows takes longer; with more, the sums. Primes: so no two words meet in both layerings."""
_LAYERED = 1 << 14
"""Words from which on layers are worth it; below, each word has a key of its own."""
_PIECE = 1 << 22
"""Words that are cut into layers at a time: keys are as many as the words of two layers, and kept."""
_GROUP = 1 << 16
"""Words that are mixed and summed at a time: they stay in the processor's caches."""
_SMALL_BYTES = 1 << 17
"""Tensors below this size are digested together: each call on one costs as much as reading some ten thousand bytes."""
_KEY = 0x9E3779B97F4A7C15


class Found(NamedTuple):
    """A tensor that is not the same bits on all ranks."""

    name: str
    ranks: tuple[int, ...]
    """Those that are unlike most; all of them where no more than half agree."""
    gap: float | None
    """Largest |difference| from rank 0's; NaN where a value is none, None where a rank lacks the tensor."""


def digest(tensors: Sequence[Tensor], turn: int = 0) -> Tensor:
    """Return the digest (0-dim int64, on their device) of all `tensors`, in their order; nothing is waited for.

    `turn` numbers the comparison: the next one sees what this one may not. Tensors are taken in memory order: ranks
    that compare have the same memory format.
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
    layers = _LAYERS[turn % len(_LAYERS)]
    return _folded(part for body in bodies for part in _parts(body, layers))


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return the digest of each tensor by itself, (n,) int64; all turns are in it."""
    return torch.stack([_folded(_parts(_flat(tensor), *_LAYERS)) for tensor in tensors])


def differing(own: Mapping[str, Tensor], copy: Mapping[str, Tensor], turn: int = 0) -> list[str]:
    """Return the names in `copy`, on whatever device, that are not the same bits as the tensors of that name in `own`.

    The order in memory may be another one. The host waits for both devices, and compares the numbers itself: what
    carries tensors from one device to another is not relied on.
    """
    ours = [own[name] for name in copy]
    theirs = [
        each if mine.stride() == each.stride() else laid_out_as(mine, each)
        for mine, each in zip(ours, copy.values(), strict=True)
    ]
    if not ours or int(digest(ours, turn)) == int(digest(theirs, turn)):
        return []
    pairs = zip(copy, digests(ours).tolist(), digests(theirs).tolist(), strict=True)
    return [name for name, mine, their in pairs if mine != their]


def compare(world: World, tensors: Mapping[str, Tensor]) -> list[Found]:
    """Return the tensors that are not the same bits on all ranks, or that some lack (*collective*).

    First those that some lack or where a value is no number, then the largest difference.
    """
    by_rank: list[dict[str, int]] = world.gather(_by_name(tensors))
    names = dict.fromkeys(name for theirs in by_rank for name in theirs)
    values = {name: [theirs.get(name) for theirs in by_rank] for name in names}
    unlike = [name for name, each in values.items() if len(set(each)) > 1]
    shared = [name for name in unlike if None not in values[name]]
    gaps = dict(zip(shared, _gaps(world, [tensors[name] for name in shared]), strict=True))
    found = [Found(name, _unlike_most(values[name]), gaps.get(name)) for name in unlike]
    return sorted(found, key=lambda each: -math.inf if each.gap is None or math.isnan(each.gap) else -each.gap)


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


def _gaps(world: World, tensors: Sequence[Tensor]) -> list[float]:
    """Return of each tensor the largest |difference| of any rank's from rank 0's (*collective*)."""
    own = []
    for tensor in tensors:
        reference = _plain(tensor).contiguous().clone()
        world.broadcast([reference])
        own.append(largest_gap(_plain(tensor), reference))
    told = zip(*world.gather(own), strict=True)
    return [math.nan if any(map(math.isnan, each)) else max(each) for each in told]


def _plain(tensor: Tensor) -> Tensor:
    """Return the numbers, a complex one as two, without their history."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements (n,), as whole numbers of their size, in memory order where that needs no copy."""
    tensor = _plain(tensor)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    flat = tensor.reshape(-1).contiguous()  # of one dimension, reshape keeps a stride
    return flat.view(INTEGERS[flat.element_size()])


def _parts(flat: Tensor, *layerings: int) -> Iterator[Tensor]:
    """Yield what the digest of whole numbers (n,) is made of, (m,) int64 each: sums over layers, and words as they are.

    `layerings` are the numbers of layers to cut into, one after the other.
    """
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # words begin where memory has them
    whole = len(flat) // per_word * per_word
    words = flat[:whole].view(torch.int64)
    for at in range(0, len(words), _PIECE):
        piece = words[at : at + _PIECE]
        layered = 0
        if len(piece) >= _LAYERED:
            for layers in layerings:
                deep = len(piece) // layers
                yield piece[: layers * deep].view(layers, deep).sum(0)
            layered = min(len(piece) // layers * layers for layers in layerings)
        if layered < len(piece):
            yield piece[layered:]
    if whole < len(flat) or whole == 0:  # nothing at all is a part as well
        yield flat[whole:].long()


def _folded(parts: Iterable[Tensor]) -> Tensor:
    """Return the digest (0-dim int64) of whole numbers, (m,) int64 each."""
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
    """Return the keyed sum (0-dim int64) of whole numbers (n,) int64, which it changes."""
    # Mixed, since an odd factor leaves a difference in the highest bit as it is, and two of these would cancel.
    halves = numbers.view(torch.int32).view(-1, 2)
    halves[:, 0] ^= halves[:, 1]
    return numbers.mul_(_keys(len(numbers), numbers.device)).sum()


def _keys(count: int, device: torch.device) -> Tensor:
    """Return (count,) odd int64 numbers in no order: of evenly spaced ones, moves to and fro would cancel."""
    return _computed_keys(1 << (count - 1).bit_length(), device)[:count]


@functools.cache  # powers of two up to the words of two layers: some megabytes a device
def _computed_keys(count: int, device: torch.device) -> Tensor:
    # SplitMix64 (G. Steele, D. Lea, C. Flood, 2014) of 1, 2, 3, …
    found = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_KEY)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found = (found ^ (found >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(found.view(np.int64)).to(device)

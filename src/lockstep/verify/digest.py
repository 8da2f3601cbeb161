"""A digest of tensors, computed where they lie: one 64-bit number, which is another one if a single bit is.

A tensor's bytes are read once, as 64-bit integers. Blocks of them are summed, wrapping around at 2⁶⁴, and the sums are
multiplied by odd keys and added. An odd factor loses nothing modulo 2⁶⁴: whatever changes one block's sum, such as a
flipped bit or an element of another value, changes the digest for certain. Differences in several blocks cancel with a
chance of 2⁻⁶⁴; elements that change places within one block are not seen. Whole numbers add up to the same in any
order, so that the digest is the same on every device, with any number of threads.

torch.hash_tensor, which combines bits by exclusive or, does not see elements that change places at all, and on a CPU
takes several times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .difference import INTEGERS

_BLOCK = 512  # words: blocks are rows, whose sums a CPU takes at the rate at which it reads
_SMALL_BYTES = 1 << 17
"""Tensors below this size are digested together: each call on one costs as much as reading some ten thousand bytes."""
_KEY = 0x9E3779B97F4A7C15 - (1 << 64)


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


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements (n,), as whole numbers of their size, in memory order where that needs no copy."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
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
    blocked = len(words) // _BLOCK * _BLOCK
    sums = words[:blocked].view(-1, _BLOCK).sum(1)
    parts = torch.cat([sums, words[blocked:], rest])
    return (parts * _keys(len(parts), parts.device)).sum()


def _weighed(digests: Sequence[Tensor]) -> Tensor:
    together = torch.stack([*digests])
    return (together * _keys(len(together), together.device)).sum()


@functools.lru_cache(maxsize=4096)
def _keys(count: int, device: torch.device) -> Tensor:
    """Return (count,) odd int64 numbers, each another one."""
    return (torch.arange(1, count + 1, device=device) * _KEY) | 1

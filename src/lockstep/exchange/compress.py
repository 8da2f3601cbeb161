"""Sums over the ranks that send 16 bits a number, half as many as float32 does.

Each rank sums one part of the tensor: it receives that part from every rank in 16 bits, adds in float32 (float64 for
float64), in rank order, and sends the sum, rounded to 16 bits, to all. A number is rounded twice, whatever the number
of ranks, and all ranks have the same bits. bfloat16 keeps the range of float32 with 8 bits of precision. float16 has 11
bits for numbers down to 2⁻²⁷ of the largest in a message, and fewer below.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_EXPONENT, _MOST_EXPONENT = 14, 100  # of the largest number sent, and of a factor
WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The type in which gradients travel, by the name of the exchange."""


def reduce_scatter(output: Tensor, parts: Tensor, wire: torch.dtype, group: dist.ProcessGroup, **_: Any) -> None:
    """Sum each rank's part of `parts` (ranks · n) into its `output` (n): rounded once (*collective*)."""
    sent = _pack(parts.view(-1, output.numel()), wire)
    received = torch.empty_like(sent)
    dist.all_to_all_single(_bytes(received), _bytes(sent), group=group)
    output.copy_(_add(_unpack(received, _sum_type(parts))))


class CompressedSum:
    """Sum of `flat` (contiguous) over the ranks of `group`, in place. Begins when it is made (*collective*).

    Each message has a factor, a power of two that brings its largest number near the middle of float16's range.
    """

    def __init__(self, flat: Tensor, wire: torch.dtype, group: dist.ProcessGroup) -> None:
        self._flat, self._group, self._wire, ranks = flat, group, wire, dist.get_world_size(group)
        parts = flat.new_zeros(ranks, -(-flat.numel() // ranks))
        parts.view(-1)[: flat.numel()] = flat
        sent = _pack(parts, wire)
        self._received = torch.empty_like(sent)
        # As bytes, since not every backend moves 16-bit numbers.
        self._work: Any = dist.all_to_all_single(_bytes(self._received), _bytes(sent), group=group, async_op=True)

    def send_sum(self) -> None:
        """Sum this rank's part, and begin to send it (*collective*): in one order on all ranks."""
        self._work.wait()
        total = _add(_unpack(self._received, _sum_type(self._flat)))
        part = _bytes(_pack(total[None], self._wire))
        self._work = dist.all_gather_into_tensor(_bytes(self._received), part, group=self._group, async_op=True)

    def wait(self) -> None:
        """Return once `flat` has the sum."""
        self._work.wait()
        self._flat.copy_(_unpack(self._received, _sum_type(self._flat)).view(-1)[: self._flat.numel()])
        del self._received, self._work  # as large as half of the gradients


def _sum_type(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _add(rows: Tensor) -> Tensor:
    """Return the sum of the rows, in their order; changes the first."""
    total = rows[0]
    for row in rows[1:]:
        total += row
    return total


def _pack(rows: Tensor, wire: torch.dtype) -> Tensor:
    """Return rows (n, m) in 16 bits, each with its factor as float32 at the end: (n, m + 2)."""
    largest = rows.abs().amax(1, keepdim=True)
    _, exponent = torch.frexp(torch.where(largest.isfinite(), largest, 1.0))
    factor = torch.ldexp(torch.ones_like(largest), (_EXPONENT - exponent).clamp(-_MOST_EXPONENT, _MOST_EXPONENT))
    packed = torch.empty(rows.shape[0], rows.shape[1] + 2, dtype=wire, device=rows.device)
    packed[:, :-2] = rows * factor
    packed.view(torch.int16)[:, -2:] = factor.float().view(torch.int16)
    return packed


def _unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of `_pack` in `dtype`."""
    factor = packed.view(torch.int16)[:, -2:].contiguous().view(torch.float32).to(dtype)
    return packed[:, :-2].to(dtype) / factor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)

"""Sums over the ranks that send 16 bits a number, half as many as float32 does.

Each rank sums one part of the tensor: it receives that part from every rank in 16 bits, adds in float32 (float64 for
float64), in rank order, and sends the sum, rounded to 16 bits, to all. A number is rounded twice, whatever the number
of ranks, and all ranks have the same bits. bfloat16 keeps the range of float32 with 8 bits of precision; float16 has 11
bits, and overflows beyond 65,504.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WIRES = {"full": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type in which gradients travel, by the name of the exchange; None for their own."""


class CompressedSum:
    """Sum of `flat` (contiguous) over the ranks of `group`, in place. Begins when it is made (*collective*)."""

    def __init__(self, flat: Tensor, wire: torch.dtype, group: dist.ProcessGroup) -> None:
        self._flat, self._group, self._ranks = flat, group, dist.get_world_size(group)
        sent = flat.new_zeros(self._ranks * -(-flat.numel() // self._ranks), dtype=wire)
        sent[: flat.numel()] = flat
        self._received = torch.empty_like(sent)
        # As bytes, since not every backend moves 16-bit numbers.
        self._work: Any = dist.all_to_all_single(_bytes(self._received), _bytes(sent), group=group, async_op=True)

    def send_sum(self) -> None:
        """Sum this rank's part, and begin to send it (*collective*): in one order on all ranks."""
        self._work.wait()
        rows = self._received.view(self._ranks, -1)
        total = rows[0].to(torch.float64 if self._flat.dtype == torch.float64 else torch.float32)
        for row in rows[1:]:
            total += row
        part = _bytes(total.to(self._received.dtype))
        self._work = dist.all_gather_into_tensor(_bytes(self._received), part, group=self._group, async_op=True)

    def wait(self) -> None:
        """Return once `flat` has the sum."""
        self._work.wait()
        self._flat.copy_(self._received[: self._flat.numel()])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)

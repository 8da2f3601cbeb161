"""Buckets: parameters whose gradients share one flat tensor and one all-reduce.

Parameters are in reverse order of definition, roughly that in which a backward pass finishes them. The order never
depends on timing, so that equal worlds sum in an equal order, and a resumed run has the bits of an uninterrupted run. A
bucket's tensor ends in a flag per parameter: the sum of the flags is the number of ranks with a gradient. The tensor
stores complex gradients as pairs of real numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .. import _torch

_SPARE_TENSORS = 3  # flat tensors kept per bucket: a loop may have that many losses per step


class Bucket:
    """Parameters of one dtype on one device. `indices` are their positions in the exchange's list."""

    def __init__(self, parameters: list[nn.Parameter], indices: list[int]) -> None:
        self.parameters, self.indices = parameters, indices
        sizes = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
        self.offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self.elements = sum(sizes)
        # In the parameter's memory order, as autograd's gradients: torch's fused optimizers rely on equal orders.
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in parameters]
        self._spare: list[Tensor] = []

    def allocate(self) -> Tensor:
        """Return a flat tensor without views, so that a `.grad` or a view that the loop has kept stays unchanged."""
        for position, flat in enumerate(self._spare):
            if not _torch.is_viewed(flat):
                return self._spare.pop(position)
        first = self.parameters[0]
        dtype = first.dtype.to_real()
        return torch.zeros(self.elements + len(self.parameters), dtype=dtype, device=first.device)

    def release(self, flat: Tensor) -> None:
        """Offer a flat tensor for later passes, once no view of it exists."""
        self._spare = [*self._spare[1 - _SPARE_TENSORS :], flat]

    def view(self, flat: Tensor, number: int) -> Tensor:
        """Return the view of parameter `number`'s gradient in `flat`, in the parameter's memory order."""
        parameter, offset, strides = self.parameters[number], self.offsets[number], self._strides[number]
        shape = parameter.shape
        if not parameter.is_complex():
            return flat.as_strided(shape, strides, offset)
        pairs = flat.as_strided((*shape, 2), (*(2 * stride for stride in strides), 1), offset)
        return torch.view_as_complex(pairs)

    def in_place(self) -> Tensor | None:
        """Return a single real parameter's memory as a flat tensor; None for several, and for memory with gaps."""
        parameter = self.parameters[0].detach()
        if len(self.parameters) > 1 or parameter.is_complex() or parameter.stride() != self._strides[0]:
            return None
        return parameter.as_strided((parameter.numel(),), (1,))

    def flags(self, flat: Tensor) -> Tensor:
        """Return the view of the flags (parameters,) in `flat`."""
        return flat[self.elements :]


def lay_out(parameters: Iterable[tuple[int, nn.Parameter]], bucket_bytes: int) -> list[Bucket]:
    """Return buckets of at least `bucket_bytes` for the numbered `parameters`; the last ones may be smaller."""
    unfilled: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], list[int]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets: list[Bucket] = []
    for index, parameter in reversed(list(parameters)):
        kind = (parameter.dtype, parameter.device)
        members, indices = unfilled.setdefault(kind, ([], []))
        members.append(parameter)
        indices.append(index)
        sizes[kind] = sizes.get(kind, 0) + parameter.nbytes
        if sizes[kind] >= bucket_bytes:  # after the parameter that fills it: a bias leaves with its weight
            buckets.append(Bucket(*unfilled.pop(kind)))
            sizes[kind] = 0
    return buckets + [Bucket(*members) for members in unfilled.values()]

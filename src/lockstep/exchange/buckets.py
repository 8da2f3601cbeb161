"""Buckets: parameters whose gradients share one flat tensor, and leave together.

Parameters are taken in reverse order of definition, in which a backward pass finishes them, about. The order never
follows from time, so that equal worlds sum in an equal order, and a resumed run has the bits of one that was not
stopped. A bucket's tensor ends in a flag for each parameter: the sum of the flags says on how many ranks it had a
gradient. Complex gradients lie there as pairs of real numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .. import _torch

_SPARE = 3  # flat tensors of a bucket that are kept: a loop may have as many losses a step


class Bucket:
    """Parameters of one dtype on one device. `indices` are their numbers among all of the exchange."""

    def __init__(self, parameters: list[nn.Parameter], indices: list[int]) -> None:
        self.parameters, self.indices = parameters, indices
        sizes = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
        self.offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self.elements = sum(sizes)
        # As autograd makes it: in the parameter's memory order, which torch's fused optimizers walk side by side.
        self._strides = [torch.empty_like(parameter, device="meta").stride() for parameter in parameters]
        self._spare: list[Tensor] = []

    def allocate(self) -> Tensor:
        """Return a flat tensor that nobody else holds: a `.grad`, or a view that the loop has kept, stays as it is."""
        for at, flat in enumerate(self._spare):
            if not _torch.is_viewed(flat):
                return self._spare.pop(at)
        first = self.parameters[0]
        dtype = first.dtype.to_real()
        return torch.zeros(self.elements + len(self.parameters), dtype=dtype, device=first.device)

    def release(self, flat: Tensor) -> None:
        """Offer a flat tensor for later passes, once nobody has a view of it."""
        self._spare = [*self._spare[1 - _SPARE :], flat]

    def view(self, flat: Tensor, number: int) -> Tensor:
        """Return the gradient of the bucket's parameter `number` within `flat`, in the parameter's memory order."""
        parameter, offset, strides = self.parameters[number], self.offsets[number], self._strides[number]
        shape = parameter.shape
        if not parameter.is_complex():
            return flat.as_strided(shape, strides, offset)
        pairs = flat.as_strided((*shape, 2), (*(2 * stride for stride in strides), 1), offset)
        return torch.view_as_complex(pairs)

    def flags(self, flat: Tensor) -> Tensor:
        """Return the flags (parameters,) within `flat`."""
        return flat[self.elements :]


def lay_out(parameters: Iterable[tuple[int, nn.Parameter]], bucket_bytes: int) -> list[Bucket]:
    """Return the buckets of the numbered `parameters`, complete at `bucket_bytes`."""
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], list[int]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets: list[Bucket] = []
    for index, parameter in reversed(list(parameters)):
        kind = (parameter.dtype, parameter.device)
        members, indices = open_.setdefault(kind, ([], []))
        members.append(parameter)
        indices.append(index)
        sizes[kind] = sizes.get(kind, 0) + parameter.nbytes
        if sizes[kind] >= bucket_bytes:  # then, and not before: a bias leaves with its weight
            buckets.append(Bucket(*open_.pop(kind)))
            sizes[kind] = 0
    return buckets + [Bucket(*rest) for rest in open_.values()]

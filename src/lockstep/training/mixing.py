"""Permutations of a global micro-batch's samples: MixUp and CutMix over all ranks.

`perm = torch.randperm(len(x))` is this rank's rows of a permutation of all samples, as indices into the global
micro-batch. `x[perm]` gathers those samples from the ranks, and its gradient goes back to them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import RequestError
from ..world.world import World
from .layout import BY_SAMPLE, Share
from .random_operators import place_of

_GETTERS = {"__get__", "dim", "size", "numel", "__len__", "is_floating_point"}
_MOVES = {"to", "cpu", "cuda", "xpu", "npu"}


class Permutations:
    """The permutations drawn in a micro-batch, identified as objects."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.references: list[weakref.ref[Tensor]] = []

    def __contains__(self, value: object) -> bool:
        return any(reference() is value for reference in self.references)

    def clear(self) -> None:
        """Forget all permutations."""
        self.references.clear()

    def draw(self, share: Share, kwargs: dict[str, Any]) -> Tensor:
        """Return the share's rows of a permutation of all samples."""
        permutation = BY_SAMPLE.take(torch.randperm(share.total, **kwargs), share)
        self.references.append(weakref.ref(permutation))
        return permutation

    def is_used_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an argument is a permutation, or a tuple with one."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if value in self:
                    return True
            elif isinstance(value, tuple | list) and any(isinstance(part, Tensor) and part in self for part in value):
                return True
        return False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], share: Share) -> Any:
        """Call a function of a permutation (*collective*). Raises `RequestError` unless it indexes samples with it."""
        name = getattr(func, "__name__", str(func))
        if name in _GETTERS:
            return func(*args, **kwargs)
        if name in _MOVES and args[0] in self:
            moved: Tensor = func(*args, **kwargs)
            self.references.append(weakref.ref(moved))
            return moved
        tensor, permutation, further_indices = self._parse_indexing(name, args, kwargs)
        if (
            permutation not in self
            or not isinstance(tensor, Tensor)
            or tensor in self
            or tensor.shape[:1] != (share.rows,)
        ):
            raise RequestError(
                f"draws='global': {place_of(name)} takes a permutation of the global micro-batch, "
                f"torch.randperm({share.rows}), which can only index the first dimension of a tensor of this rank's "
                f"{share.rows} samples, as in x[perm] or x.index_select(0, perm); draw any other permutation within "
                "along(None)."
            )
        part = tensor[(slice(None), *further_indices)] if further_indices else tensor
        indices = permutation.to(
            part.device, copy=True
        )  # a copy, not a permutation: the backward pass may use it in any way
        return _Mixed.apply(part, indices, share, self._world)

    def _parse_indexing(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return tensor, first index and further indices of an indexing call; (None, None, ()) for other functions."""
        if name == "__getitem__":
            tensor, index = args
            first, *further_indices = index if isinstance(index, tuple) else (index,)
            if not any(isinstance(part, Tensor | list) for part in further_indices):
                return tensor, first, tuple(further_indices)
        elif name in ("index_select", "take"):
            names = ("input", "dim", "index") if name == "index_select" else ("input", "index")
            arguments = dict(zip(names, args, strict=False))
            arguments |= {"input" if key == "self" else key: value for key, value in kwargs.items()}
            tensor = arguments["input"]
            if arguments.get("dim", 0) in (0, -tensor.dim()) and (name == "index_select" or tensor.dim() == 1):
                return tensor, arguments["index"], ()
        return None, None, ()


class _Mixed(torch.autograd.Function):
    """Rows of the global micro-batch: tensor (rows, …), indices (rows,) → (rows, …)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, indices: Tensor, share: Share, world: World) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.share, ctx.world = share, world
        return BY_SAMPLE.gather(tensor.contiguous(), share, world)[indices]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        share: Share = ctx.share
        full = gradient.new_zeros((share.total, *gradient.shape[1:])).index_add_(0, indices, gradient.contiguous())
        gradients = BY_SAMPLE.take(ctx.world.sum_(full), share)
        return gradients if share.size else torch.zeros_like(gradients), None, None, None

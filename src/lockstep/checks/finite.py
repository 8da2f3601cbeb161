"""Find non-finite tensors. A loss can be finite while its gradients are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..errors import RunError
from ..world.world import World

NAMED = 3
"""Tensors that a sentence names."""


def suspect(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether any of `tensors` may be non-finite. One device; does not synchronize.

    The answer (0-dim bool, on their device) is True for every NaN and infinity, and also for finite numbers whose
    squares overflow: a norm is torch's quickest pass over memory, and `not_finite` decides.
    """
    held = [each.detach() for each in tensors if _can_be(each)]
    if not held:
        return torch.tensor(False)
    return ~nn.utils.get_total_norm(held).isfinite()


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with a NaN or an infinity."""
    return [name for name, each in tensors.items() if _can_be(each) and not bool(each.detach().isfinite().all())]


def found(world: World, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors non-finite on any rank (*collective*). All on one device."""
    own = not_finite(tensors) if bool(suspect(tensors.values())) else []
    return list(dict.fromkeys(name for theirs in world.gather(own) for name in theirs))


def error(step: int, names: Iterable[str], remedy: str) -> RunError:
    """Return the error for non-finite tensors after `step`. `remedy` is a sentence on what to do."""
    told = ", ".join(list(names)[:NAMED])
    return RunError(
        f"The weights, statistics or optimizer state after step {step} are not finite numbers ({told}), though the "
        f"loss was; they were not saved. {remedy}".rstrip()
    )


def _can_be(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0

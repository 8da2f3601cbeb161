"""Find non-finite tensors. A loss can be finite while its gradients are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..errors import RunError
from ..world.world import World

MOST_NAMES = 3
"""Most tensors that a message names."""


def suspect(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether any of `tensors`, on one device, may be non-finite. Does not synchronize.

    The result (0-dim bool, on their device) is True for every NaN and infinity, and also for finite numbers whose
    squares overflow: a norm is torch's fastest pass over memory; `not_finite` decides.
    """
    candidates = [tensor.detach() for tensor in tensors if _is_candidate(tensor)]
    if not candidates:
        return torch.tensor(False)
    return ~nn.utils.get_total_norm(candidates).isfinite()


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with a NaN or an infinity."""
    return [
        name for name, tensor in tensors.items() if _is_candidate(tensor) and not bool(tensor.detach().isfinite().all())
    ]


def find_non_finite(world: World, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors, all on one device, that are non-finite on any rank (*collective*)."""
    local_names = not_finite(tensors) if bool(suspect(tensors.values())) else []
    return list(dict.fromkeys(name for names in world.gather(local_names) for name in names))


def error(step: int, names: Iterable[str], remedy: str) -> RunError:
    """Return the error for non-finite tensors after `step`. `remedy` is a sentence of advice."""
    shown = ", ".join(list(names)[:MOST_NAMES])
    return RunError(
        f"The weights, statistics or optimizer state after step {step} are not finite numbers ({shown}), though the "
        f"loss was; they were not saved. {remedy}".rstrip()
    )


def _is_candidate(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0

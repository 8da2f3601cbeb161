"""How far two sets of gradients lie apart: relative differences of tensors, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

Gradients = dict[str, Tensor]
_FLOOR = 1e-3
"""Below this share of the model's largest gradient, a tensor's differences are measured against that one: gradients
that mathematics makes zero, such as a bias's before BatchNorm, hold rounding noise, which differs freely."""


def gaps(theirs: Mapping[str, Tensor], reference: Mapping[str, Tensor], scale: float = 1.0) -> dict[str, float]:
    """Return, for each tensor, the largest |theirs ÷ scale - reference| by the tensor's largest |value|.

    Infinite where only one side has it or a value is not finite; tensors much smaller than the largest one are
    measured by that (`_FLOOR`).
    """
    largest = max((float(each.abs().max()) for each in reference.values() if each.numel()), default=0.0)
    found = {}
    for name in {**reference, **theirs}:
        a, b = theirs.get(name), reference.get(name)
        if a is None or b is None:
            found[name] = math.inf
            continue
        if not a.numel():
            found[name] = 0.0
            continue
        gap = float((a / scale - b).abs().max())
        size = max(float(b.abs().max()), _FLOOR * largest)
        found[name] = gap / size if size and math.isfinite(gap) else (math.inf if gap else 0.0)
    return found


def worst(found: Mapping[str, float]) -> float:
    """Return the largest gap; 0 of none."""
    return max(found.values(), default=0.0)


def beyond(found: Mapping[str, float], tolerance: float) -> dict[str, float]:
    """Return the gaps beyond `tolerance`, the largest first."""
    return {name: gap for name, gap in sorted(found.items(), key=lambda each: -each[1]) if gap > tolerance}


def ratio(theirs: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the number k for which k × `reference` comes nearest to `theirs`, in least squares; 1 where all are 0."""
    shared = [name for name in reference if name in theirs]
    square = sum(float((reference[name] ** 2).sum()) for name in shared)
    return sum(float((theirs[name] * reference[name]).sum()) for name in shared) / square if square else 1.0

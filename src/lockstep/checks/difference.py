"""Compare two sets of named tensors: missing tensors and numeric differences, by kind of layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import counted

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size in bytes."""
_PART = 1 << 14
"""Elements compared at a time, so that intermediate results stay in the processor's caches."""
_MOST = torch.iinfo(torch.int64).max
_WEIGHTS = {2: "linear and embedding weights", 4: "convolution weights", 5: "convolution weights"}
"""Kinds of tensors whose names end in "weight", by dimensions. With three: Conv1d, or a layer of experts."""


@dataclass(frozen=True)
class Difference:
    """One tensor whose bits differ between sides A and B."""

    name: str
    kind: str  # BatchNorm statistics, convolution weights, …
    elements: int
    differing: int = 0  # elements whose values differ; 0 if only signs of zeros or bits of NaNs differ
    absolute: float = math.inf
    """Largest |a - b|, in float64; infinite if a non-finite value differs from the other side's."""
    relative: float = math.inf  # `absolute` divided by the tensor's largest finite |value| on either side
    ulps: int | None = None
    """Largest distance from a to b in units in the last place; None for integers and across dtypes."""
    dtypes: str = ""  # both dtypes if they differ; values are then compared in float64
    shapes: str = ""  # both shapes if they differ; values are then not compared


@dataclass(frozen=True)
class Comparison:
    """Two sets of tensors, A and B, compared by name."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    differences: tuple[Difference, ...]  # largest relative difference first; only tensors that both sides have
    equal: int  # tensors with the same bits on both sides

    def beyond(self, tolerance: float) -> tuple[Difference, ...]:
        """Return the relative differences beyond `tolerance`; with 0, also differences in bits alone."""
        return tuple(item for item in self.differences if tolerance == 0 or not item.relative <= tolerance)

    def sizes(self, floor: float) -> dict[str, float]:
        """Return relative differences, with divisors of at least `floor`. Infinite for a tensor that one side lacks."""
        sizes = {item.name: min(item.relative, item.absolute / floor) for item in self.differences}
        return sizes | dict.fromkeys((*self.only_a, *self.only_b), math.inf)

    def verdict(self, tolerance: float) -> str:
        """Return a sentence: equal, or the kinds of tensors that differ."""
        kinds = Counter(item.kind for item in self.beyond(tolerance))
        sides = {"A": len(self.only_a), "B": len(self.only_b)}
        parts = [f"{counted(count, 'tensor')} only in {side}" for side, count in sides.items() if count]
        tensors = counted(self.equal + len(self.differences), "tensor")
        if len(kinds) == 1 and not parts:
            return f"Only {''.join(kinds)} differ: {kinds.total()} of {tensors}."
        if kinds:
            of_kinds = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common())
            parts.insert(0, f"{kinds.total()} of {tensors} differ: {of_kinds}")
        if parts:
            return f"{'; '.join(parts)}."
        if not self.differences:
            return f"The same bits: {tensors}."
        return f"The same within {tolerance:g}: {tensors}, of which {len(self.differences)} not the same bits."


def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Comparison:
    """Compare the tensors `a` and `b`, matched by name."""
    shared = [name for name in a if name in b]
    different = [name for name in shared if not _same_bits(a[name], b[name])]
    differences = [_difference(name, a[name], b[name], _kind_of(name, a[name], a.keys())) for name in different]
    return Comparison(
        only_a=tuple(name for name in a if name not in b),
        only_b=tuple(name for name in b if name not in a),
        differences=tuple(sorted(differences, key=lambda item: (-item.relative, item.name))),
        equal=len(shared) - len(different),
    )


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest |a - b| of two tensors of one shape; infinite if a non-finite value differs."""
    return _difference("", a, b, "").absolute


def _kind_of(name: str, tensor: Tensor, names: Collection[str]) -> str:
    """Return the tensor's kind, in the plural. Unless name and dimensions identify a kind: "parameters"."""
    group, _, path = name.partition("/")
    layer, _, leaf = path.rpartition(".")
    if group == "optimizer":
        return "optimizer tensors"
    if leaf in ("running_mean", "running_var", "num_batches_tracked"):
        kind = "BatchNorm statistics"
    elif f"{group}/{layer}.running_mean" in names:
        kind = "BatchNorm weights and biases"
    elif tensor.dim() == 1:
        kind = "biases and other vectors"
    else:
        kind = _WEIGHTS.get(tensor.dim(), "parameters") if leaf.endswith("weight") else "parameters"
    return kind if group == "model" else f"{group}'s {kind}"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    flat = plain(tensor).contiguous().view(-1)
    return flat.view(INTEGERS[flat.element_size()])  # as integers, a NaN equals itself


def plain(tensor: Tensor) -> Tensor:
    """Return the detached tensor; a complex one as pairs of reals."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _difference(name: str, a: Tensor, b: Tensor, kind: str) -> Difference:
    if a.shape != b.shape:
        shapes = f"{tuple(a.shape)} in A, {tuple(b.shape)} in B"
        return Difference(name, kind, a.numel(), a.numel(), shapes=shapes)
    dtypes = "" if a.dtype == b.dtype else f"{a.dtype} in A, {b.dtype} in B".replace("torch.", "")
    has_ulps = not dtypes and a.dtype.is_floating_point
    absolute, largest, differing, ulps = 0.0, 0.0, 0, 0
    parts = (torch.split(plain(side).flatten(), _PART) for side in (a, b))
    for x, y in zip(*parts, strict=True) if a.numel() else ():
        gap, size, count = _gap(x.double(), y.double())
        ulps = max(ulps, _ulps(x, y, are_finite=math.isfinite(gap))) if has_ulps else 0
        absolute, largest = max(absolute, gap), max(largest, size)
        # Integers are compared as integers: float64 would round large ones. Their distance is rounded.
        is_integer = not (dtypes or x.is_floating_point())
        differing += int((x.long() != y.long()).sum()) if is_integer else count
    relative = absolute / largest if largest else (math.inf if absolute else 0.0)
    return Difference(name, kind, a.numel(), differing, absolute, relative, ulps if has_ulps else None, dtypes)


def _gap(x: Tensor, y: Tensor) -> tuple[float, float, int]:
    """Return the largest |x - y|, the largest finite |value|, and the number of differing elements.

    x and y are float64 (n,).
    """
    gaps = (x - y).abs_()
    largest = float(gaps.max())
    if math.isfinite(largest):  # then every value is finite
        size = max(float(side.abs().max()) for side in (x, y))
        return largest, size, int(gaps.count_nonzero())
    # inf - inf and nan - nan are NaN: equal values have no gap.
    same = (x == y) | (x.isnan() & y.isnan())
    gaps.masked_fill_(same, 0).nan_to_num_(nan=math.inf, posinf=math.inf)
    size = max(float(side.nan_to_num(0, 0, 0).abs().max()) for side in (x, y))
    return float(gaps.max()), size, int((~same).sum())


def _ulps(x: Tensor, y: Tensor, *, are_finite: bool) -> int:
    """Return the largest distance in floating-point steps from x (n,) to y."""
    first, second = _position(x), _position(y)
    steps = (first - second).abs_()
    if x.element_size() == 8:  # the distance between opposite signs may overflow int64
        steps.masked_fill_(((first ^ second) < 0) & (first.abs() > _MOST - second.abs()), _MOST)
    return int((steps if are_finite else steps.masked_fill_(x.isnan() & y.isnan(), 0)).max())


def _position(values: Tensor) -> Tensor:
    """Return each value's position among its dtype's values: its bits as an integer, negative ones mirrored."""
    bits = values.contiguous().view(INTEGERS[values.element_size()])
    return torch.where(bits < 0, torch.iinfo(bits.dtype).min - bits, bits).long()

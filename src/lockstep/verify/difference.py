"""How two sets of named tensors differ: what one of them lacks, and of the others how much, by kind of layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import counted

STATISTICS = "BatchNorm statistics"
_STATISTICS_NAMES = ("running_mean", "running_var", "num_batches_tracked")
_PART = 1 << 14
"""Elements that are compared at once: what the passes over them make stays in the processor's caches."""
_WHOLE = frozenset((torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint64))
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same bits on both sides."""

    name: str
    kind: str
    """Of what layer it is a part: BatchNorm statistics, convolution weights, …"""
    elements: int
    differing: int
    """Elements whose values differ; 0 where only the signs of zeros or the bits of NaNs do."""
    absolute: float
    """Largest |a - b|, within the tensor's own rounding; infinite where one side is not a finite number and the other
    has another value."""
    relative: float
    """`absolute` by the largest finite |value| of the tensor on either side."""
    ulps: int | None
    """Largest number of floating-point numbers between a and b, plus one; None for whole numbers and across dtypes."""
    dtypes: str = ""
    """Both, where they differ; the values are then compared in float64."""
    shapes: str = ""
    """Both, where they differ; nothing is then compared."""


@dataclass(frozen=True)
class Comparison:
    """Two sets of tensors, A and B, compared by name."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    differences: tuple[Difference, ...]
    """Of tensors that both have: largest relative difference first."""
    equal: int
    """Tensors that are the same bits on both sides."""

    def beyond(self, tolerance: float) -> tuple[Difference, ...]:
        """Return the differences whose relative size exceeds `tolerance`; with 0, also those in bits alone."""
        return tuple(each for each in self.differences if tolerance == 0 or not each.relative <= tolerance)

    def verdict(self, tolerance: float) -> str:
        """Return in a sentence whether the two are the same, and if not, what kind of tensors differ."""
        beyond, lacking = self.beyond(tolerance), len(self.only_a) + len(self.only_b)
        tensors = counted(self.equal + len(self.differences), "tensor")
        if not beyond and not lacking:
            if not self.differences:
                return f"The same bits: {tensors}."
            are = "is" if len(self.differences) == 1 else "are"
            return (
                f"The same within {tolerance:g}: {tensors}, of which {len(self.differences)} {are} not the same bits."
            )
        kinds = Counter(each.kind for each in beyond)
        said = []
        if len(kinds) == 1 and not lacking:
            (kind,) = kinds
            said.append(f"Only {kind} differ: {len(beyond)} of {tensors}")
        elif beyond:
            parts = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common())
            said.append(f"{len(beyond)} of {tensors} differ: {parts}")
        only = [(len(self.only_a), "only in A"), (len(self.only_b), "only in B")]
        said += [f"{counted(number, 'tensor')} {where}" for number, where in only if number]
        return f"{'; '.join(said)}."


def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Comparison:
    """Return how the tensors `a` and `b`, on the CPU, differ, matched by name."""
    shared = [name for name in a if name in b]
    different = [name for name in shared if not _same_bits(a[name], b[name])]
    found = [_difference(name, a[name], b[name], kind_of(name, a[name], a.keys())) for name in different]
    return Comparison(
        only_a=tuple(name for name in a if name not in b),
        only_b=tuple(name for name in b if name not in a),
        differences=tuple(sorted(found, key=lambda each: (-_rank(each.relative), each.name))),
        equal=len(shared) - len(different),
    )


def kind_of(name: str, tensor: Tensor, names: Collection[str]) -> str:
    """Return what `tensor` is, in the plural, by its group, its shape and the tensors beside it in `names`."""
    group, _, path = name.partition("/")
    layer, _, leaf = path.rpartition(".")
    if group == "optimizer":
        return "optimizer tensors"
    if leaf in _STATISTICS_NAMES:
        what = STATISTICS
    elif f"{group}/{layer}.running_mean" in names:
        what = "BatchNorm weights and biases"
    elif leaf != "bias" and tensor.dim() > 2:
        what = "convolution weights"
    elif leaf != "bias" and tensor.dim() == 2:
        what = "linear and embedding weights"
    else:
        what = "biases and other vectors"
    return what if group == "model" else f"{group}'s {what}"


def _rank(relative: float) -> float:
    return math.inf if math.isnan(relative) else relative


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements in order as whole numbers, which are compared as such: a NaN is then equal to itself."""
    flat = _flat(tensor)
    return flat.view(INTEGERS[flat.element_size()])


def _flat(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1)


def _difference(name: str, a: Tensor, b: Tensor, kind: str) -> Difference:
    if a.shape != b.shape:
        shapes = f"{tuple(a.shape)} in A, {tuple(b.shape)} in B"
        return Difference(name, kind, a.numel(), a.numel(), math.inf, math.inf, None, shapes=shapes)
    dtypes = "" if a.dtype == b.dtype else f"{_short(a.dtype)} in A, {_short(b.dtype)} in B"
    same_type = not dtypes and a.dtype.is_floating_point
    absolute, largest, differing, ulps = 0.0, 0.0, 0, 0
    parts = zip(torch.split(_flat(a), _PART), torch.split(_flat(b), _PART), strict=True) if a.numel() else ()
    for x, y in parts:
        if not dtypes and a.dtype in _WHOLE:
            gap, size, count = _whole_gap(x, y)
        elif same_type and x.element_size() > 1:  # torch does not subtract floats of 8 bits
            gap, size, count = _gap(x, y)
        else:
            gap, size, count = _gap(x.double(), y.double())
        absolute, largest, differing = max(absolute, gap), max(largest, size), differing + count
        if same_type:
            ulps = max(ulps, _ulps(x, y))
    relative = absolute / largest if largest else (math.inf if absolute else 0.0)
    return Difference(name, kind, a.numel(), differing, absolute, relative, ulps if same_type else None, dtypes)


def _gap(x: Tensor, y: Tensor) -> tuple[float, float, int]:
    """Return the largest |x - y| and the largest finite |value| of two parts (n,), and how many elements differ."""
    gaps = (x - y).abs_()
    at = int(gaps.argmax())
    if gaps[at].isfinite():
        size = max(abs(float(edge)) for each in (x, y) for edge in torch.aminmax(each))
        return abs(float(x[at]) - float(y[at])), size, int(torch.count_nonzero(gaps))
    x, y = x.double(), y.double()
    # Two infinities of one sign are equal, and so are two NaNs; their difference would be none.
    same = (x == y) | (x.isnan() & y.isnan())
    gaps = (x - y).abs().masked_fill_(same, 0).nan_to_num_(nan=math.inf, posinf=math.inf)
    size = max(float(each.nan_to_num(0, 0, 0).abs().max()) for each in (x, y))
    return float(gaps.max()), size, len(same) - int(same.sum())


def _whole_gap(x: Tensor, y: Tensor) -> tuple[float, float, int]:
    """Return what `_gap` does of whole numbers (n,), of which float64 holds those up to 2**53 only."""
    a, b = (each.numpy() if each.dtype == torch.uint64 else each.long().numpy() for each in (x, y))
    # Of far numbers with opposite signs the difference takes all 64 bits: read without a sign it is right.
    gaps = np.where(a > b, a - b, b - a).view(np.uint64)
    size = max(abs(int(edge)) for each in (a, b) for edge in (each.min(), each.max()))
    return float(gaps.max()), float(size), int(np.count_nonzero(gaps))


def _ulps(x: Tensor, y: Tensor) -> int:
    """Return how many steps from one floating-point number to the next lead from x (n,) to y at most.

    Two NaNs are no step apart, whatever their bits. Read as a whole number, a float's bits order the positive numbers;
    the negative ones, mirrored, continue them.
    """
    first, second = _place(x), _place(y)
    if bool((first ^ second).min() >= 0):
        steps = (first - second).abs_()
    else:  # of opposite signs: farther apart than the type of the bits may count
        a, b = first.long(), second.long()
        steps = torch.where((a < 0) == (b < 0), (a - b).abs(), a.abs() + b.abs())
        steps.masked_fill_(steps < 0, torch.iinfo(torch.int64).max)
    most = int(steps.max())
    if most > torch.iinfo(first.dtype).max // 2 and bool((x.isnan() | y.isnan()).any()):
        most = int(steps.masked_fill_(x.isnan() & y.isnan(), 0).max())
    return most


def _place(values: Tensor) -> Tensor:
    bits = values.contiguous().view(INTEGERS[values.element_size()])
    return torch.where(bits < 0, torch.iinfo(bits.dtype).min - bits, bits)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

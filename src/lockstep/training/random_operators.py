"""Calls of torch's random operators, made for the global micro-batch.

A call is made with tensors and sizes for all samples; each rank keeps its rows of the results. The operator's schema
says how: for draws that are functional, in place, `_like`, into `out=`, or from a generator.
"""

from __future__ import annotations

import inspect
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from ..monitor import failures
from ..world.world import World
from .layout import Layout, Share

_aten = torch.ops.aten
_VALUES_CONSUME = {"aten::poisson", "aten::_standard_gamma", "aten::binomial", "aten::_sample_dirichlet"}
"""Operators whose use of the generator depends on the values of their arguments: they need all ranks' values."""

_PACKAGE = str(Path(__file__).parents[1])
_RATES = {"dropout_p", "dropout"}


class _Signature(NamedTuple):
    operator: str  # without the overload
    names: list[str]
    written: list[str]
    outputs: set[str]  # tensors that are only written, and resized
    reads_self: bool  # else uses its shape only


class Draw:
    """One call of a random operator."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self._signature = func, _signature(func)
        self.arguments: dict[str, Any] = dict(zip(self._signature.names, args, strict=False)) | kwargs
        self._inputs = {
            name: value
            for name, value in self.arguments.items()
            if isinstance(value, Tensor) and value.dim() and name not in self._signature.outputs
        }
        self._size = "size" if "size" in self.arguments else ""
        """The argument that determines the shape; "" if the tensors do."""
        if self._signature.operator == "aten::multinomial" and self.arguments["self"].dim() == 1:
            self._size = "num_samples"  # of one distribution
        self.is_sized = self._size != ""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        size = self.arguments.get(self._size)
        if size is None:
            shapes = [tensor.shape for tensor in self._inputs.values()]
            size = shapes[0] if len(shapes) == 1 else torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        return (size,) if isinstance(size, int) else tuple(size)

    @property
    def place(self) -> str:
        """The user's line and the operator: `train.py:12 (aten.randn.default)`."""
        return place_of(self.func)

    @property
    def is_fused(self) -> bool:
        """Whether the operator draws as part of a computation, such as attention."""
        return not _RATES.isdisjoint(self._signature.names)

    @property
    def is_random(self) -> bool:
        """Whether the call draws; a fused operator without dropout does not."""
        drops = not self.is_fused or any(self.arguments.get(name) for name in _RATES)
        return drops and self.arguments.get("train") is not False

    def run(self, layout: Layout | None, share: Share, world: World) -> Any:
        """Draw for the global micro-batch; return the share's rows. Without `layout`, all ranks draw the same."""
        if self.func is _aten.native_dropout.default:
            return self._dropout(layout, share, world)
        if layout is None and all(tensor.is_contiguous() for tensor in self._inputs.values()):
            return self.func(**self.arguments)
        full = self.arguments | {name: self._full(name, layout, share, world) for name in self._inputs}
        for name in self._signature.outputs:
            full[name] = self.arguments[name].new_empty(0)
        if self._size and layout is not None:
            shape = layout.full_shape(self.shape, share)
            full[self._size] = shape if self._size == "size" else shape[0]
        result = self.func(**full)

        originals = {}
        for name in self._signature.written:
            rows, original = _take(full[name], layout, share), self.arguments[name]
            original = original.resize_(rows.shape) if name in self._signature.outputs else original
            originals[id(full[name])] = original.copy_(rows)
        results = [result] if isinstance(result, Tensor) else result
        local = [
            originals[id(output)] if id(output) in originals else _take(output, layout, share) for output in results
        ]
        return local[0] if isinstance(result, Tensor) else tuple(local)

    def _full(self, name: str, layout: Layout | None, share: Share, world: World) -> Tensor:
        """Return a tensor argument for the global micro-batch, contiguous."""
        tensor, is_read = self._inputs[name], name != "self" or self._signature.reads_self
        if layout is not None:
            layout = layout._replace(dimension=layout.dimension + tensor.dim() - len(self.shape))  # as in broadcasting
            if self.is_sized or layout.dimension < 0 or tensor.shape[layout.dimension] != self._rows(layout, tensor):
                layout = None
        if layout is None:
            return tensor.contiguous() if is_read else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if self._signature.operator in _VALUES_CONSUME:
            return layout.gather(tensor, share, world)
        full = tensor.new_empty(layout.full_shape(tuple(tensor.shape), share))
        return layout.put(tensor, full.fill_(1), share) if is_read else full  # 1: a probability, a mean, a deviation

    def _rows(self, layout: Layout, tensor: Tensor) -> int:
        return self.shape[layout.dimension + len(self.shape) - tensor.dim()]

    def _dropout(self, layout: Layout | None, share: Share, world: World) -> tuple[Tensor, Tensor]:
        """Draw only the mask of `native_dropout`, as bytes."""
        values, rate = self.arguments["input"], self.arguments["p"]
        mask = torch.empty_like(values, dtype=torch.bool, memory_format=torch.contiguous_format)
        mask = Draw(_aten.bernoulli_.float, (mask, 1 - rate), {}).run(layout, share, world)
        return values * mask * (0.0 if rate == 1 else 1 / (1 - rate)), mask


def user_line() -> tuple[str, int]:
    """Return file and line of the user's innermost frame, or ("", 0)."""
    frame = inspect.currentframe()
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def place_of(name: Any) -> str:
    """Return the user's line and `what` is called there: `train.py:12 (aten.randn.default)`."""
    file, line = user_line()
    return f"{file}:{line} ({name})" if file else f"The model ({name})"


@cache
def _is_ours(file: str) -> bool:
    return file.startswith((_PACKAGE, "<")) or failures.is_library(file)


@cache
def _signature(func: Any) -> _Signature:
    arguments = _torch.arguments(func)
    written = [argument for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    operator = func.name().partition(".")[0]
    return _Signature(
        operator,
        [argument.name for argument in arguments],
        [argument.name for argument in written],
        {argument.name for argument in written if argument.kwarg_only},
        reads_self=not operator.endswith(("_", "_like")) or "rrelu" in operator,
    )


def _take(output: Tensor, layout: Layout | None, share: Share) -> Tensor:
    return output if layout is None else layout.take(output, share)

"""Seeing whether the host reads a tensor's value, which on a GPU it would have to wait for."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_BY_INDEX = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)
# On a CPU tensor these read its memory, or return it, without an operator that could be seen.
_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}


class NoReading:
    """A context that refuses to bring a tensor's value to the host, for which a GPU would have to finish first.

    It is refused too where the tensor lies on the CPU already and nobody would wait, so that tests without a GPU see
    it: `item` and what rests on it, `tolist`, `numpy`, `cpu`, and operators whose shapes depend on values, such as
    `nonzero` and `x[mask]`.
    """

    def __enter__(self) -> NoReading:
        self._modes = _Methods(), _Operators()
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _METHODS, "the host reads a value"
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not _reads(func, args, kwargs or {}), "the host reads a value"
        return func(*args, **(kwargs or {}))


def _reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the host has to know values before the operator returns."""
    if func in _BY_INDEX:  # by a mask, it is first looked up where that is true
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if func is _ATEN._to_copy.default:
        return _waits(args[0].device, kwargs.get("device"), kwargs.get("non_blocking", False))
    if func is _ATEN.copy_.default:
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return _waits(args[1].device, args[0].device, not waits)
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _waits(source: torch.device, target: torch.device | None, non_blocking: bool) -> bool:
    return source.type != "cpu" and target is not None and target.type == "cpu" and not non_blocking

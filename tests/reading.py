"""Seeing whether the host reads a tensor's value, which on a GPU it would have to wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoReading(TorchDispatchMode):
    """Refuses to bring a tensor's value to the host, for which a GPU would have to finish first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        return func(*args, **(kwargs or {}))

"""CUDA graphs of a model's passes (`--cuda-graphs`): one launch in place of one for each kernel.

torch records the forward and the backward pass of each size of a full micro-batch. Others, such as those of an epoch's
last batch, run eagerly, as do the loss, the exchange of gradients and the optimizers. A graph repeats the kernels of
its recording: a model whose kernels depend on values, or on its Python state, would silently compute something else.
One pass before the recording looks for these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch, cuda
from ..errors import RequestError
from ..monitor.failures import one_line
from .draw_watch import other_states
from .random_operators import place_of

_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX = torch.ops.aten.index.Tensor


class Graphs(nn.Module):
    """A model, called by a graph where there is one for the batch."""

    def __init__(self, model: nn.Module, half: torch.dtype | None, device: torch.device) -> None:
        """`half` is the dtype of products under autocast."""
        super().__init__()
        self._model, self._half, self._device = model, half, device
        self._graphs: dict[tuple[Any, ...], Callable[[Tensor], Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's outputs. Those of a graph, and their gradients, are valid until its next call."""
        # A mode that watches operations would see none of a graph's.
        is_eager = not (self._model.training and torch.is_grad_enabled()) or _torch.is_watched()
        graph = None if is_eager else self._graphs.get(_layout(x))
        outputs: Tensor = self._model(x) if graph is None else graph(x)
        return outputs

    def record(self, x: Tensor) -> None:
        """Record the passes over batches like `x` (n, …) (*collective*).

        Changes buffers and the device's generator. Raises `RequestError` for a model that a graph cannot repeat.
        """
        forward = _Forward(self._model, self._device.type, self._half)
        _check(forward, x)
        try:
            self._graphs[_layout(x)] = cuda.graphed(forward, x)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RequestError(f"--cuda-graphs: torch cannot record the model's passes: {one_line(error)}") from error


class _Forward(nn.Module):
    """The model's forward pass under autocast, as a module without hooks, as torch requires."""

    def __init__(self, model: nn.Module, device_type: str, half: torch.dtype | None) -> None:
        super().__init__()
        self.model, self._device_type, self._half = model, device_type, half

    def forward(self, x: Tensor) -> Tensor:
        # torch refuses cached casts, which would be those of the recording.
        with torch.autocast(self._device_type, self._half, enabled=self._half is not None, cache_enabled=False):
            outputs: Tensor = self.model(x)
        return outputs


class _Watch(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first operation for which the host waits, or whose shape depends on values."""

    place = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = not _WAITS.isdisjoint(func.tags)
        if waits and func is _INDEX:  # by a mask
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if waits and not self.place:
            self.place = place_of(func)
        return func(*args, **(kwargs or {}))


def _check(forward: nn.Module, x: Tensor) -> None:
    """Raise `RequestError` if a graph cannot repeat a pass over `x`."""
    buffers = [*forward.buffers()]  # alive, so that no new one has the identity of an old one
    state, watch = _host_state(forward, x.device), _Watch()  # type: ignore[no-untyped-call]
    with watch:
        outputs = forward(x)
        parameters = [parameter for parameter in forward.parameters() if parameter.requires_grad]
        torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
    if watch.place:
        raise RequestError(
            f"--cuda-graphs: the model waits for the host, or has shapes that depend on values, in {watch.place}: a "
            "graph cannot repeat that; leave --cuda-graphs out, or compute it by tensors of fixed shapes."
        )
    if _host_state(forward, x.device) != state:
        raise RequestError(
            "--cuda-graphs: the model's forward draws on the host, changes numbers of its modules or replaces their "
            "buffers, and a graph would repeat the first ones; leave --cuda-graphs out, or keep these in tensors of "
            "the device and change them in place."
        )
    del buffers


def _host_state(model: nn.Module, device: torch.device) -> tuple[Any, ...]:
    """Return what a forward pass may read and change outside of the device's memory: generators, numbers, buffers."""
    generator = torch.get_rng_state().numpy().tobytes() if device.type != "cpu" else b""
    numbers = [
        {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        for module in model.modules()
    ]
    return *other_states(), generator, numbers, [(name, id(buffer)) for name, buffer in model.named_buffers()]


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype

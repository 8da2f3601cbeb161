"""`torch.cuda.make_graphed_callables` on a CPU: a tape of operations, repeated on the same memory.

A replay calls each recorded operation with the tensors of the recording, and writes its results there: Python does not
run again, inputs, outputs and gradients stay in place, and generators go on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

replays: list[int] = []
"""The number of operations of each replay of a forward pass."""


class _Tape(TorchDispatchMode):
    """A graph of the operations within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        results = func(*args, **(kwargs or {}))
        kept = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        self.calls.append((func, args, kwargs or {}, kept))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, kept in self.calls:
            leaves = tree_leaves(func(*args, **kwargs))
            for work in leaves:
                if hasattr(work, "wait"):  # a collective
                    work.wait()
            results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            for result, place in zip(results, kept, strict=True):
                if result.data_ptr() != place.data_ptr():  # else a view, or in place
                    place.copy_(result)


def make_graphed_callables(
    module: nn.Module, sample_args: tuple[Tensor, ...], num_warmup_iters: int = 3, allow_unused_input: bool = False
) -> nn.Module:
    (static_x,) = sample_args
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for _ in range(num_warmup_iters):
        outputs = module(static_x)
        torch.autograd.grad(outputs, parameters, torch.empty_like(outputs), allow_unused=allow_unused_input)
    forward, backward = _Tape(), _Tape()
    with forward:
        static_outputs = module(static_x)
    static_dy = torch.empty_like(static_outputs)
    with backward:
        static_gradients = torch.autograd.grad(static_outputs, parameters, static_dy, allow_unused=allow_unused_input)

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *_: Tensor) -> Tensor:
            static_x.copy_(x)
            forward.replay()
            replays.append(len(forward.calls))
            outputs: Tensor = static_outputs.detach()
            return outputs

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            static_dy.copy_(dy)
            backward.replay()
            return None, *(gradient if gradient is None else gradient.detach() for gradient in static_gradients)

    original = module.forward

    def call(x: Tensor) -> Tensor:
        assert static_x.is_same_size(x), "torch would copy another size into the graph's, or broadcast it"
        outputs: Tensor = Graphed.apply(x, *parameters) if module.training else original(x)
        return outputs

    module.forward = call
    return module

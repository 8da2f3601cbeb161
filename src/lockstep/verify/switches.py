"""Switch off the causes of gradient differences during a measurement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .. import _torch
from .._torch import BatchNorm, TorchDispatchMode
from ..training.losses import LossFunction
from ..world.random_state import preserve_generators, seed_all
from .model_state import ModelState

Off = frozenset[str]
"""Causes that are switched off on both sides of a measurement."""
NOTHING: Off = frozenset()
EVERYTHING: Off = frozenset(
    (
        "data",  # each rank's own reading of the data: all use rank 0's
        "randomness",  # random draws of the model, such as dropout: constants replace them
        "statistics",  # BatchNorm's batch statistics: the running ones are used
        "exchange",  # what an exchange does to gradients: they are summed as they are
        "loss",  # coupling of samples in the loss: it is called for one at a time, and summed
    )
)


@contextmanager
def switched_off(model: nn.Module, off: Off, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Switch off the model's part of `off` within the block.

    Its state, and the generators of the host and of `devices`, are restored at the end.
    """
    state = ModelState(model)
    norms = [norm for norm in model.modules() if isinstance(norm, BatchNorm) and norm.training and "statistics" in off]
    with ExitStack() as stack, preserve_generators(devices):
        if "randomness" in off:
            # A mode belongs to one thread, and replicas may compute in other threads: use hooks on the forward pass.
            for hook in _without_randomness(model):
                stack.enter_context(hook)
            # The loss may draw as well, and so may recomputation in the backward pass (activation checkpointing).
            stack.enter_context(Constants())  # type: ignore[no-untyped-call]
        for layer in norms:
            layer.training = False
            stack.callback(setattr, layer, "training", True)
        yield
    state.restore()


def _without_randomness(model: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Replace the forward pass's random draws by constants, in any thread."""
    here = threading.local()

    def enter(module: nn.Module, inputs: Any) -> None:
        seed_all(0)  # draws from Python's and NumPy's generators are the same in each pass
        here.mode = Constants().__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        here.mode.__exit__(None, None, None)

    return model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces results of random operators by constants; torch tags those `nondeterministic_seeded`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        arguments = _torch.arguments(func)
        call = dict(zip((argument.name for argument in arguments), args, strict=False)) | (kwargs or {})
        if func is torch.ops.aten.native_dropout.default:
            kept_share = 1 - call["p"] if call["train"] else 1.0
            return call["input"] / kept_share, torch.ones_like(call["input"], dtype=torch.bool)
        # Attention and recurrent layers draw within one operator, and take the rate as an argument.
        rates = {name: 0.0 for name in ("dropout_p", "dropout") if isinstance(call.get(name), float)}
        result = func(**(call | rates))
        if not rates:
            # Also other outputs of the operator, such as the noise that its backward pass will use.
            written = [call.get(item.name) for item in arguments if item.alias_info and item.alias_info.is_write]
            for output in (*(result if isinstance(result, tuple | list) else [result]), *written):
                if isinstance(output, Tensor):
                    _fill(func.name(), output)
        return result


def _fill(drawn_by: str, tensor: Tensor) -> None:
    """Overwrite random draws with constants. A permutation stays a permutation."""
    if "randperm" in drawn_by:
        tensor.copy_(torch.arange(len(tensor)))
    elif "bernoulli" in drawn_by or tensor.dtype == torch.bool:
        tensor.fill_(1)
    else:
        tensor.fill_(0.5 if tensor.is_floating_point() else 0)


def sum_by_sample(loss_fn: LossFunction) -> LossFunction:
    """Return a loss that calls `loss_fn` per sample and sums the results."""

    def summed(scores: Tensor, labels: Tensor, *, reduction: str = "sum") -> Tensor:
        parts = [loss_fn(scores[row : row + 1], labels[row : row + 1], reduction="sum") for row in range(len(labels))]
        return sum(parts, scores.new_zeros(()))

    return summed


def find_unsteady_layer(model: nn.Module, x: Tensor, rows: slice, tolerance: float) -> str:
    """Return the first layer whose output for `rows` depends on the batch x (n, …); "" for no layer.

    With all rows, return the first layer that draws from a generator other than torch's. Batch statistics and torch's
    randomness must be switched off. The model's state is restored.
    """
    state = ModelState(model)
    seed_all(0)
    batch_layers = _record_layers(model, x)
    state.restore()
    seed_all(1)

    def differs(expected: Tensor, actual: Tensor) -> bool:
        expected = expected[rows] if expected.dim() else expected
        if not actual.dim() or expected.shape != actual.shape or len(actual) != len(x[rows]) or not expected.numel():
            return False  # the rows are not samples
        expected, actual = expected.double(), actual.double()
        return float((expected - actual).abs().max()) > tolerance * float(expected.abs().max())

    share_layers = _record_layers(model, x[rows])
    state.restore()
    for name, (layer_input, layer_output) in share_layers.items():
        if name not in batch_layers or differs(batch_layers[name][0], layer_input):
            return f"the model's own forward, before {name}"
        if differs(batch_layers[name][1], layer_output):
            return name
    return ""


@torch.no_grad()
def find_sample_state(model: nn.Module, x: Tensor, rows: slice) -> list[str]:
    """Return the state that depends on the samples x (n, …) and that the output depends on.

    The model's state is restored.
    """
    state = ModelState(model)
    alone, after_part = model(x[rows]), ModelState(model)
    state.restore()
    model(x)
    after_whole = ModelState(model)
    is_used = not torch.equal(model(x[rows]), alone)
    state.restore()
    return after_whole.differing(after_part) if is_used else []


@torch.no_grad()
def _record_layers(model: nn.Module, x: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return the input and output of the innermost layers in call order; the model is last."""
    layers: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first_input = inputs[0] if inputs else None
            if isinstance(output, Tensor) and output.is_floating_point() and isinstance(first_input, Tensor):
                layers.setdefault(name, (first_input.detach().clone(), output.detach().clone()))

        return hook

    innermost = [(name, module) for name, module in model.named_modules() if name and not any(module.children())]
    with ExitStack() as hooks:
        for name, module in (*innermost, ("the model's own forward", model)):
            hooks.enter_context(module.register_forward_hook(record(name)))
        model(x)
    return layers

"""Switch off, for a measurement, what makes ranks' gradients differ."""

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
"""What is switched off on both sides of a measurement."""
NOTHING: Off = frozenset()
EVERYTHING: Off = frozenset(
    (
        "data",  # each rank's own reading of the data: all use rank 0's
        "randomness",  # random draws of the model, such as dropout: constants replace them
        "statistics",  # BatchNorm's batch statistics: the running ones are used
        "loss",  # coupling of samples in the loss: it is called for one at a time, and summed
    )
)


@contextmanager
def switched(model: nn.Module, off: Off, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Switch off the model's part of `off` within the block.

    Its state, and the generators of the host and of `devices`, are restored at the end.
    """
    state = ModelState(model)
    norms = [each for each in model.modules() if isinstance(each, BatchNorm) and each.training and "statistics" in off]
    with ExitStack() as stack, preserve_generators(devices):
        if "randomness" in off:
            # A mode belongs to a thread, and replicas may compute in threads of their own: hooks on the forward pass.
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
        seed_all(0)  # for what is drawn from Python's and NumPy's generators: the same in each pass
        here.mode = Constants().__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        here.mode.__exit__(None, None, None)

    return model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces results of random operators by constants. torch tags those `nondeterministic_seeded`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        arguments = _torch.arguments(func)
        given = dict(zip((each.name for each in arguments), args, strict=False)) | (kwargs or {})
        if func is torch.ops.aten.native_dropout.default:
            kept_share = 1 - given["p"] if given["train"] else 1.0
            return given["input"] / kept_share, torch.ones_like(given["input"], dtype=torch.bool)
        # Attention and recurrent layers draw within one operator, and take the rate as an argument.
        rates = {name: 0.0 for name in ("dropout_p", "dropout") if isinstance(given.get(name), float)}
        found = func(**(given | rates))
        if not rates:
            # Also other outputs of the operator, such as the noise that its backward pass will use.
            written = [given.get(each.name) for each in arguments if each.alias_info and each.alias_info.is_write]
            for each in (*(found if isinstance(found, tuple | list) else [found]), *written):
                if isinstance(each, Tensor):
                    _fill(func.name(), each)
        return found


def _fill(drawn_by: str, tensor: Tensor) -> None:
    """Overwrite random draws with constants. A permutation stays a permutation."""
    if "randperm" in drawn_by:
        tensor.copy_(torch.arange(len(tensor)))
    elif "bernoulli" in drawn_by or tensor.dtype == torch.bool:
        tensor.fill_(1)
    else:
        tensor.fill_(0.5 if tensor.is_floating_point() else 0)


def by_sample(loss_fn: LossFunction) -> LossFunction:
    """Return `loss_fn` summed over single samples: one call per sample."""

    def summed(scores: Tensor, labels: Tensor, *, reduction: str = "sum") -> Tensor:
        parts = [loss_fn(scores[at : at + 1], labels[at : at + 1], reduction="sum") for at in range(len(labels))]
        return sum(parts, scores.new_zeros(()))

    return summed


def unsteady(model: nn.Module, x: Tensor, rows: slice, tolerance: float) -> str:
    """Return the first layer whose output for `rows` depends on the batch. x is (n, …); "" for no layer.

    With all rows: the first layer that draws from a generator other than torch's. Requires batch statistics and torch's
    randomness to be switched off. The model's state is restored.
    """
    state = ModelState(model)
    seed_all(0)
    whole = _passed(model, x)
    state.restore()
    seed_all(1)

    def differ(ours: Tensor, theirs: Tensor) -> bool:
        ours = ours[rows] if ours.dim() else ours
        if not theirs.dim() or ours.shape != theirs.shape or len(theirs) != len(x[rows]) or not ours.numel():
            return False  # not a sample a row
        ours, theirs = ours.double(), theirs.double()
        return float((ours - theirs).abs().max()) > tolerance * float(ours.abs().max())

    parts = _passed(model, x[rows])
    state.restore()
    for name, (given, made) in parts.items():
        if name not in whole or differ(whole[name][0], given):
            return f"the model's own forward, before {name}"
        if differ(whole[name][1], made):
            return name
    return ""


@torch.no_grad()
def state_of_samples(model: nn.Module, x: Tensor, rows: slice) -> list[str]:
    """Return the names of state that a forward pass changes by its samples x (n, …), and that its output depends on.

    The model's state is restored.
    """
    before = ModelState(model)
    alone, after_part = model(x[rows]), ModelState(model)
    before.restore()
    model(x)
    after_whole = ModelState(model)
    is_used = not torch.equal(model(x[rows]), alone)
    before.restore()
    return after_whole.differing(after_part) if is_used else []


@torch.no_grad()
def _passed(model: nn.Module, x: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return each innermost layer's input and output, in call order. The model itself is last."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            given = inputs[0] if inputs else None
            if isinstance(output, Tensor) and output.is_floating_point() and isinstance(given, Tensor):
                found.setdefault(name, (given.detach().clone(), output.detach().clone()))

        return hook

    innermost = [(name, each) for name, each in model.named_modules() if name and not any(each.children())]
    with ExitStack() as hooks:
        for name, each in (*innermost, ("the model's own forward", model)):
            hooks.enter_context(each.register_forward_hook(note(name)))
        model(x)
    return found

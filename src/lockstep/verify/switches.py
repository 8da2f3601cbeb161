"""What can make N ranks' gradient another one than one process's, and how each is switched off for a measurement."""

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
from ..world.random_state import kept, seed_all

Off = frozenset[str]
"""What is switched off on both sides of a measurement."""
NOTHING: Off = frozenset()
EVERYTHING: Off = frozenset(
    (
        "data",  # what each rank reads for itself: all take what rank 0 has read
        "randomness",  # what the model draws, such as dropout: a constant comes instead
        "statistics",  # BatchNorm's batch statistics: the running ones are used
        "loss",  # what the loss makes of several samples at once: it is called for one at a time, and summed
    )
)


@contextmanager
def switched(model: nn.Module, off: Off, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Switch off what of `off` the model itself has, within the block.

    Its buffers, and the generators of the host and of `devices`, are then as before.
    """
    buffers = {name: held.clone() for name, held in model.named_buffers()}
    norms = [each for each in model.modules() if isinstance(each, BatchNorm) and each.training and "statistics" in off]
    with ExitStack() as stack, kept(devices):
        if "randomness" in off:
            # A mode belongs to a thread, and replicas may compute in threads of their own: hooks on the forward pass.
            for hook in _without_randomness(model):
                stack.enter_context(hook)
            # The loss may draw as well, and what is computed again in the backward pass (activation checkpointing).
            stack.enter_context(Constants())  # type: ignore[no-untyped-call]
        for layer in norms:
            layer.training = False
            stack.callback(setattr, layer, "training", True)
        yield
    with torch.no_grad():
        for name, held in model.named_buffers():
            held.copy_(buffers[name])


def _without_randomness(model: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Have all that the model's forward pass draws be constants, in whichever thread the pass runs."""
    here = threading.local()

    def enter(module: nn.Module, inputs: Any) -> None:
        seed_all(0)  # for what is drawn from Python's and NumPy's generators: the same in each pass
        here.mode = Constants().__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        here.mode.__exit__(None, None, None)

    return model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives constants for what random operators draw, which torch marks as such (`nondeterministic_seeded`)."""

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
            # What the operator has written to as well, such as the noise that its backward pass will use.
            written = [given.get(each.name) for each in arguments if each.alias_info and each.alias_info.is_write]
            for each in (*(found if isinstance(found, tuple | list) else [found]), *written):
                if isinstance(each, Tensor):
                    _fill(func.name(), each)
        return found


def _fill(drawn_by: str, tensor: Tensor) -> None:
    """Overwrite what was drawn; what is no number of its own, such as a permutation, keeps its kind."""
    if "randperm" in drawn_by:
        tensor.copy_(torch.arange(len(tensor)))
    elif "bernoulli" in drawn_by or tensor.dtype == torch.bool:
        tensor.fill_(1)
    else:
        tensor.fill_(0.5 if tensor.is_floating_point() else 0)


def by_sample(loss_fn: LossFunction) -> LossFunction:
    """Return the loss that calls `loss_fn` for one sample at a time and sums: what a sum over samples has to be."""

    def summed(scores: Tensor, labels: Tensor, *, reduction: str = "sum") -> Tensor:
        parts = [loss_fn(scores[at : at + 1], labels[at : at + 1], reduction="sum") for at in range(len(labels))]
        return sum(parts, scores.sum() * 0)  # which a rank without samples has too

    return summed


def unsteady(model: nn.Module, x: Tensor, rows: slice, tolerance: float) -> str:
    """Return the first layer that makes something else of `rows` of x (n, …) than of x whole; "" where none does.

    With all rows, that is one that draws from another generator than torch's. To be used where batch statistics and
    torch's randomness are switched off.
    """
    seed_all(0)
    whole = _passed(model, x)
    seed_all(1)

    def differ(ours: Tensor, theirs: Tensor) -> bool:
        ours = ours[rows] if ours.dim() else ours
        if not theirs.dim() or ours.shape != theirs.shape or len(theirs) != len(x[rows]) or not ours.numel():
            return False  # not a sample a row
        ours, theirs = ours.double(), theirs.double()
        return float((ours - theirs).abs().max()) > tolerance * float(ours.abs().max())

    for name, (given, made) in _passed(model, x[rows]).items() if len(x[rows]) else ():
        if name not in whole or differ(whole[name][0], given):
            return f"the model's own forward, before {name}"
        if differ(whole[name][1], made):
            return name
    return ""


@torch.no_grad()
def _passed(model: nn.Module, x: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return what each innermost layer was given and made of it, in the order of the calls, and the model last."""
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

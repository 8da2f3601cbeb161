"""Recomputation of activations in the backward pass (Chen et al. 2016, arXiv 1604.06174), by torch's checkpoint.

A chosen module keeps its inputs alone; its forward runs again in the backward pass. Only `forward` is replaced, so that
modules keep their names in `state_dict`. The second run has the random numbers of the first (torch's, Python's and
NumPy's), and leaves BatchNorm's running statistics as they are. Synchronised BatchNorm exchanges its statistics again:
autograd runs the same graph on every rank, in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch
from .._torch import BatchNorm
from ..checkpoint.state import few
from ..errors import RequestError, unknown
from ..world.random_state import Generators
from . import sync_batchnorm
from .attach import Attached, attach
from .sync_batchnorm import SyncBatchNorm

OPTION = "--checkpoint-activations"


class Recomputation:
    """Recomputation of modules by class name, on `devices`; of several models, which share the patterns."""

    def __init__(self, patterns: Collection[str] = (), devices: Sequence[torch.device] = ()) -> None:
        self._patterns, self._devices = patterns, devices
        self._unmatched = set(patterns)
        self._classes: dict[str, None] = {}
        self.count = 0
        """Number of chosen modules."""

    def attach(self, model: nn.Module) -> list[Attached]:
        """Choose the modules of `model` whose class name matches a shell pattern; return what undoes it.

        BatchNorm layers are never chosen. Raises `RequestError` for a compiled model, whose forward is not called.
        """
        if not self._patterns:
            return []
        if any(_torch.is_compiled(module) or _torch.inner(module) is not module for module in model.modules()):
            raise RequestError(f"{OPTION} cannot work on a compiled model; leave torch.compile or --compile out.")
        attachments = []
        for module in model.modules():
            name = type(module).__name__
            if isinstance(module, BatchNorm):
                continue
            self._classes[name] = None
            if matches := {pattern for pattern in self._patterns if fnmatchcase(name, pattern)}:
                self._unmatched -= matches
                attachments.append(attach(module, "forward", _Recomputed(module, self._devices)))
        self.count += len(attachments)
        return attachments

    def check(self) -> None:
        """Raise `RequestError`, with similar names, for a pattern that matches no class of the models so far."""
        for pattern in sorted(self._unmatched):
            hint = f"Classes that it may match: {few([*self._classes], 8)}."
            raise unknown(f"{OPTION} pattern", pattern, self._classes, hint)


class _Recomputed:
    """Forward of one module that is computed again in the backward pass."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self._module, self._devices, self._is_checked = weakref.ref(module), devices, False

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module, devices = self._module(), self._devices
        if not torch.is_grad_enabled() or module is None:
            return forward(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint  # imports torch's compiler

        names, count, is_first = [*kwargs], len(args), True
        generators, stands_in = Generators.now(devices), SyncBatchNorm.stand_in
        buffers = {} if self._is_checked else {name: buffer.clone() for name, buffer in _buffers(module).items()}

        def run(*values: Any) -> Any:
            nonlocal is_first
            repeats, is_first = not is_first, False
            with _repetition(module, devices, generators, stands_in) if repeats else nullcontext():
                return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

        # Keyword arguments too by position: torch then raises if one has changed in place before the second run.
        values = (*args, *kwargs.values())
        output = checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False)  # `_repetition` has them all
        current, self._is_checked = _buffers(module) if buffers else {}, self._is_checked or module.training
        unchanged = (name for name in buffers.keys() & current.keys() if torch.equal(buffers[name], current[name]))
        if changed := sorted(buffers.keys() - set(unchanged)):
            raise RequestError(
                f"{OPTION} cannot work on {type(module).__name__}, whose forward changes its buffer {changed[0]}: its "
                "second run, in the backward pass, would change it again; choose modules without it."
            )
        return output


@contextmanager
def _repetition(
    module: nn.Module, devices: Sequence[torch.device], generators: Generators, stands_in: bool
) -> Iterator[None]:
    """Run the block in the state of the first run, and leave generators and running statistics as they are."""
    generators_now, stands_in_now = Generators.now(devices), SyncBatchNorm.stand_in
    norms = [part for part in module.modules() if isinstance(part, BatchNorm) and part.training]
    statistics = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]
    generators.put_back(devices)
    SyncBatchNorm.stand_in = stands_in
    for norm, name, buffer in statistics:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        generators_now.put_back(devices)
        SyncBatchNorm.stand_in = stands_in_now
        for norm, name, buffer in statistics:
            setattr(norm, name, buffer)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers other than BatchNorm's running statistics."""
    statistics = sync_batchnorm.statistics(module)
    return {name: buffer for name, buffer in module.named_buffers() if name not in statistics}

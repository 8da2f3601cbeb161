"""What the first step shows of a loop: state that no checkpoint holds, and numbers that depend on the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import sync_batchnorm
from ..steps.prepared import Prepared

_NUMBERS = (int, float)


class FirstStep:
    """The state of the models before the first step."""

    def __init__(self, prepared: Prepared, *, is_in_epochs: bool) -> None:
        self._prepared, self._is_in_epochs = prepared, is_in_epochs
        self._numbers = dict(_numbers(prepared.models))
        self._buffers = {name: buffer.clone() for name, buffer in _buffers(prepared)}

    def cautions(self) -> list[str]:
        """Return a sentence for each finding after the first step (*collective*)."""
        prepared, found = self._prepared, list[str]()
        world, source = prepared.world, prepared.source
        is_cut = source is not None and source.plan.accumulation > 1
        changed = [name for name, buffer in _buffers(prepared) if not self._is_same(name, buffer)]
        if world.size > 1:
            own = dict(_buffers(prepared))
            alike = {name: _text(own[name]) for name in changed}
            names = {name for theirs in world.gather(alike) for name, text in theirs.items() if alike.get(name) != text}
            changed = changed if is_cut else sorted(name for name in changed if name in names)
        if changed and (world.size > 1 or is_cut):
            what = "each rank's share of the batch" if world.size > 1 else "each micro-batch"
            found.append(
                f"the model's buffer {', '.join(changed[:3])} is computed from {what} in forward, so that the model "
                "depends on the number of ranks and micro-batches; sum over the ranks there (session.sum), or use a "
                "layer without statistics of the batch"
            )
        numbers = [name for name, value in _numbers(prepared.models) if self._numbers.get(name, value) != value]
        if numbers:
            found.append(
                f"the model changes its attribute {', '.join(numbers[:3])} in forward, which no checkpoint holds: a "
                "resumed run begins it anew; make it a buffer, or give get_extra_state and set_extra_state"
            )
        if not self._is_in_epochs and prepared.config.record.output is not None:
            found.append(
                "this run cannot be resumed, since its loop does not go over session.epochs(…): write `for epoch in "
                "session.epochs(n)`"
            )
        return found

    def _is_same(self, name: str, buffer: Tensor) -> bool:
        before = self._buffers.get(name)
        return before is not None and before.shape == buffer.shape and torch.equal(before, buffer)


def _buffers(prepared: Prepared) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers whose values synchronised BatchNorm does not keep alike."""
    for model in prepared.models.values():
        norms = sync_batchnorm.statistics(model)
        yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in norms)


def _numbers(models: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers among the attributes of modules without an extra state of their own."""
    for model in models.values():
        for name, module in model.named_modules():
            if type(module).get_extra_state is nn.Module.get_extra_state:
                for key, value in vars(module).items():
                    if type(value) in _NUMBERS and not key.startswith("_"):
                        yield (f"{name}.{key}" if name else key), value


def _text(buffer: Tensor) -> str:
    return str(buffer.double().sum().item() if not buffer.is_complex() else buffer.sum().item())

"""Findings of a loop's first step: unsaved state, and values that depend on the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ..checks.digest import digest
from ..data.share import SharedLoader, state_of
from ..nn import sync_batchnorm
from ..runs.prepared import Prepared
from ..runs.restored import fingerprint

_OF_ANY_MODULE = frozenset(vars(nn.Module()))


class FirstStep:
    """State of the models before the first step, to compare with that after it."""

    def __init__(self, prepared: Prepared, *, is_in_epochs: bool, is_resumed: bool) -> None:
        self._prepared, self._is_in_epochs, self._is_resumed = prepared, is_in_epochs, is_resumed
        self._unsaved = dict(_unsaved(prepared.models))
        self._counts = dict(self._dataset_numbers())
        self._buffers = {name: buffer.clone() for name, buffer in _buffers(prepared)}

    def cautions(self, scaler: GradScaler | None) -> list[str]:
        """Return a sentence per finding after the first step, which `scaler` made if any (*collective*)."""
        prepared, sentences = self._prepared, list[str]()
        world, source = prepared.world, prepared.source
        is_cut = source is not None and source.plan.accumulation > 1
        changed = [name for name, buffer in _buffers(prepared) if not self._is_same(name, buffer)]
        if world.size > 1:
            buffers = dict(_buffers(prepared))
            sums = {name: _sum_text(buffers[name]) for name in changed}
            by_rank = world.gather(sums)
            names = {name for rank_sums in by_rank for name, text in rank_sums.items() if sums.get(name) != text}
            changed = changed if is_cut else sorted(name for name in changed if name in names)
        if changed and (world.size > 1 or is_cut):
            part = "each rank's share of the batch" if world.size > 1 else "each micro-batch"
            sentences.append(
                f"the model's buffer {', '.join(changed[:3])} is computed from {part} in forward, so that the model "
                "depends on the number of ranks and micro-batches; sum over the ranks there (session.sum), or use a "
                "layer without statistics of the batch"
            )
        unsaved = dict(_unsaved(prepared.models))
        lost = [name for name, initial in self._unsaved.items() if unsaved.get(name, initial) != initial]
        if lost:
            sentences.append(
                f"the model changes {', '.join(lost[:3])} in forward, which no checkpoint holds: if a later step "
                "reads it, a resumed run differs; make it a persistent buffer, or give get_extra_state and "
                "set_extra_state"
            )
        counts = [name for name, value in self._dataset_numbers() if self._counts.get(name, value) != value]
        if counts:
            sentences.append(
                f"the data set changes its attribute {', '.join(counts[:3])} as it is read, which no checkpoint holds: "
                "a resumed run begins it anew, and other ranks count otherwise; compute a sample from its index alone"
            )
        saves = prepared.config.record.output is not None
        if (saves or is_cut) and self._has_unprepared_schedule():
            sentences.append(
                "the optimizer has a learning-rate schedule that session.prepare was not given: no checkpoint holds "
                "it, and it steps in each micro-batch; prepare it with its optimizer"
            )
        if saves and scaler is not None and scaler.is_enabled() and scaler not in prepared.stateful_objects:
            sentences.append(
                "the loop has a GradScaler that session.prepare was not given: no checkpoint holds its scale, and a "
                "resumed run begins with the initial one; prepare it with the optimizer"
            )
        if not self._is_in_epochs and saves:
            sentences.append(
                "this run cannot be resumed, since its loop does not go over session.epochs(…): write `for epoch in "
                "session.epochs(n)`"
            )
        return sentences

    def _has_unprepared_schedule(self) -> bool:
        prepared = self._prepared
        values = [
            value for part in prepared.stateful_objects for value in (part, *getattr(part, "__dict__", {}).values())
        ]
        groups = [group for optimizer in prepared.optimizers for group in optimizer.param_groups]
        # torch's schedules note the rate that they began with.
        return any("initial_lr" in group for group in groups) and not any(
            isinstance(value, LRScheduler) for value in values
        )

    def _dataset_numbers(self) -> Iterator[tuple[str, Any]]:
        """Yield the numeric attributes of the data set in this process; workers have copies."""
        source = self._prepared.source
        if isinstance(source, SharedLoader):
            dataset = source.loader.dataset
            sets_epoch = self._is_resumed or hasattr(dataset, "set_epoch")  # the loop does, from the epoch's number
            for name, value in state_of(dataset).items():
                if type(value) in (int, float) and not (sets_epoch and "epoch" in name):
                    yield name, value

    def _is_same(self, name: str, buffer: Tensor) -> bool:
        initial = self._buffers.get(name)
        return initial is not None and initial.shape == buffer.shape and torch.equal(initial, buffer)


class AverageWatch:
    """Watch, over the first steps, for a moving average that the loop updates in each micro-batch."""

    _STEPS = 3  # of the first one, an average that begins as a copy is as before

    def __init__(self, prepared: Prepared) -> None:
        optimized = {
            parameter
            for optimizer in prepared.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._models = {
            name: model
            for name, model in prepared.models.items()
            if not any(parameter in optimized for parameter in model.parameters())
        }
        self._digests: dict[str, int] = {}
        self._steps = self._STEPS if self._models and optimized else 0

    def look(self, micro: int) -> str:
        """Compare within a batch, before the backward pass of each micro-batch. Returns a sentence or ""."""
        if not self._steps:
            return ""
        digests = {name: int(digest(list(model.parameters()))) for name, model in self._models.items()}
        changed = [name for name, value in digests.items() if micro and self._digests.get(name, value) != value]
        self._digests = digests
        self._steps = 0 if changed else self._steps - (micro == 0)
        if not changed:
            return ""
        return (
            f"{', '.join(changed)} changes after each micro-batch, as a moving average that is updated beside "
            "optimizer.step(): update it under `if session.is_last`, once a step"
        )


def _buffers(prepared: Prepared) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers other than BatchNorm's running statistics."""
    for model in prepared.models.values():
        kept_elsewhere = {*sync_batchnorm.statistics(model)}
        if isinstance(model, AveragedModel):
            kept_elsewhere.add("n_averaged")
        yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in kept_elsewhere)


def _unsaved(models: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, fingerprint) of each module attribute outside of its `state_dict`."""
    for model in models.values():
        saved = {tensor.data_ptr() for tensor in model.state_dict().values() if isinstance(tensor, Tensor)}
        saved.discard(0)
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                continue
            attributes = {key: value for key, value in vars(module).items() if key not in _OF_ANY_MODULE}
            for key, value in (attributes | dict(module.named_buffers(recurse=False))).items():
                if (found := fingerprint(value, saved)) is not None:
                    yield f"{path}.{key}" if path else key, found


def _sum_text(buffer: Tensor) -> str:
    return str(buffer.double().sum().item() if not buffer.is_complex() else buffer.sum().item())

"""Findings of a loop's first step: unsaved state, and values that depend on the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from .. import _torch
from ..checkpoint.shards import local
from ..checks.digest import digest
from ..data.share import SharedLoader, state_of
from ..errors import RequestError
from ..nn import sync_batchnorm
from ..runs.prepared import Prepared
from ..runs.restored import fingerprint
from .collectives import GATHER

_OF_ANY_MODULE = frozenset(vars(nn.Module()))


class FirstStep:
    """State of the models before the first step, to compare with that after it."""

    def __init__(self, prepared: Prepared, *, is_in_epochs: bool, is_resumed: bool) -> None:
        self._prepared, self._is_in_epochs, self._is_resumed = prepared, is_in_epochs, is_resumed
        self._unsaved = dict(_unsaved(prepared))
        self._counts = dict(self._dataset_numbers())
        self._buffers = {name: buffer.clone() for name, buffer in _buffers(prepared)}
        self._scaler: GradScaler | None = None  # that made the step, if any
        self._divisors: list[tuple[Tensor, int]] = []  # of means over labels: (divisor, labels)
        self._sums: list[Tensor] = []  # losses of gathered rows by reduction="sum"
        owned = prepared.optimized
        self._unowned = {  # trainable parameters of no prepared optimizer, with their digests
            name: (parameter, int(digest([local(parameter)])))
            for model in prepared.models.values()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter not in owned
        }
        self._with_gradient: set[str] = set()  # of those
        self._known = set(prepared.exchange.leaves)
        self._foreign = ""  # a trained parameter of no prepared model
        source = prepared.source
        self._is_shared = prepared.world.size > 1 or (source is not None and source.plan.accumulation > 1)

    def check_leaves(self, loss: Tensor, *, is_sum: bool = False) -> None:
        """Note which parameters the loss depends on, and a sum of gathered rows.

        Raises `RequestError` for one of a model that is not prepared if several shares make up a batch.
        """
        nodes, seen = [loss.grad_fn], set[Any]()
        names = {parameter: name for name, (parameter, _) in self._unowned.items()}
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if is_sum and node.name() == GATHER:
                self._sums, is_sum = [*self._sums, loss.detach()], False
            nodes.extend(following for following, _ in node.next_functions)
            leaf: Any = getattr(node, "variable", None)
            if not isinstance(leaf, nn.Parameter) or not leaf.requires_grad:
                continue
            if leaf in names:
                self._with_gradient.add(names[leaf])
            elif leaf not in self._known:
                self._foreign = f"a parameter of shape {tuple(leaf.shape)} that is of no model in session.prepare"
        if self._foreign and self._is_shared:
            raise RequestError(
                f"The loss depends on {self._foreign}, so that each rank would train its own copy: prepare its module "
                "and its optimizer too, or freeze it by requires_grad_(False)."
            )

    def look_at_mean(self, loss: Tensor) -> None:
        """Note whether a loss without weight= is a mean over other numbers than labels."""
        self._divisors += _torch.nll_divisors(loss)

    def look(self) -> None:
        """Note, before an optimizer steps, who makes the step."""
        self._scaler = self._scaler or _scaler_above()

    def cautions(self) -> list[str]:
        """Return a sentence per finding after the first step (*collective*)."""
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
        unsaved = dict(_unsaved(prepared))
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
        # Read on several shares alone, since the host waits.
        is_other = self._is_shared and any(float(divisor) != labels for divisor, labels in self._divisors)
        if self._is_shared and any(world.gather(is_other)):
            sentences.append(
                "the loss leaves out ignored labels, or weighs classes, and session.backward was given no weight: say "
                "what the mean is over, as in session.backward(loss, weight=(y != -100).sum())"
            )
        by_rank = world.gather([float(total) for total in self._sums])
        if world.size > 1 and any(totals == by_rank[0] for totals in by_rank[1:] if any(totals)):
            sentences.append(
                'every rank gives the same sum over gathered rows with reduction="sum", which adds up the ranks: '
                f"gradients are {world.size} times too large; give their mean, without reduction="
            )
        stepped = [
            name
            for name, (parameter, initial) in self._unowned.items()
            if name in self._with_gradient and int(digest([local(parameter)])) != initial
        ]
        if saves and stepped:
            sentences.append(
                f"an optimizer that session.prepare was not given trains {', '.join(stepped[:3])}: no checkpoint holds "
                "its state, and a resumed run begins with a new one; prepare every optimizer"
            )
        if saves and self._foreign:
            sentences.append(
                f"the loss depends on {self._foreign}: no checkpoint holds it; prepare its module and its optimizer"
            )
        scaler = self._scaler
        if saves and scaler is not None and scaler.is_enabled() and scaler not in prepared.stateful_objects:
            sentences.append(
                "the loop has a GradScaler that session.prepare was not given: no checkpoint holds its scale, and a "
                "resumed run begins with the initial one; prepare it with the optimizer"
            )
        if source is None and (prepared.config.batch.accumulate or 1) > 1:
            sentences.append("accumulate has no effect without a loader that session.prepare was given")
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


def _scaler_above() -> GradScaler | None:
    """Return the GradScaler whose `step` has called this optimizer's, if one has."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:  # other frames' locals, once read, keep a batch alive
            scaler: GradScaler = frame.f_locals["self"]
            return scaler
        frame = frame.f_back
    return None


class AverageWatch:
    """Watch, over the first steps, for a moving average that the loop updates in each micro-batch."""

    _STEPS = 3  # of the first one, an average that begins as a copy is as before

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._optimized = prepared.optimized
        self._digests: dict[str, int] = {}
        self._steps = self._STEPS if self._optimized and self._averages() else 0

    def _averages(self) -> dict[str, list[Tensor]]:
        """Return the tensors that no optimizer steps: weights of prepared models, and attributes of other objects."""
        tensors_by_name: dict[str, list[Tensor]] = {
            name: [parameter for parameter in model.parameters() if parameter not in self._optimized]
            for name, model in self._prepared.models.items()
        }
        shapes = {parameter.shape for parameter in self._optimized}  # a meter's tensors have others
        for item in self._prepared.stateful_objects:
            for value in getattr(item, "__dict__", {}).values():
                values: Any = list(value.parameters()) if isinstance(value, nn.Module) else value
                values = list(values.values()) if isinstance(values, dict) else values
                for tensor in values if isinstance(values, list | tuple) else ():
                    if isinstance(tensor, Tensor) and tensor.shape in shapes and tensor not in self._optimized:
                        tensors_by_name.setdefault(type(item).__name__, []).append(tensor)
        return {name: tensors for name, tensors in tensors_by_name.items() if tensors}

    def look(self, micro: int) -> str:
        """Compare within a batch, before the backward pass of each micro-batch. Returns a sentence or ""."""
        if not self._steps:
            return ""
        digests = {name: int(digest([local(tensor) for tensor in group])) for name, group in self._averages().items()}
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


def _unsaved(prepared: Prepared) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, fingerprint) of each module attribute outside of its `state_dict`."""
    for model in prepared.models.values():
        with prepared.exchange.whole_state(()):
            values = model.state_dict().values()
        saved = {local(tensor).data_ptr() for tensor in values if isinstance(tensor, Tensor)}
        saved.discard(0)
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                continue
            attributes = {key: value for key, value in vars(module).items() if key not in _OF_ANY_MODULE}
            for key, value in (attributes | dict(module.named_buffers(recurse=False))).items():
                if (digest_text := fingerprint(value, saved)) is not None:
                    yield f"{path}.{key}" if path else key, digest_text


def _sum_text(buffer: Tensor) -> str:
    return str(buffer.double().sum().item() if not buffer.is_complex() else buffer.sum().item())

"""Gradients of an optimizer step: the ranks' and one process's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..verify.workbench import TOLERANCE, TOLERANCES, find_factor, gaps, worst
from .recording import BY_SHARE, REVERSED, Alone, Recording, Replayed, Window
from .tensors import are_equal

Gradients = Mapping[str, Tensor]
COARSE = 5e-2
"""Tolerance where a part is computed in less than float32, as under autocast."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: the ranks' gradients, and one process's by pass."""

    number: int
    windows: Sequence[Window]
    ranks: Sequence[Gradients]
    replayed: Replayed | None
    """One process's computation of all samples, if it has made this step."""
    reference: Gradients
    """Its gradients."""
    reversed: Gradients
    by_share: Gradients
    alone: Sequence[Gradients]
    """Of one process with the samples of one rank, by rank."""
    by_micro_batch: Sequence[Gradients]
    """The same with one micro-batch of a rank in place of each, rank after rank; empty if there is one in a step."""
    tolerance: float
    is_clipped_alone: bool
    """Whether ranks clipped different gradients, and stepped with the same."""

    @property
    def evidence(self) -> dict[str, Any]:
        """Return the step's number from 1 on, and its place."""
        return {"step": self.number + 1, "place": self.windows[0].place}

    @cached_property
    def gap(self) -> float:
        """Return the largest relative difference of a gradient between rank 0 and one process."""
        return worst(gaps(self.ranks[0], self.reference))

    @cached_property
    def factor(self) -> float:
        """Return the factor between rank 0's gradients and one process's."""
        return find_factor(self.ranks[0], self.reference)

    @cached_property
    def is_multiple(self) -> bool:
        """Whether rank 0's gradients are a multiple of one process's."""
        return worst(gaps(self.ranks[0], self.reference, self.factor)) <= self.tolerance


def read_step(record: Recording, number: int) -> Step:
    """Return a step. Its gradients are those before clipping, which hides factors, if the ranks have the same."""
    windows, replayed = record.step(number), record.read_reference(number)
    unclipped = [name_gradients(window, window.unclipped) for window in windows]
    is_unclipped = replayed is not None and not find_differing(unclipped)

    def choose(single: Replayed | None) -> Gradients:
        if single is None:
            return {}
        return name_gradients(windows[0], single.unclipped if is_unclipped else single.gradients)

    stepped = [name_gradients(window, window.gradients) for window in windows]
    alone = []
    for rank, window in enumerate(windows):
        single = record.read_replay(number, Alone(rank).name)
        # A loop without a DataLoader may read any samples.
        has_inputs = single is not None and sorted(single.inputs) == sorted(window.inputs)
        alone.append(choose(single) if has_inputs else {})
    micro_batches = [Alone(rank, number) for rank in record.ranks for number in range(windows[0].micro_batches)]
    return Step(
        number,
        windows,
        unclipped if is_unclipped else stepped,
        replayed,
        choose(replayed),
        choose(record.read_replay(number, REVERSED)),
        choose(record.read_replay(number, BY_SHARE)),
        alone,
        [choose(record.read_replay(number, one.name)) for one in micro_batches],
        _tolerance(windows[0]),
        bool(find_differing(unclipped)) and not find_differing(stepped),
    )


def name_gradients(window: Window, gradients: Sequence[Sequence[Tensor | None]]) -> dict[str, Tensor]:
    """Return the gradients by name."""
    return {
        f"{number}/{name}" if len(window.names) > 2 else name: gradient
        for number, (names, root) in enumerate(zip(window.names, gradients, strict=False))
        for name, gradient in zip(names, root, strict=False)
        if gradient is not None
    }


def find_differing(ranks: Sequence[Gradients]) -> list[str]:
    """Return the names of tensors that do not have the same bits on all ranks."""
    names = {name for gradients in ranks for name in gradients}
    return sorted(
        name
        for name in names
        if any(name not in gradients for gradients in ranks) or not are_equal([gradients[name] for gradients in ranks])
    )


def find_weights(alone: Sequence[Gradients], gradients: Gradients, tolerance: float) -> list[float] | None:
    """Return the weights of the ranks' gradients whose sum is `gradients`; None without such weights."""
    names = _common_names(*alone, gradients)
    if not names:
        return None
    columns = torch.stack([_flatten(single, names) for single in alone], dim=1)
    solution = torch.linalg.lstsq(columns, _flatten(gradients, names)[:, None]).solution[:, 0]
    weights: list[float] = solution.tolist()
    total = {
        name: torch.stack([w * single[name].double() for w, single in zip(weights, alone, strict=True)]).sum(0)
        for name in _common_names(*alone)
    }
    return weights if worst(gaps(gradients, total)) <= 10 * tolerance else None


def _tolerance(window: Window) -> float:
    if window.is_coarse:
        return COARSE
    kinds = {gradient.dtype for root in window.gradients for gradient in root if gradient is not None}
    return TOLERANCES["fp64"] if kinds == {torch.float64} else TOLERANCE


def _flatten(gradients: Gradients, names: Sequence[str]) -> Tensor:
    return torch.cat([gradients[name].detach().double().flatten() for name in names])


def _common_names(*ranks: Gradients) -> list[str]:
    return [name for name in ranks[0] if all(name in gradients for gradients in ranks)]

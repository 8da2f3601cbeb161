"""Why the gradients differ, by measurements: replays with one thing different each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..checkpoint.state import few
from ..verify.workbench import gaps, worst
from .findings import Finding, make_finding
from .gradients import Gradients, Step, find_weights
from .tensors import count_samples

_ROWS = 10  # values of a gradient per rank from which weights are computed, at least


def explain_exchange(step: Step, differing: list[str]) -> Finding:
    """Return the finding for ranks that step with different gradients of the tensors `differing`."""
    names = {name for gradients in step.ranks for name in gradients}

    def select(gradients: Gradients) -> dict[str, Tensor]:
        return {name: gradient for name, gradient in gradients.items() if name in differing}

    is_local = all(step.alone) and all(
        worst(gaps(select(gradients), select(single))) <= step.tolerance
        for gradients, single in zip(step.ranks, step.alone, strict=True)
    )
    is_complete = len(differing) == len(names)
    reason = "are those of each rank's own samples: they are not exchanged" if is_local else "differ between ranks"
    exchanges = step.windows[0].exchanges
    if exchanges and not exchanges[-1]:
        advice = "the last backward of the step is under no_sync; leave it before the last micro-batch's forward"
    elif is_complete:
        advice = "wrap the model in DistributedDataParallel and call the wrapped model, or reduce the gradients before"
    else:
        advice = "these parameters are outside of the wrapped model, or its forward does not use them"
    tensors = "All gradients" if is_complete else f"The gradients of {few(differing)}"
    return make_finding("gradients differ", tensors, reason, advice, tensors=differing, **step.evidence)


def explain_gap(step: Step, cut: str) -> Finding | None:
    """Return the finding for ranks that agree with one another, but not with one process; None without a cause.

    `cut` is the place of a collective that was given tensors whose gradients it does not compute, or "".
    """
    gradients, reference = step.ranks[0], step.reference
    evidence = step.evidence | {"gap": step.gap}
    if step.is_clipped_alone:
        return make_finding("clipped alone", **evidence)
    if step.is_multiple:
        return make_finding("wrong count", factor=step.factor, **evidence)
    if step.by_share and worst(gaps(gradients, step.by_share)) <= step.tolerance:
        return make_finding("local BatchNorm", **evidence)
    values = sum(gradient.numel() for gradient in reference.values())
    # One process's own gradients do not follow the samples' order, else the replay is at fault.
    is_ordered = bool(step.reversed) and worst(gaps(step.reversed, reference)) <= 10 * step.tolerance
    for parts in () if step.windows[0].is_coarse else (step.alone, step.by_micro_batch):
        if not parts or not all(parts) or values < _ROWS * len(parts):
            continue
        weights = find_weights(parts, gradients, step.tolerance)
        # The ranks' samples alone have local statistics of BatchNorm.
        one_process = find_weights(parts, step.by_share or reference, step.tolerance)
        if weights is not None and one_process is not None:
            is_mean = math.isclose(sum(weights), sum(one_process), rel_tol=1e-3)
            return _explain_weights(step, weights, one_process) if is_mean else None
        # A mean over other counts in each micro-batch has no weights by rank either.
        is_micro_batch = len(parts) == len(step.ranks) * step.windows[0].micro_batches
        if weights is not None and is_ordered and is_micro_batch:
            return make_finding("coupled samples", **evidence)
    if cut:
        return make_finding("gathered without gradients", evidence["place"], **evidence | {"place": cut})
    return None


def _explain_weights(step: Step, weights: Sequence[float], one_process: Sequence[float]) -> Finding:
    """Return the finding for ranks that count by `weights`, where one process gives them others.

    Both are by rank, or by rank and micro-batch; the sentence has the micro-batch where they differ most.
    """
    count = len(weights) // len(step.windows)
    numbers = range(count)
    of_micro_batch = [(weights[number::count], one_process[number::count]) for number in numbers]
    number = max(numbers, key=lambda number: max(abs(a - b) for a, b in zip(*of_micro_batch[number], strict=True)))
    weights_here, weights_there = ([weight * count for weight in part] for part in of_micro_batch[number])
    sizes = [window.samples or len(window.inputs) for window in step.windows]
    if count > 1:
        sizes = [
            count_samples(window.batches[number]) if number < len(window.batches) else 0 for window in step.windows
        ]
    shares = [size / sum(sizes) for size in sizes] if sum(sizes) else []
    is_by_size = shares and all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(weights_there, shares, strict=True))
    is_even = all(math.isclose(weight, weights_here[0], rel_tol=1e-3) for weight in weights_here)
    return make_finding(
        "mean of means" if is_by_size and is_even else "mean over other counts",
        gap=step.gap,
        weights=weights_here,
        one_process=weights_there,
        samples=sizes,
        **step.evidence,
    )

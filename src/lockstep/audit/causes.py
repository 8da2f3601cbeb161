"""What makes the ranks' gradients differ, by measurements: replays with one thing different each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.state import few
from ..verify.workbench import gaps, worst
from .recording import Window

Gradients = Mapping[str, Tensor]
_ROWS = 10  # values of a gradient per rank that weights are found from, at least


@dataclass(frozen=True)
class Finding:
    """A fault, or what a script does by design, with its evidence."""

    kind: str
    sentence: str
    by_design: bool = False
    evidence: Mapping[str, object] = field(default_factory=dict)


class Step(NamedTuple):
    """One optimizer step: what the ranks computed of it, and what one process did, by pass."""

    number: int
    windows: Sequence[Window]
    own: Sequence[Gradients]
    """By rank."""
    together: Gradients
    reversed: Gradients
    by_share: Gradients
    alone: Sequence[Gradients]
    """By rank whose samples one process was given alone."""
    tolerance: float

    @property
    def where(self) -> str:
        """Return the step and its place, in words."""
        return f"at step {self.number + 1} ({self.windows[0].place})"


def not_exchanged(step: Step, differing: Sequence[str]) -> Finding:
    """Return the finding for ranks that step with different gradients of the tensors `differing`."""
    every = {name for each in step.own for name in each}

    def only(gradients: Gradients) -> dict[str, Tensor]:
        return {name: each for name, each in gradients.items() if name in differing}

    is_local = all(step.alone) and all(
        worst(gaps(only(mine), only(one))) <= step.tolerance for mine, one in zip(step.own, step.alone, strict=True)
    )
    is_whole = len(differing) == len(every)
    why = "are those of each rank's own samples: they are not exchanged" if is_local else "differ between ranks"
    flags = step.windows[0].exchanges
    if flags and not flags[-1]:
        mend = "the last backward of the step is under no_sync; leave it before the last micro-batch's forward"
    elif is_whole:
        mend = "wrap the model in DistributedDataParallel and call the wrapped model, or reduce the gradients before"
    else:
        mend = "these parameters are outside of the wrapped model, or its forward is not what uses them"
    return Finding(
        "gradients differ",
        f"{'All gradients' if is_whole else f'The gradients of {few([*differing])}'} {why} {step.where}; {mend}.",
        evidence={"tensors": [*differing], "step": step.number + 1},
    )


def explained(step: Step, gap: float, cut: str) -> Finding | None:
    """Return the finding for ranks that agree with one another, and not with one process; None without a cause.

    `cut` is the place of a collective that was given tensors whose gradients it does not compute, or "".
    """
    own, together, windows = step.own[0], step.together, step.windows
    evidence: dict[str, object] = {"step": step.number + 1, "gap": gap}
    times = factor(own, together)
    is_multiple = worst(gaps(own, together, times)) <= step.tolerance
    if is_multiple:
        return Finding(
            "wrong count",
            f"Every gradient is {times:.6g} times one process's {step.where}: the ranks' gradients, or the "
            "micro-batches', are summed or divided by a wrong count.",
            evidence=evidence | {"factor": times},
        )
    if step.by_share and worst(gaps(own, step.by_share)) <= step.tolerance:
        return Finding(
            "local BatchNorm",
            f"BatchNorm uses the statistics of each rank's own samples (gradients {gap:.0%} off {step.where}): by "
            "design of DistributedDataParallel; torch.nn.SyncBatchNorm.convert_sync_batchnorm gives one process's.",
            by_design=True,
            evidence=evidence,
        )
    values = sum(gradient.numel() for gradient in together.values())
    if all(step.alone) and not windows[0].is_coarse and values >= _ROWS * len(step.alone):
        theirs, ours = (_weights(step.alone, gradients, step.tolerance) for gradients in (own, together))
        if theirs is not None and ours is not None:
            return _weighed(step, gap, theirs, ours, evidence)
        # One process's own gradients do not follow the samples' order, else the replay is at fault.
        if theirs is not None and step.reversed and worst(gaps(step.reversed, together)) <= 10 * step.tolerance:
            return Finding(
                "coupled samples",
                f"The loss or a layer couples the samples of a batch, and each rank sees its own share alone "
                f"(gradients {gap:.1%} off {step.where}), as a contrastive loss does; gather what it compares from all "
                "ranks.",
                evidence=evidence,
            )
    if cut:
        return Finding(
            "gathered without gradients",
            f"Gradients are {gap:.1%} off one process's {step.where}: the collective at {cut} computes no gradients of "
            "what it gathers; use torch.distributed.nn.functional's, and mind that DistributedDataParallel divides by "
            "the ranks.",
            evidence=evidence | {"place": cut},
        )
    return None


def _weighed(
    step: Step, gap: float, theirs: Sequence[float], weights: Sequence[float], evidence: Mapping[str, object]
) -> Finding:
    """Return the finding for ranks that count by `theirs`, where one process gives them `weights`."""
    sizes = [window.samples() or len(window.inputs) for window in step.windows]
    shares = [size / sum(sizes) for size in sizes] if sum(sizes) else []
    evidence = {**evidence, "weights": [*theirs], "one_process": [*weights], "samples": sizes}
    if shares and all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(weights, shares, strict=True)):
        return Finding(
            "mean of means",
            f"Ranks with {', '.join(map(str, sizes))} samples count alike (gradients {gap:.1%} off {step.where}): the "
            "mean of the ranks' means is not the mean over all samples; weigh each rank's loss by its share of the "
            "samples, or drop the uneven batch.",
            evidence=evidence,
        )
    told, now = (", ".join(f"{weight:.3f}" for weight in each) for each in (weights, theirs))
    return Finding(
        "mean over other counts",
        f"The loss is a mean over a count that differs between ranks, such as tokens (gradients {gap:.1%} off "
        f"{step.where}): one process weighs the ranks by {told}, and here they count by {now}; divide the sum by "
        "the count over all ranks.",
        evidence=evidence,
    )


def factor(own: Gradients, reference: Gradients) -> float:
    """Return the factor k that minimizes |k × `reference` − `own`|²; 1 where all are 0."""
    names = _common(own, reference)
    if not names:
        return 1.0
    a, b = _flat(own, names), _flat(reference, names)
    square = float(b @ b)
    return float(a @ b) / square if square else 1.0


def _flat(gradients: Gradients, names: Sequence[str]) -> Tensor:
    return torch.cat([gradients[name].detach().double().flatten() for name in names])


def _common(*several: Gradients) -> list[str]:
    return [name for name in several[0] if all(name in each for each in several)]


def _combined(alone: Sequence[Gradients], weights: Sequence[float]) -> dict[str, Tensor]:
    return {
        name: torch.stack([weight * each[name].double() for weight, each in zip(weights, alone, strict=True)]).sum(0)
        for name in _common(*alone)
    }


def _weights(alone: Sequence[Gradients], gradients: Gradients, tolerance: float) -> list[float] | None:
    """Return the weights of the ranks' gradients whose sum is `gradients`; None where there are none."""
    names = _common(*alone, gradients)
    if not names:
        return None
    columns = torch.stack([_flat(each, names) for each in alone], dim=1)
    found = torch.linalg.lstsq(columns, _flat(gradients, names)[:, None]).solution[:, 0]
    weights = [float(weight) for weight in found]
    return weights if worst(gaps(gradients, _combined(alone, weights))) <= 10 * tolerance else None

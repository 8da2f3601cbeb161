"""Compare what the ranks have computed with what one process computes of the same samples, and say why they differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.state import few
from ..verify.workbench import gaps, worst
from .observer import BY_SHARE, TOGETHER, UNMATCHED, Window, load, size_of

TOLERANCES = {torch.float64: 1e-9}
TOLERANCE = 1e-4
"""For gradients in float32."""
COARSE = 5e-2
"""Where a part is computed in less than float32, as under autocast."""
_ROWS = 10  # values of a gradient per rank that weights are found from, at least

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Finding:
    """A fault, or what a script does by design, with its evidence."""

    kind: str
    sentence: str
    by_design: bool = False
    evidence: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The outcome of an audit."""

    steps: int
    ranks: int
    findings: Sequence[Finding]
    largest_gap: float | None
    """Largest relative difference of a gradient between the ranks and one process; None where ranks differ."""
    tolerance: float

    @property
    def is_sound(self) -> bool:
        """Whether no finding is a fault."""
        return all(finding.by_design for finding in self.findings)


def judge(folder: Path) -> Verdict:
    """Return the verdict on the windows in `folder` and their replays.

    Raises ValueError for what cannot be judged, with the reason.
    """
    ranks = load(folder)
    steps = min(map(len, ranks), default=0)
    if len(ranks) < 2:
        raise ValueError("it has one rank; start several, as by --devices 2")
    _check(folder, ranks, steps)
    found: dict[str, Finding] = {}

    def add(finding: Finding | None) -> None:
        if finding is not None:
            found.setdefault(finding.kind, finding)

    largest, tolerance = [0.0], TOLERANCE
    for step in range(steps):
        windows = [each[step] for each in ranks]
        tolerance = _tolerance(windows[0])
        add(_same_samples(windows, step))
        add(_same_draws(windows, step))
        if "gradients differ" not in found:  # whose consequence it would be
            add(_weights_differ(windows, step))
        together = _replayed(folder, windows[0], step, TOGETHER)
        alone = [_replayed(folder, windows[0], step, f"rank {rank}") for rank in range(len(ranks))]
        own = [_named(window, window.gradients) for window in windows]
        if differing := _differ(own):
            add(_not_exchanged(own, alone, differing, step, windows[0].place, tolerance))
            continue
        gap = worst(gaps(own[0], together))
        largest.append(gap)
        if gap > tolerance and (folder / UNMATCHED).exists():
            raise ValueError("it draws random numbers whose shapes do not follow from the ranks' samples")
        if gap > tolerance:
            by_share = _replayed(folder, windows[0], step, BY_SHARE)
            add(_explained(windows, own[0], together, by_share, alone, step, gap, tolerance))
    epochs = folder / "epochs.json"
    if epochs.exists() and json.loads(epochs.read_text())["repeats"]:
        add(
            Finding(
                "same order",
                "Each epoch has the same order of samples: the loader's DistributedSampler is not told the epoch; call "
                "sampler.set_epoch(epoch) before each.",
            )
        )
    gap_or_none = None if "gradients differ" in found else max(largest)
    return Verdict(steps, len(ranks), list(found.values()), gap_or_none, tolerance)


def _tolerance(window: Window) -> float:
    kinds = {each.dtype for root in window.gradients for each in root if each is not None}
    if window.is_coarse:
        return COARSE
    return max((TOLERANCES.get(kind, TOLERANCE) for kind in kinds), default=TOLERANCE)


def _named(window: Window, gradients: list[list[Tensor | None]]) -> dict[str, Tensor]:
    return {
        f"{number}/{name}" if len(window.names) > 1 else name: gradient
        for number, (names, root) in enumerate(zip(window.names, gradients, strict=False))
        for name, gradient in zip(names, root, strict=True)
        if gradient is not None
    }


def _replayed(folder: Path, window: Window, step: int, variant: str) -> dict[str, Tensor]:
    path = folder / f"replay {step} {variant}.pt"
    return _named(window, torch.load(path, weights_only=True)) if path.exists() else {}


def _differ(own: Sequence[Gradients]) -> list[str]:
    """Return the names of tensors that are not the same bits on all ranks."""
    names = {name for each in own for name in each}
    return sorted(
        name
        for name in names
        if any(name not in each for each in own) or any(not torch.equal(own[0][name], each[name]) for each in own[1:])
    )


def _tensors(batch: object) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, list | tuple) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def _same_samples(windows: Sequence[Window], step: int) -> Finding | None:
    rows = [_rows(window) for window in windows]
    if any(len({*each}) < len(each) for each in rows):  # the data set repeats itself
        return None
    shared = set.intersection(*({*each} for each in rows))
    if not shared:
        return None
    return Finding(
        "same samples",
        f"All ranks train {len(shared)} of {len(rows[0])} samples at step {step + 1}: each rank reads the whole data "
        "set; give the loader a DistributedSampler, or prepare it.",
        evidence={"step": step + 1, "samples": len(shared)},
    )


def _rows(window: Window) -> list[bytes]:
    """Return each sample's values as bytes."""
    found = []
    for _, batch in window.batches:
        size, tensors = size_of(batch), _tensors(batch)
        tensors = [tensor.cpu() for tensor in tensors if tensor.dim() and len(tensor) == size]
        flat = [tensor.reshape(size, -1).contiguous().view(torch.uint8).numpy() for tensor in tensors]
        found += [b"".join(rows[number].tobytes() for rows in flat) for number in range(size)]
    return found


def _check(folder: Path, ranks: Sequence[Sequence[Window]], steps: int) -> None:
    """Raise ValueError for a recording that cannot be judged."""
    if any(not window.batches for windows in ranks for window in windows):
        raise ValueError("its batches come from no DataLoader, at least on one rank and in one step")
    if any(window.optimizer for windows in ranks for window in windows):
        raise ValueError("it steps several optimizers")
    variants = (TOGETHER, *(f"rank {rank}" for rank in range(len(ranks))))
    if not all((folder / f"replay {step} {variant}.pt").exists() for step in range(steps) for variant in variants):
        raise ValueError("in one process it ended before it had made these steps")
    for windows in ranks:
        for root in (root for window in windows for root in window.gradients):
            if any(gradient is not None and not bool(gradient.isfinite().all()) for gradient in root):
                raise ValueError("its gradients are not finite numbers")


def _same_draws(windows: Sequence[Window], step: int) -> Finding | None:
    sizes = [size_of(window.batches[0][1]) if window.batches else 0 for window in windows]
    for draws in zip(*(window.draws for window in windows), strict=False):
        first = [draw[-1] for draw in draws if draw and draw[-1].dim() and len(draw[-1]) in sizes]
        is_of_samples = len(first) == len(windows) and first[0].numel() > 1 and not _is_constant(first[0])
        if is_of_samples and all(torch.equal(first[0], other) for other in first[1:]):
            return Finding(
                "same draws",
                f"All ranks draw the same random numbers for their samples at step {step + 1} (of shape "
                f"{tuple(first[0].shape)}): noise or dropout is repeated on each rank; seed each rank differently, as "
                "by torch.manual_seed(seed + rank).",
            )
    return None


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _weights_differ(windows: Sequence[Window], step: int) -> Finding | None:
    counts = [len(names) for names in windows[0].names]
    for number, count in enumerate(counts):
        for index, name in enumerate(windows[0].names[number]):
            tensors = [window.weights[number][index] for window in windows]
            if index < count and not all(torch.equal(tensors[0], other) for other in tensors[1:]):
                size = max(float((tensors[0] - other).abs().max()) for other in tensors[1:])
                return Finding(
                    "weights differ",
                    f"Before step {step + 1} the ranks' weights differ ({name}, by up to {size:.1e}): they train "
                    "different models; wrap the model in DistributedDataParallel, which also gives all ranks rank 0's "
                    "weights, or seed all ranks alike before the model is made.",
                    evidence={"tensor": name, "step": step + 1, "difference": size},
                )
    return None


def _not_exchanged(
    own: Sequence[Gradients],
    alone: Sequence[Gradients],
    differing: Sequence[str],
    step: int,
    place: str,
    tolerance: float,
) -> Finding:
    every = {name for each in own for name in each}
    is_local = all(
        worst(gaps({n: g for n, g in mine.items() if n in differing}, {n: g for n, g in one.items() if n in differing}))
        <= tolerance
        for mine, one in zip(own, alone, strict=True)
        if one
    )
    which = "All gradients" if len(differing) == len(every) else f"The gradients of {few([*differing])}"
    why = "differ between ranks"
    if is_local:
        why = "are those of each rank's own samples: they are not exchanged"
    mend = (
        "wrap the model in DistributedDataParallel and call the wrapped model, or reduce the gradients before the step"
        if len(differing) == len(every)
        else "these parameters are outside of the wrapped model, or its forward is not what uses them"
    )
    return Finding(
        "gradients differ",
        f"{which} {why} at step {step + 1} ({place}); {mend}.",
        evidence={"tensors": list(differing), "step": step + 1},
    )


def _explained(
    windows: Sequence[Window],
    own: Gradients,
    together: Gradients,
    by_share: Gradients,
    alone: Sequence[Gradients],
    step: int,
    gap: float,
    tolerance: float,
) -> Finding:
    """Return the finding for ranks that agree with one another, and not with one process."""
    where = f"at step {step + 1} ({windows[0].place})"
    evidence: dict[str, object] = {"step": step + 1, "gap": gap}
    factor = _factor(own, together)
    if worst(gaps(own, together, factor)) <= tolerance:
        return Finding(
            "wrong count",
            f"Every gradient is {factor:.6g} times one process's {where}: the ranks' gradients, or the micro-batches', "
            "are summed or divided by a wrong count.",
            evidence=evidence | {"factor": factor},
        )
    if by_share and worst(gaps(own, by_share)) <= tolerance:
        return Finding(
            "local BatchNorm",
            f"BatchNorm uses the statistics of each rank's own samples (gradients {gap:.0%} off {where}): by design of "
            "DistributedDataParallel; torch.nn.SyncBatchNorm.convert_sync_batchnorm gives one process's.",
            by_design=True,
            evidence=evidence,
        )
    sizes = [sum(size_of(batch) for _, batch in window.batches) for window in windows]
    values = sum(gradient.numel() for gradient in together.values())
    if all(alone) and not windows[0].is_coarse and values >= _ROWS * len(alone):
        mean = _combined(alone, [1 / len(alone)] * len(alone))
        weights = _weights(alone, together)
        is_weighed = weights is not None and worst(gaps(_combined(alone, weights), together)) <= tolerance
        if worst(gaps(own, mean)) <= 10 * tolerance and is_weighed:
            assert weights is not None
            shares = [size / sum(sizes) for size in sizes]
            evidence |= {"weights": weights, "samples": sizes}
            if all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(weights, shares, strict=True)):
                return Finding(
                    "mean of means",
                    f"Ranks with {', '.join(map(str, sizes))} samples count alike (gradients {gap:.1%} off {where}): "
                    "the mean of the ranks' means is not the mean over all samples; weigh each rank's loss by its "
                    "share of the samples, or drop the uneven batch.",
                    evidence=evidence,
                )
            told = ", ".join(f"{weight:.3f}" for weight in weights)
            return Finding(
                "mean over other counts",
                f"The loss is a mean over a count that differs between ranks, such as tokens (gradients {gap:.1%} off "
                f"{where}): one process weighs the ranks by {told}, and here they count alike; divide the summed loss "
                "by the count over all ranks.",
                evidence=evidence,
            )
        if worst(gaps(own, mean)) <= 10 * tolerance:
            return Finding(
                "coupled samples",
                f"The loss or a layer couples the samples of a batch, and each rank sees its own share alone "
                f"(gradients {gap:.1%} off {where}), as a contrastive loss does; gather what it compares from all "
                "ranks.",
                evidence=evidence,
            )
    return Finding(
        "unexplained",
        f"The gradients are {gap:.1%} off one process's {where}, and no cause that was measured explains it alone.",
        evidence=evidence,
    )


def _flat(gradients: Gradients, names: Sequence[str]) -> Tensor:
    return torch.cat([gradients[name].detach().double().flatten() for name in names])


def _common(*several: Gradients) -> list[str]:
    return [name for name in several[0] if all(name in each for each in several)]


def _factor(own: Gradients, together: Gradients) -> float:
    names = _common(own, together)
    a, b = _flat(own, names), _flat(together, names)
    square = float(b @ b)
    return float(a @ b) / square if square else 1.0


def _combined(alone: Sequence[Gradients], weights: Sequence[float]) -> dict[str, Tensor]:
    return {
        name: torch.stack([weight * each[name].double() for weight, each in zip(weights, alone, strict=True)]).sum(0)
        for name in _common(*alone)
    }


def _weights(alone: Sequence[Gradients], together: Gradients) -> list[float] | None:
    """Return the weights of the ranks' gradients whose sum is nearest to one process's."""
    names = _common(*alone, together)
    if not names:
        return None
    columns = torch.stack([_flat(each, names) for each in alone], dim=1)
    found = torch.linalg.lstsq(columns, _flat(together, names)[:, None]).solution[:, 0]
    return [float(weight) for weight in found]

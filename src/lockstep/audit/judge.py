"""Compare what the ranks have computed with what one process computes of the same samples."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..checkpoint.state import few
from ..verify.workbench import gaps, worst
from . import causes, epochs
from .causes import Finding, Gradients, Step
from .observer import digests
from .recording import (
    BY_SHARE,
    FIRST,
    REFUSED,
    REVERSED,
    UNMATCHED,
    UNMATCHED_ROWS,
    Recording,
    Replayed,
    Window,
    size_of,
    tensors_of,
)

TOLERANCES = {torch.float64: 1e-9}
TOLERANCE = 1e-4
"""For gradients in float32."""
COARSE = 5e-2
"""Where a part is computed in less than float32, as under autocast."""


@dataclass
class Verdict:
    """The outcome of an audit."""

    steps: int
    ranks: int
    findings: list[Finding] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """What was not judged, in words."""
    largest_gap: float | None = 0.0
    """Largest relative difference of a gradient between the ranks and one process; None if they were not compared."""
    tolerance: float = TOLERANCE
    refusal: str = ""
    """Why the gradients could not be judged."""

    @property
    def is_sound(self) -> bool:
        """Whether no finding is a fault."""
        return all(finding.by_design for finding in self.findings)

    def refuse(self, reason: str) -> None:
        """Note why gradients could not be judged, if it is the first reason."""
        self.refusal = self.refusal or reason

    def add(self, finding: Finding | None) -> None:
        """Add a finding, if it is the first of its kind."""
        if finding is not None and all(each.kind != finding.kind for each in self.findings):
            self.findings.append(finding)


def passes(record: Recording) -> list[str]:
    """Return the passes whose replay tells causes, after the one of all ranks' samples together."""
    found = list[str]()
    for step in range(record.steps):
        windows, together = _step(record, step), record.whole(step)
        own, ours = _compared(windows, together)
        if together is None or _differ(own) or worst(gaps(own[0], ours)) > _tolerance(windows[0]):
            found = [BY_SHARE] * windows[0].has_batchnorm + [REVERSED, *_ranks(windows)]
            break
    return found + [FIRST] * bool(_uneven_windows(record))


def takes_turns(record: Recording) -> bool:
    """Return whether one process makes a micro-batch of each rank's, as where their number is divided by the ranks'."""
    replayed = record.whole(0)
    calls = sum(window.micro_batches for window in _step(record, 0)) if record.steps else 0
    return replayed is not None and replayed.micro_batches == calls > record.windows[0][0].micro_batches


def judge(record: Recording) -> Verdict:
    """Return the verdict on the recorded windows and their replays."""
    verdict = Verdict(record.steps, len(record.windows))
    for step in range(record.steps):
        if (finding := _steps_differ(record, step)) is not None:
            verdict.add(finding)
            return verdict  # the rest follows from it
        _judge_step(record, step, verdict)
    verdict.add(_counts_differ(record))
    if record.replay_facts().get("is_told_ranks"):
        verdict.unseen.append("factors of the number of ranks, which the script counts in one process too")
    verdict.add(_last_window(record))
    verdict.add(epochs.schedule(record))
    for finding in (
        *epochs.orders(record, verdict.unseen),
        *epochs.evaluation(record, verdict.unseen),
        epochs.saves(record),
    ):
        verdict.add(finding)
    if not any(facts["saves"] for facts in record.facts):
        verdict.unseen.append("a checkpoint")
    return verdict


def _judge_step(record: Recording, step: int, verdict: Verdict) -> None:
    windows = _step(record, step)
    verdict.tolerance = tolerance = max(_tolerance(windows[0]), verdict.tolerance if step else 0.0)
    if not epochs.has_orders(record):
        verdict.add(_same_samples(windows, step))
    verdict.add(_same_draws(windows, step))
    if "same samples" not in {finding.kind for finding in verdict.findings}:
        verdict.add(_same_augmentation(windows, step, record.augmentation()))
    kinds = {finding.kind for finding in verdict.findings}
    if "gradients differ" not in kinds:  # whose consequence it would be
        verdict.add(_weights_differ(windows, step))
        if "weights differ" not in kinds:
            verdict.add(_buffers_differ(windows, step))
    verdict.add(_wasted_exchanges(windows, step))
    together = record.whole(step)
    own, ours = _compared(windows, together)
    if any(not bool(gradient.isfinite().all()) for each in own for gradient in each.values()):
        verdict.refuse("its gradients are not finite numbers")
        return
    if not any(own):
        verdict.refuse("its optimizer steps without gradients, or computes them itself")
        return
    is_unclipped = _is_unclipped(windows, together)

    def replayed(name: str) -> dict[str, Tensor]:
        found = record.replayed(step, name)
        return _named(windows[0], found.unclipped if is_unclipped else found.gradients) if found else {}

    alone = [
        replayed(name) if _has_inputs(record, step, name, window) else {}
        for name, window in zip(_ranks(windows), windows, strict=True)
    ]
    about = Step(step, windows, own, ours, replayed(REVERSED), replayed(BY_SHARE), alone, tolerance)
    if differing := _differ(own):
        verdict.add(causes.not_exchanged(about, differing))
        verdict.largest_gap = None
        return
    if together is None:
        path = record.folder / REFUSED
        verdict.refuse(path.read_text() if path.exists() else "in one process it ended before it had made these steps")
        return
    gap = worst(gaps(own[0], ours))
    if gap > tolerance:
        given = collections.Counter(itertools.chain.from_iterable(window.inputs for window in windows))
        is_multiple = worst(gaps(own[0], ours, causes.factor(own[0], ours))) <= tolerance
        why = _not_comparable(record, windows, given == collections.Counter(together.inputs), is_multiple)
        finding = None if why else causes.explained(about, gap, record.facts[0].get("cut", ""))
        if finding is None or (finding.kind == "coupled samples" and (record.folder / UNMATCHED_ROWS).exists()):
            why = why or f"its gradients are {gap:.1%} off one process's {about.where}, and no cause explains it"
            verdict.refuse(why)
            verdict.largest_gap = None
            return
        verdict.add(finding)
    if verdict.largest_gap is not None:
        verdict.largest_gap = max(verdict.largest_gap, gap)


def _compared(
    windows: Sequence[Window], together: Replayed | None
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the ranks' gradients and one process's: before clipping, which hides factors, if ranks had them alike."""
    if _is_unclipped(windows, together):
        theirs = [_named(window, window.unclipped) for window in windows]
        return theirs, _named(windows[0], together.unclipped) if together else {}
    theirs = [_named(window, window.gradients) for window in windows]
    return theirs, _named(windows[0], together.gradients) if together else {}


def _is_unclipped(windows: Sequence[Window], together: Replayed | None) -> bool:
    return together is not None and not _differ([_named(window, window.unclipped) for window in windows])


def _not_comparable(record: Recording, windows: Sequence[Window], has_same_inputs: bool, is_multiple: bool) -> str:
    """Return why a difference from one process tells nothing, or ""."""
    if any(window.is_drawn_outside for window in windows):
        states = [repr(next((read.generators for read in window.reads if not read.is_end), None)) for window in windows]
        if len({*states}) > 1:
            return "it draws from `random` or NumPy, and each rank draws its own, which no single process can"
    if (record.folder / UNMATCHED).exists() or any(facts.get("hidden") for facts in record.facts):
        return "it draws random numbers that do not follow from the ranks' samples, or within an operator"
    if record.replay_facts().get("is_told_ranks") and is_multiple:
        return "it starts its ranks itself, and counts as many in one process"
    if not has_same_inputs and not any(window.reads for window in windows):
        return "its batches come from no DataLoader and no random draw: one process was given other samples"
    return ""


def _step(record: Recording, step: int) -> list[Window]:
    return [windows[step] for windows in record.windows]


def _has_inputs(record: Recording, step: int, name: str, window: Window) -> bool:
    """Return whether a pass gave the model a rank's samples: a loop without a DataLoader reads what it likes."""
    found = record.replayed(step, name)
    return found is not None and sorted(found.inputs) == sorted(window.inputs)


def _ranks(windows: Sequence[Window]) -> list[str]:
    return [f"rank {rank}" for rank in range(len(windows))]


def _tolerance(window: Window) -> float:
    kinds = {each.dtype for root in window.gradients for each in root if each is not None}
    if window.is_coarse:
        return COARSE
    return max((TOLERANCES.get(kind, TOLERANCE) for kind in kinds), default=TOLERANCE)


def _named(window: Window, gradients: Sequence[Sequence[Tensor | None]]) -> dict[str, Tensor]:
    return {
        f"{number}/{name}" if len(window.names) > 2 else name: gradient
        for number, (names, root) in enumerate(zip(window.names, gradients, strict=False))
        for name, gradient in zip(names, root, strict=False)
        if gradient is not None
    }


def _differ(own: Sequence[Gradients]) -> list[str]:
    """Return the names of tensors that are not the same bits on all ranks."""
    names = {name for each in own for name in each}
    return sorted(
        name
        for name in names
        if any(name not in each for each in own) or any(not torch.equal(own[0][name], each[name]) for each in own[1:])
    )


def _counts_differ(record: Recording) -> Finding | None:
    counts = [len(windows) for windows in record.windows]
    if len({*counts}) == 1:
        return None
    return Finding(
        "steps differ",
        f"The ranks make different numbers of optimizer steps, {' and '.join(map(str, counts))}, and wait for one "
        f"another ({record.windows[0][-1].place}): decide on all ranks alike whether a step is made or left out.",
        evidence={"steps": counts},
    )


def _steps_differ(record: Recording, step: int) -> Finding | None:
    windows = _step(record, step)
    reads = [sum(not read.is_end for read in window.reads) for window in windows]
    calls = [window.micro_batches for window in windows]
    if step and all(reads) and len({*reads}) > 1:  # in the first, a rank may look at its data
        told = f"For step {step + 1} the ranks read {' and '.join(map(str, reads))} batches"
    elif len({*calls}) > 1:
        told = f"At step {step + 1} the ranks call the model {' and '.join(map(str, calls))} times"
    else:
        return None
    return Finding(
        "steps differ",
        f"{told} ({windows[0].place}): some leave out batches that others train, and different ones are paired from "
        "then on.",
        evidence={"step": step + 1, "batches": reads, "calls": calls},
    )


def _same_samples(windows: Sequence[Window], step: int) -> Finding | None:
    rows = [_rows(window) for window in windows]
    if any(len({*each}) < len(each) for each in rows):  # the data set repeats itself
        return None
    shared = next((both for a, b in itertools.combinations(rows, 2) if (both := {*a} & {*b})), None)
    if not shared:
        return None
    return Finding(
        "same samples",
        f"Ranks train {len(shared)} of {len(rows[0])} samples in common at step {step + 1}: each rank reads the whole "
        "data set; give the loader a DistributedSampler, or prepare it.",
        evidence={"step": step + 1, "samples": len(shared)},
    )


def _rows(window: Window) -> list[bytes]:
    batches = [tensors_of(read.batch) for read in window.reads if not read.is_end]
    return [row for tensors in batches for row in digests(tensors)] or window.inputs


def _same_draws(windows: Sequence[Window], step: int) -> Finding | None:
    sizes = {size_of(read.batch) for window in windows for read in window.reads[:1]}
    sizes = sizes or {len(window.inputs) for window in windows}
    for draws in zip(*(window.draws for window in windows), strict=False):
        first = draws[0]
        of_samples = all(len(draw) in sizes for draw in draws) and first.numel() > 1
        if (
            of_samples
            and not _is_constant(first)
            and any(torch.equal(a, b) for a, b in itertools.combinations(draws, 2))
        ):
            return Finding(
                "same draws",
                f"Ranks draw the same random numbers for their samples at step {step + 1} (of shape "
                f"{tuple(first.shape)}): noise or dropout is repeated on each rank; seed each rank differently, as "
                "by torch.manual_seed(seed + rank).",
                evidence={"step": step + 1, "shape": [*first.shape]},
            )
    return None


def _same_augmentation(windows: Sequence[Window], step: int, digests: Sequence[bytes]) -> Finding | None:
    drawn = [window.augmentation for window in windows]
    is_alike = any(a and a == b for a, b in (*itertools.combinations(drawn, 2), *itertools.combinations(digests, 2)))
    if not is_alike:
        return None
    return Finding(
        "same draws",
        f"Ranks draw the same random numbers in their loaders at step {step + 1}: samples of one rank are "
        "augmented as those of the others; seed each rank differently, as by torch.manual_seed(seed + rank).",
        evidence={"step": step + 1},
    )


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _weights_differ(windows: Sequence[Window], step: int) -> Finding | None:
    for number, names in enumerate(windows[0].names):
        for index, name in enumerate(names):
            tensors = [window.weights[number][index] for window in windows]
            if not all(torch.equal(tensors[0], other) for other in tensors[1:]):
                size = max(float((tensors[0] - other).abs().max()) for other in tensors[1:])
                return Finding(
                    "weights differ",
                    f"Before step {step + 1} the ranks' weights differ ({name}, by up to {size:.1e}): they train "
                    "different models; wrap the model in DistributedDataParallel, which also gives all ranks rank 0's "
                    "weights, or seed all ranks alike before the model is made.",
                    evidence={"tensor": name, "step": step + 1, "difference": size},
                )
    return None


def _buffers_differ(windows: Sequence[Window], step: int) -> Finding | None:
    differing = [
        name
        for name, value in windows[0].buffers.items()
        if any(name in each.buffers and not torch.equal(value, each.buffers[name]) for each in windows[1:])
    ]
    if not differing:
        return None
    return Finding(
        "buffers differ",
        f"In step {step + 1} the ranks compute with different buffers ({few(differing)}): each keeps statistics of its "
        "own samples, and only one rank's are saved; let DistributedDataParallel broadcast them, or convert to "
        "SyncBatchNorm.",
        evidence={"tensors": differing, "step": step + 1},
    )


def _wasted_exchanges(windows: Sequence[Window], step: int) -> Finding | None:
    reads = collections.Counter(read.loader for read in windows[0].reads if not read.is_end)
    count, flags = max(reads.values(), default=windows[0].micro_batches), windows[0].exchanges
    if not step or count < 2 or len(flags) != count or not all(flags):
        return None
    return Finding(
        "no_sync missing",
        f"Gradients are exchanged in each of {count} micro-batches of step {step + 1}; under no_sync, around forward "
        f"and backward of all but the last, {count - 1} of {count} exchanges are saved.",
        by_design=True,
        evidence={"step": step + 1, "micro_batches": count},
    )


def _uneven_windows(record: Recording) -> tuple[int, int] | None:
    """Return a usual window, and one of the same optimizer with another number of micro-batches."""
    windows = record.windows[0][: record.steps]
    for step, window in enumerate(windows):
        for usual, other in enumerate(windows[:step]):
            if other.optimizer == window.optimizer and other.micro_batches != window.micro_batches:
                return usual, step
    return None


def _last_window(record: Recording) -> Finding | None:
    found = _uneven_windows(record)
    full, short = (record.replayed(step, FIRST) for step in found) if found else (None, None)
    if found is None or full is None or short is None:
        return None
    window = record.windows[0][found[0]]
    factor = causes.factor(_named(window, short.gradients), _named(window, full.gradients))
    counts = [record.windows[0][step].micro_batches for step in found]
    if math.isclose(factor, 1.0, abs_tol=1e-2):
        return None
    return Finding(
        "last window",
        f"Step {found[1] + 1} has {counts[1]} micro-batches in place of {counts[0]}, as at an epoch's end, and of the "
        f"same samples its gradients are {factor:.3g} times the others' ({window.place}): divide the loss by the "
        "number of micro-batches, or of samples, that the step really has, and leave none over for the next epoch.",
        evidence={"step": found[1] + 1, "micro_batches": counts, "factor": factor},
    )

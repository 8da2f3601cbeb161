"""Compare the ranks' computations with one process's of the same samples."""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass, field, replace

from ..verify.workbench import TOLERANCE
from . import REFUSED, causes, epochs, steps
from .findings import Finding
from .gradients import Step, find_differing, read_step
from .recording import BY_SHARE, FIRST, REVERSED, UNMATCHED, UNMATCHED_ROWS, UNREAD, Alone, Recording

_MICRO_BATCHES = 16  # of all ranks in a step, of which each has its own pass, at most


@dataclass
class Verdict:
    """The outcome of an audit."""

    steps: int
    ranks: int
    findings: list[Finding] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """Parts of the script that were not judged, in words."""
    largest_gap: float | None = 0.0
    """Largest relative difference of a gradient between the ranks and one process; None if they were not compared."""
    tolerance: float = TOLERANCE
    refusal: str = ""
    """Why the gradients could not be judged."""

    @property
    def is_sound(self) -> bool:
        """Whether no finding is a fault."""
        return all(finding.by_design for finding in self.findings)

    @property
    def kinds(self) -> set[str]:
        """Kinds of the findings."""
        return {finding.kind for finding in self.findings}

    def refuse(self, reason: str) -> None:
        """Note why gradients could not be judged, if it is the first reason."""
        self.refusal = self.refusal or reason

    def add(self, *findings: Finding | None) -> None:
        """Add findings that are the first of their kind."""
        for finding in findings:
            if finding is not None and finding.kind not in self.kinds:
                self.findings.append(finding)


def list_passes(record: Recording) -> list[str]:
    """Return the passes whose replay shows causes, after the one of all ranks' samples together."""
    passes = list[str]()
    for number in range(record.steps):
        step = read_step(record, number)
        if step.replayed is None or find_differing(step.ranks) or step.gap > step.tolerance:
            alone = [Alone(rank).name for rank in record.ranks]
            micro_batches = range(step.windows[0].micro_batches)
            if 1 < len(micro_batches) <= _MICRO_BATCHES // len(record.ranks) and not step.is_multiple:
                alone += [Alone(rank, number).name for rank in record.ranks for number in micro_batches]
            passes = [BY_SHARE] * step.windows[0].has_batchnorm + [REVERSED, *alone]
            break
    return passes + [FIRST] * bool(steps.find_uneven_steps(record))


def takes_turns(record: Recording) -> bool:
    """Return whether one process makes a micro-batch of each rank's, as where their number is divided by the ranks'."""
    replayed = record.read_reference(0)
    calls = sum(window.calls for window in record.step(0)) if record.steps else 0
    return replayed is not None and replayed.calls == calls > record.windows[0][0].calls


def judge(record: Recording) -> Verdict:
    """Return the verdict on the recorded windows and their replays."""
    verdict = Verdict(record.steps, len(record.windows))
    for number in range(record.steps):
        step = read_step(record, number)
        verdict.tolerance = max(step.tolerance, verdict.tolerance if number else 0.0)
        if (finding := steps.judge_calls(step)) is not None:
            verdict.add(finding)
            return verdict  # the rest follows from it
        _judge_step(record, replace(step, tolerance=verdict.tolerance), verdict)
    verdict.add(steps.judge_numbers(record))
    if record.read_replay_facts().get("has_several_ranks"):
        verdict.unseen.append("factors of the number of ranks, which the script counts in one process too")
    verdict.add(steps.judge_last_window(record), epochs.judge_schedule(record))
    verdict.add(*epochs.judge_orders(record, verdict.unseen), *epochs.judge_evaluation(record, verdict.unseen))
    verdict.add(epochs.judge_files(record))
    if not any(facts["saves"] for facts in record.facts):
        verdict.unseen.append("a checkpoint")
    return verdict


def _judge_step(record: Recording, step: Step, verdict: Verdict) -> None:
    if not epochs.has_orders(record):
        verdict.add(steps.judge_samples(step))
    verdict.add(steps.judge_draws(record, step))
    if "same samples" not in verdict.kinds:
        verdict.add(steps.judge_augmentation(record, step))
    if "gradients differ" not in verdict.kinds:  # whose consequence it would be
        buffers = None if "weights differ" in verdict.kinds else steps.judge_buffers(step)
        verdict.add(steps.judge_weights(step), buffers)
    verdict.add(steps.judge_exchanges(step))
    _judge_gradients(record, step, verdict)


def _judge_gradients(record: Recording, step: Step, verdict: Verdict) -> None:
    gradients = [gradient for gradients in step.ranks for gradient in gradients.values()]
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        verdict.refuse("its gradients are not finite numbers")
    elif not gradients:
        verdict.refuse("its optimizer steps without gradients, or computes them itself")
    elif differing := find_differing(step.ranks):
        verdict.add(causes.explain_exchange(step, differing))
        verdict.largest_gap = None
    elif step.replayed is None:
        paths = [path for name in (REFUSED, UNREAD) if (path := record.folder / name).exists()]
        verdict.refuse(paths[0].read_text() if paths else "in one process it ended before it had made these steps")
    elif step.gap > step.tolerance and not _explain_gap(record, step, verdict):
        verdict.largest_gap = None
    elif verdict.largest_gap is not None:
        verdict.largest_gap = max(verdict.largest_gap, step.gap)


def _explain_gap(record: Recording, step: Step, verdict: Verdict) -> bool:
    """Add the finding for gradients that are not one process's; return whether there is one."""
    if obstacle := _find_obstacle(record, step):
        verdict.refuse(obstacle)
        return False
    finding = causes.explain_gap(step, record.facts[0].get("graph_cut", ""))
    if finding is None or (finding.kind == "coupled samples" and (record.folder / UNMATCHED_ROWS).exists()):
        place = "at step {step} ({place})".format(**step.evidence)
        advice = "; audit it with one micro-batch a step" if step.windows[0].micro_batches > 1 else ""
        verdict.refuse(f"its gradients are {step.gap:.1%} off one process's {place}, and no cause explains it{advice}")
        return False
    verdict.add(finding)
    return True


def _find_obstacle(record: Recording, step: Step) -> str:
    """Return why one process's gradients are no reference for the ranks', or ""."""
    if any(window.is_drawn_outside for window in step.windows):
        states = [
            next((repr(read.generators) for read in window.reads if not read.is_end), "") for window in step.windows
        ]
        if len({*states}) > 1:
            return "it draws from `random` or NumPy, and each rank draws its own, which no single process can"
    if (path := record.folder / UNREAD).exists():
        return path.read_text()
    if any(facts.get("hidden") for facts in record.facts):
        return (
            "it draws random numbers within an operator, such as attention with dropout; audit it without that dropout"
        )
    if (record.folder / UNMATCHED).exists():
        return "it draws random numbers of other shapes in one process than on the ranks"
    if record.read_replay_facts().get("has_several_ranks") and step.is_multiple:
        return "it starts its ranks itself, and counts as many in one process"
    inputs = collections.Counter(itertools.chain.from_iterable(window.inputs for window in step.windows))
    has_inputs = step.replayed is not None and inputs == collections.Counter(step.replayed.inputs)
    if not has_inputs and not any(window.reads for window in step.windows):
        return "its batches come from no DataLoader and no random draw: one process was given other samples"
    return ""

"""Judge single steps: samples, draws, weights, buffers, exchanges, and the number of micro-batches."""

from __future__ import annotations

import itertools
import math

from ..verify.workbench import find_factor
from .findings import Finding, make_finding
from .gradients import Step, name_gradients
from .recording import FIRST, SOURCES, TOGETHER, Recording, Window
from .tensors import are_equal, count_samples, has_equal_pair, hash_samples, list_tensors


def judge_numbers(record: Recording) -> Finding | None:
    """Compare the ranks' numbers of steps."""
    counts = [len(windows) for windows in record.windows]
    if len({*counts}) == 1:
        return None
    return make_finding("steps differ", steps=counts, place=record.windows[0][-1].place)


def judge_calls(step: Step) -> Finding | None:
    """Compare the ranks' numbers of batches and of calls of the model."""
    batches = [len(window.batches) for window in step.windows]
    calls = [window.calls for window in step.windows]
    has_other_batches = step.number and all(batches) and len({*batches}) > 1  # in the first, a rank may look at data
    if not has_other_batches and len({*calls}) == 1:
        return None
    name = "steps differ: batches" if has_other_batches else "steps differ: calls"
    return make_finding(name, batches=batches, calls=calls, **step.evidence)


def judge_samples(step: Step) -> Finding | None:
    """Look for samples that several ranks train."""
    ranks = [_hash_samples(window) for window in step.windows]
    shared = next((len(both) for a, b in itertools.combinations(ranks, 2) if (both := {*a} & {*b})), 0)
    if not shared or any(len({*rows}) < len(rows) for rows in ranks):  # the data set repeats itself
        return None
    return make_finding("same samples", samples=shared, of=len(ranks[0]), **step.evidence)


def _hash_samples(window: Window) -> list[bytes]:
    return [row for batch in window.batches for row in hash_samples(list_tensors(batch))] or window.inputs


def judge_draws(record: Recording, step: Step) -> Finding | None:
    """Look for random numbers that several ranks draw for their samples, not for their parameters."""
    replayed = record.read_replay(step.number, TOGETHER)
    of_samples = replayed.draws_of_samples if replayed is not None else []
    parameters = {tensor.shape for tensors in step.windows[0].weights for tensor in tensors}
    sizes = {count_samples(batch) for window in step.windows for batch in window.batches[:1]}
    sizes = sizes or {len(window.inputs) for window in step.windows}
    for number, draws in enumerate(zip(*(window.draws for window in step.windows), strict=False)):
        first = draws[0]
        has_sizes = all(len(draw) in sizes and draw.shape not in parameters for draw in draws)
        is_constant = first.numel() < 2 or bool((first == first.flatten()[0]).all())
        # Equal numbers from different states are chance, as of one draw per sample.
        states = [window.states[number] for window in step.windows]
        is_same = has_equal_pair(draws) and len({*states}) < len(states)
        if (number in of_samples or has_sizes) and is_same and not is_constant:
            return make_finding("same draws", tuple(first.shape), shape=[*first.shape], **step.evidence)
    return None


def judge_augmentation(record: Recording, step: Step) -> Finding | None:
    """Look for random numbers that several ranks draw in their loaders."""
    for source in SOURCES:
        if any(a and a == b for a, b in itertools.combinations(record.read_augmentation(step.number, source), 2)):
            return make_finding("same draws: loaders", **step.evidence)
    return None


def judge_weights(step: Step) -> Finding | None:
    """Compare the ranks' weights before a step."""
    for number, names in enumerate(step.windows[0].names):
        for index, name in enumerate(names):
            tensors = [window.weights[number][index] for window in step.windows]
            if not are_equal(tensors):
                difference = max(float((tensors[0] - tensor).abs().max()) for tensor in tensors[1:])
                return make_finding("weights differ", tensor=name, difference=difference, **step.evidence)
    return None


def judge_buffers(step: Step) -> Finding | None:
    """Compare the ranks' buffers in a step."""
    ranks = [window.buffers for window in step.windows]
    tensors = [name for name in ranks[0] if not are_equal([buffers[name] for buffers in ranks if name in buffers])]
    return make_finding("buffers differ", tensors=tensors, **step.evidence) if tensors else None


def judge_exchanges(step: Step) -> Finding | None:
    """Look for gradients that are exchanged in each micro-batch."""
    window = step.windows[0]
    count = window.micro_batches
    if not step.number or count < 2 or len(window.exchanges) != count or not all(window.exchanges):
        return None
    return make_finding("no_sync missing", count - 1, micro_batches=count, **step.evidence)


def find_uneven_steps(record: Recording) -> tuple[int, int] | None:
    """Return a usual step, and one of the same optimizer with another number of micro-batches."""
    for (usual, window), (step, other) in itertools.combinations(enumerate(record.windows[0][: record.steps]), 2):
        if other.optimizer == window.optimizer and other.micro_batches != window.micro_batches:
            return usual, step
    return None


def judge_last_window(record: Recording) -> Finding | None:
    """Compare the gradients of a step with more and one with fewer micro-batches, of the same samples."""
    numbers = find_uneven_steps(record)
    replays = [replay for step in numbers or () if (replay := record.read_replay(step, FIRST)) is not None]
    if numbers is None or len(replays) < 2:
        return None
    windows = [record.windows[0][step] for step in numbers]
    full, short = (name_gradients(windows[0], replay.gradients) for replay in replays)
    factor, counts = find_factor(short, full), [window.calls for window in windows]
    if math.isclose(factor, 1.0, abs_tol=1e-2):
        return None
    return make_finding("last window", step=numbers[1] + 1, micro_batches=counts, factor=factor, place=windows[0].place)

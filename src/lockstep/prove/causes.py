"""Why N ranks' gradient is another one than one process's: each cause switched off, and the gradients measured again.

First everything that can be switched off is, on both sides: the gradients must then agree, else the exchange itself is
at fault (ranks' means are averaged, or divided by a wrong count), which is seen by measuring even shares and by the one
factor that all tensors have in common. Then one thing at a time is let back in: what makes the gradients differ by
itself is a cause, and so large is its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from . import float64
from .cases import Case
from .gaps import beyond, gaps, ratio, worst
from .gradients import ONE, Workbench
from .switches import EVERYTHING, Off, coupled, draws_elsewhere, shares_parameters, steady, switched

LOCAL = "local BatchNorm"


@dataclass(frozen=True)
class Cause:
    """One thing that makes the gradients differ, measured by itself."""

    name: str
    sentence: str
    """What it does, and what to do, without a full stop."""
    tensors: dict[str, float]
    """The gaps that it makes beyond the tolerance while all else is switched off, the largest first."""
    rest: float
    """The largest gap that is left with it switched off, too."""
    by_law: bool = False
    """Whether the model itself asks for it, so that no strategy can be without: randomness of its own."""

    def merged(self, other: Cause) -> Cause:
        """Return the same cause as two batches show it: its part in each tensor, and what is left, at their largest."""
        both = {name: max(gap, other.tensors.get(name, 0)) for name, gap in self.tensors.items()}
        tensors = dict(sorted((other.tensors | both).items(), key=lambda each: -each[1]))
        return dataclasses.replace(self, tensors=tensors, rest=max(self.rest, other.rest))


@dataclass(frozen=True)
class _Ground:
    """What the causes are measured on: a batch on which the gradients agree once everything is switched off."""

    case: Case
    rescaled: bool
    rest: float


def find(bench: Workbench, strategy: str, case: Case, tolerance: float) -> list[Cause]:
    """Return the causes of a gap under `strategy` in `case`, one at least, on rank 0 (*collective*).

    What other ranks return says nothing.
    """

    def measured(case: Case, off: Off, *, rescaled: bool = False) -> dict[str, float]:
        theirs = bench.under(strategy, case, off)
        ours = bench.reference(case, off)
        return gaps(theirs, ours, ratio(theirs, ours) if rescaled and ours else 1.0)

    def agreed(gap: float) -> bool:
        answer: bool = bench.world.gather(gap <= tolerance)[0]  # rank 0 has measured; all go the same way
        return answer

    rest = measured(case, EVERYTHING)
    found: list[Cause] = []
    ground = _Ground(case, False, worst(rest))
    if not agreed(ground.rest):
        ground, found = _of_the_exchange(bench, strategy, case, rest, measured, agreed)
    if not agreed(ground.rest):
        return [*found, *_unexplained(bench, strategy, case, rest, tolerance)] if bench.world.is_main else []
    switches = _switches(bench, strategy)
    for switch in switches:
        let_in = dataclasses.replace(EVERYTHING, **{switch: False})
        alone = measured(ground.case, let_in, rescaled=ground.rescaled)
        if switch == "randomness" and agreed(worst(alone)):
            # Threads that share a generator may happen to draw what one process draws: another seed tells.
            first, second = (bench.reference(ground.case, let_in, seed=seed) for seed in (1, 2))
            alone = gaps(first, second)
        if not agreed(worst(alone)) and bench.world.is_main:
            found.append(_cause(switch, bench, beyond(alone, tolerance), ground.rest))
    if bench.world.gather(bool(found))[0]:
        return found if bench.world.is_main else []
    for number in range(2, len(switches) + 1):
        let_in = dataclasses.replace(EVERYTHING, **dict.fromkeys(switches[:number], False))
        together = measured(case, let_in)
        if not agreed(worst(together)):
            sentence = f"none of {', '.join(switches[:number])} makes the gradients differ alone, and together they do"
            return [Cause("several together", sentence, beyond(together, tolerance), ground.rest)]
    sentence = "measured again, the gradients agree: what makes them differ is not there each time"
    return [Cause("unexplained", sentence, {}, ground.rest)]


Measure = Callable[..., dict[str, float]]


def _of_the_exchange(
    bench: Workbench,
    strategy: str,
    case: Case,
    rest: Mapping[str, float],
    measured: Measure,
    agreed: Callable[[float], bool],
) -> tuple[_Ground, list[Cause]]:
    """Return a ground on which the gradients agree, if there is one, and what was at fault without it."""
    if case.accumulation > 1:
        whole = dataclasses.replace(case, accumulation=1)
        if agreed(gap := worst(measured(whole, EVERYTHING))):
            sentence = (
                "the gradients of several micro-batches do not add up to the global batch's: with one micro-batch they "
                "agree; look at what is done between them, such as an exchange in each"
            )
            return _Ground(whole, False, gap), [Cause("accumulation", sentence, dict(rest), gap)]
    parts = bench.replicas * case.accumulation
    even = Case("even shares", case.start, case.start + case.size // parts * parts, case.accumulation)
    if case.start < even.stop < case.stop and all(
        # The others that are even as well: one alone may agree by chance.
        agreed(gap := worst(measured(each, EVERYTHING)))
        for each in (*(each for each in bench.cases if not each.size % (bench.replicas * each.accumulation)), even)
    ):
        sentence = (
            "ranks' means are averaged, whatever their numbers of samples (a mean of means): with even shares the "
            "gradients agree; divide the summed loss by the global count instead"
        )
        return _Ground(even, False, gap), [Cause("mean of means", sentence, dict(rest), gap)]
    theirs, ours = bench.under(strategy, case, EVERYTHING), bench.reference(case, EVERYTHING)
    factor = ratio(theirs, ours) if ours else 1.0
    if agreed(gap := worst(gaps(theirs, ours, factor))):
        sentence = (
            f"every gradient is {factor:.6g} times one process's: the exchange sums or divides by a wrong count; "
            "divided by that factor, all agree"
        )
        return _Ground(case, True, gap), [Cause("a wrong count", sentence, dict(rest), gap)]
    return _Ground(case, False, worst(rest)), []


def _switches(bench: Workbench, strategy: str) -> list[str]:
    """Return what can be let back in for this model, on every rank the same."""
    model = bench.job(strategy).model
    found = ["data"] * (bench.world_of(strategy).size > 1) + ["randomness"]
    found += ["statistics"] * any(isinstance(each, _BatchNorm) for each in model.modules())
    found += ["loss"] * (bench.step is None)
    return found + ["sharing"] * shares_parameters(model)


def _cause(switch: str, bench: Workbench, tensors: dict[str, float], rest: float) -> Cause:
    if switch == "loss":
        return Cause(*_loss_cause(bench), tensors, rest)
    name, sentence = {
        "data": (
            "data",
            "ranks read other samples than one process does for their shares: the data set, or the order that they are "
            "read in, is not the same on every rank, or draws from a generator of its own; seed it by the sample's "
            "index",
        ),
        "randomness": (
            "randomness",
            "the model draws random numbers, such as dropout, and each rank draws its own",
        ),
        "statistics": (
            LOCAL,
            "each replica normalises by the statistics of its own share; use --batchnorm sync, which ddp has by "
            "default, or a norm that does not look at the batch",
        ),
        "sharing": (
            "shared parameters",
            "a parameter that is used in several places is not exchanged as one; with parameters of their own in each "
            "place the gradients agree",
        ),
    }[switch]
    return Cause(name, sentence, tensors, rest, by_law=switch == "randomness")


def _loss_cause(bench: Workbench) -> tuple[str, str]:
    """Return whether the loss divides by the samples that it is given, or couples them otherwise; it is asked."""
    job = bench.job(ONE)  # rank 0 asks alone
    generator = torch.Generator().manual_seed(0)
    classes = job.config.model.classes or job.data.train.classes
    scores = torch.randn(4, classes, generator=generator, dtype=job.precision.dtype).to(job.world.device)
    labels = torch.arange(4, device=job.world.device) % classes
    together = float(job.loss_fn(scores, labels, reduction="sum"))
    one_by_one = sum(float(job.loss_fn(scores[at : at + 1], labels[at : at + 1], reduction="sum")) for at in range(4))
    if abs(4 * together - one_by_one) <= 1e-6 * abs(one_by_one):
        return (
            "a loss that divides by the local batch",
            '--loss returns the mean of the samples it is given, although reduction="sum" is asked for: ranks with '
            "other counts weigh samples differently; return the sum",
        )
    return (
        "a loss that couples samples",
        "--loss of a batch is not the sum of its samples' losses: each rank sees its share alone; this loss needs all "
        "samples in one place",
    )


def _unexplained(
    bench: Workbench, strategy: str, case: Case, rest: Mapping[str, float], tolerance: float
) -> list[Cause]:
    """Return the layer that couples the samples of a batch, or that no cause was found; on rank 0."""
    job = bench.job(ONE)
    micros = [x for x, _ in bench.read(case)]
    tensors = beyond(rest, tolerance)
    with switched(job.model, EVERYTHING, job.strategy.devices):
        is_steady = steady(job.model, micros[0]) and not draws_elsewhere(job.model, micros[0])
        parts = zip(micros, bench.rows(case), strict=True) if is_steady else ()
        coarse = float64.coarse(job, micros[0]) if job.precision.name == "fp64" else []
        # Some processors round a row otherwise in a batch of another size: float32 is no coupling in float64's digits.
        fine = max(tolerance, float64.TOLERANCE) if coarse else tolerance
        layer = next(filter(None, (coupled(job.model, x, shares, fine) for x, shares in parts)), None)
    if not is_steady:
        sentence = (
            "the model draws from NumPy's or Python's generator, or one of its own, which cannot be switched off; draw "
            "from torch's, so that the rest can be compared"
        )
        return [Cause("randomness of its own", sentence, tensors, worst(rest))]
    if layer is not None:
        sentence = (
            f"{layer}: what it makes of a sample depends on the others of the batch, and a rank has its own share alone"
        )
        return [Cause("coupled samples", sentence, tensors, worst(rest))]
    if coarse and worst(tensors) < float64.TOLERANCE:
        sentence = (
            f"the model computes a part in less than float64 ({', '.join(coarse[:3])}), whose rounding this is; "
            f"verify with --tolerance {float64.TOLERANCE:g}"
        )
        return [Cause("coarser arithmetic", sentence, tensors, worst(rest))]
    sentence = "with randomness, batch statistics, data and loss switched off on both sides, the gap stays"
    return [Cause("unexplained", sentence, tensors, worst(rest))]

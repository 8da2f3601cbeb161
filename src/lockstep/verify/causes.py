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
from typing import Any

import torch
from torch import Tensor

from .._torch import BatchNorm, TorchDispatchMode
from .gradients import ONE, TOLERANCE, Case, Workbench, beyond, gaps, ratio, worst
from .switches import EVERYTHING, Off, coupled, draws_by_itself, switched

_SWITCHED = {
    "data": (
        "data",
        "ranks read other samples than one process does for their shares: the data set, or the order that they are "
        "read in, is not the same on every rank, or draws from a generator of its own; seed it by the sample's index",
    ),
    "randomness": (
        "randomness",
        "the model draws random numbers, such as dropout, and each rank draws its own",
    ),
    "statistics": (
        "local BatchNorm",
        "each replica normalises by the statistics of its own share; use --batchnorm sync, which ddp has by default, "
        "or a norm that does not look at the batch",
    ),
}
_OF_LOSS = {
    True: (
        "a loss that divides by the local batch",
        '--loss returns the mean of the samples it is given, although reduction="sum" is asked for: ranks with other '
        "counts weigh samples differently; return the sum",
    ),
    False: (
        "a loss that couples samples",
        "--loss of a batch is not the sum of its samples' losses: each rank sees its share alone; this loss needs all "
        "samples in one place",
    ),
}
_MEAN_OF_MEANS = (
    "ranks' means are averaged, whatever their numbers of samples (a mean of means): with even shares the gradients "
    "agree; divide the summed loss by the global count instead"
)


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

    def merged(self, other: Cause) -> Cause:
        """Return the same cause as two batches show it: its part in each tensor, and what is left, at their largest."""
        both = {name: max(gap, other.tensors.get(name, 0)) for name, gap in self.tensors.items()}
        return dataclasses.replace(self, tensors=beyond(other.tensors | both, 0), rest=max(self.rest, other.rest))


Measure = Callable[..., dict[str, float]]
Agreed = Callable[[Mapping[str, float]], bool]


def find(bench: Workbench, strategy: str, case: Case, tolerance: float) -> list[Cause]:
    """Return the causes of a gap under `strategy` in `case`, one at least, on rank 0 (*collective*).

    What other ranks return says nothing.
    """

    def measured(case: Case, off: Off, *, rescaled: bool = False) -> dict[str, float]:
        theirs, ours = bench.under(strategy, case, off), bench.reference(case, off)
        return gaps(theirs, ours, ratio(theirs, ours) if rescaled and ours else 1.0)

    def agreed(found: Mapping[str, float]) -> bool:
        answer: bool = bench.world.gather(worst(found) <= tolerance)[0]  # rank 0 has measured; all go the same way
        return answer

    ground, rescaled, rest, found = case, False, measured(case, EVERYTHING), list[Cause]()
    if not agreed(rest):
        at_fault = _of_the_exchange(bench, strategy, case, measured, agreed)
        if at_fault is None:
            return [_stays(bench, case, rest, tolerance)] if bench.world.is_main else []
        ground, rescaled, left, name, sentence = at_fault
        found, rest = [Cause(name, sentence, rest, worst(left))], left
    model = bench.job(strategy).model
    there = {
        "data": bench.world_of(strategy).size > 1,
        "randomness": True,
        "statistics": any(isinstance(each, BatchNorm) for each in model.modules()),
        "loss": bench.step is None,
    }
    for switch in (name for name, is_there in there.items() if is_there):
        let_in = EVERYTHING - {switch}
        alone = measured(ground, let_in, rescaled=rescaled)
        if switch == "randomness" and agreed(alone):
            # Threads that share a generator may happen to draw what one process draws: another seed tells.
            first, second = (bench.reference(ground, let_in, seed=seed) for seed in (1, 2))
            alone = gaps(first, second)
        if not agreed(alone) and bench.world.is_main:
            name, sentence = _OF_LOSS[_divides(bench)] if switch == "loss" else _SWITCHED[switch]
            found.append(Cause(name, sentence, beyond(alone, tolerance), worst(rest)))
    if found or not bench.world.is_main:
        return found
    sentence = "nothing makes the gradients differ alone: several things do together, or they do not each time"
    return [Cause("unexplained", sentence, {}, worst(rest))]


def _of_the_exchange(
    bench: Workbench, strategy: str, case: Case, measured: Measure, agreed: Agreed
) -> tuple[Case, bool, dict[str, float], str, str] | None:
    """Return the batch on which the gradients agree, whether rescaled, what is left, and what is at fault without."""
    parts = bench.replicas * case.accumulation
    even = Case("even shares", case.start, case.start + case.size // parts * parts, case.accumulation)
    # The others that are even as well: one alone may agree by chance.
    others = [each for each in bench.cases if not each.size % (bench.replicas * each.accumulation)]
    left: dict[str, float] = {}
    if case.start < even.stop < case.stop and all(
        agreed(left := measured(each, EVERYTHING)) for each in (*others, even)
    ):
        return even, False, left, "mean of means", _MEAN_OF_MEANS
    if agreed(left := measured(case, EVERYTHING, rescaled=True)):
        theirs, ours = bench.under(strategy, case, EVERYTHING), bench.reference(case, EVERYTHING)
        sentence = (
            f"every gradient is {ratio(theirs, ours) if ours else 1.0:.6g} times one process's: the exchange sums or "
            "divides by a wrong count; divided by that factor, all agree"
        )
        return case, True, left, "a wrong count", sentence
    return None


def _divides(bench: Workbench) -> bool:
    """Return whether the loss of a batch is the mean of its samples' losses; it is asked, by rank 0 alone."""
    job = bench.job(ONE)
    generator = torch.Generator().manual_seed(0)
    classes = job.config.model.classes or job.data.train.classes
    scores = torch.randn(4, classes, generator=generator, dtype=job.precision.dtype).to(job.world.device)
    labels = torch.arange(4, device=job.world.device) % classes
    together = float(job.loss_fn(scores, labels, reduction="sum"))
    one_by_one = sum(float(job.loss_fn(scores[at : at + 1], labels[at : at + 1], reduction="sum")) for at in range(4))
    return abs(4 * together - one_by_one) <= 1e-6 * abs(one_by_one)


def _stays(bench: Workbench, case: Case, rest: Mapping[str, float], tolerance: float) -> Cause:
    """Return why a gap stays that nothing switches off, on rank 0: a layer that couples samples, if there is one."""
    job, micros, tensors = bench.job(ONE), [x for x, _ in bench.read(case)], beyond(rest, tolerance)
    with switched(job.model, EVERYTHING, job.strategy.devices):
        watch = _Watching()
        with watch, torch.no_grad():
            job.model(micros[0])
        coarse = list(watch.coarse) if job.precision.name == "fp64" else []
        # Some processors round a row otherwise in a batch of another size: float32 is no coupling in float64's digits.
        fine = max(tolerance, TOLERANCE) if coarse else tolerance
        draws = draws_by_itself(job.model, micros[0])
        parts = zip(micros, bench.rows(case), strict=True)
        layer = None if draws else next(filter(None, (coupled(job.model, x, rows, fine) for x, rows in parts)), None)
    if draws:
        name = "randomness of its own"
        sentence = (
            "the model draws from NumPy's or Python's generator, or one of its own, which cannot be switched off; draw "
            "from torch's, so that the rest can be compared"
        )
    elif layer is not None:
        name = "coupled samples"
        sentence = (
            f"{layer}: what it makes of a sample depends on the others of the batch, and a rank has its own share alone"
        )
    elif coarse and worst(tensors) < TOLERANCE:
        name = "coarser arithmetic"
        sentence = (
            f"the model computes a part in less than float64 ({', '.join(coarse[:3])}), whose rounding this is; "
            f"verify with --tolerance {TOLERANCE:g}"
        )
    else:
        name = "unexplained"
        sentence = "with randomness, batch statistics, data and loss switched off on both sides, the gap stays"
    return Cause(name, sentence, tensors, worst(rest))


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that give less than float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarse: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor) and each.is_floating_point() and each.dtype != torch.float64:
                self.coarse[func.name()] = None
        return found

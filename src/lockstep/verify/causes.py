"""Find why N ranks' gradient differs from one process's.

Each cause is switched off and the gradients are measured again. First everything that can be switched off is, on both
sides: the gradients must then agree, else the exchange itself is at fault (ranks' means are averaged, or divided by a
wrong count), which shows with even shares and in one factor common to all tensors. Then one cause at a time is switched
on again: the gap that it makes alone is its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import BatchNorm, TorchDispatchMode
from ..checkpoint.state import few
from ..config.registry import KINDS
from .model_state import ModelState
from .switches import EVERYTHING, Constants, Off, state_of_samples, switched, unsteady
from .workbench import ONE, TOLERANCE, Case, Workbench, beyond, gaps, worst

_SENTENCES = {
    "data": "ranks read other samples than one process does for their shares: the data set, or the order that they are "
    "read in, is not the same on every rank, or draws from a generator of its own; seed it by the sample's index",
    "randomness": "the model draws random numbers, such as dropout, and each rank or micro-batch draws its own",
    "local BatchNorm": "each replica normalises by the statistics of its own share; use --batchnorm sync, which ddp "
    "has by default, or a norm that does not look at the batch",
    "a loss that divides by the local batch": "--loss returns the mean of the samples it is given, although "
    'reduction="sum" is asked for: ranks with other counts weigh samples differently; return the sum',
    "a loss that couples samples": "--loss of a batch is not the sum of its samples' losses: each rank sees its share "
    "alone; this loss needs all samples in one place",
    "mean of means": "ranks' means are averaged, whatever their numbers of samples (a mean of means): with even shares "
    "the gradients agree; divide the summed loss by the global count instead",
    "a wrong count": "every gradient is {:.6g} times one process's: the exchange sums or divides by a wrong count; "
    "divided by that factor, all agree",
    "randomness of its own": "the model draws from NumPy's or Python's generator, or one of its own, which cannot be "
    "switched off; draw from torch's, so that the rest can be compared",
    "state that a forward pass changes": "{}: each pass changes it by its samples, and a rank's pass has its own share "
    "alone; compute it from all ranks' samples, or do not use it in training",
    "coupled samples": "{}: what it makes of a sample depends on the others of the batch, and a rank has its own share "
    "alone",
    "coarser arithmetic": "the model computes a part in less than float64 ({}), whose rounding this is; verify with "
    f"--tolerance {TOLERANCE:g}",
    "unexplained": "nothing that can be switched off makes the gradients differ by itself: several things do together, "
    "or not each time, or what cannot be switched off",
}


class Cause(NamedTuple):
    """One cause of a gradient difference, measured alone."""

    name: str
    sentence: str  # what it does, and what to do, without a full stop
    tensors: dict[str, float]
    """The gaps that it makes beyond the tolerance while all else is switched off, the largest first."""
    rest: float  # the largest gap that is left with it switched off, too

    def merged(self, other: Cause) -> Cause:
        """Return the cause over two batches. Takes the larger gap of each tensor and the larger rest."""
        both = {name: max(gap, other.tensors.get(name, 0)) for name, gap in self.tensors.items()}
        return self._replace(tensors=beyond(other.tensors | both, 0), rest=max(self.rest, other.rest))


def find(bench: Workbench, strategy: str, case: Case, tolerance: float) -> list[Cause]:
    """Return the causes of a gap under `strategy`. At least one, on rank 0 (*collective*).

    The return value of other ranks has no meaning.
    """
    ground, rescaled, found = case, False, list[Cause]()

    def measured(case: Case, off: Off, *, rescaled: bool = False) -> dict[str, float]:
        theirs, ours = bench.under(strategy, case, off), bench.under(ONE, case, off)
        return gaps(theirs, ours, _ratio(theirs, ours) if rescaled else 1.0)

    def agreed(gaps: Mapping[str, float]) -> bool:
        answer: bool = bench.world.gather(worst(gaps) <= tolerance)[0]  # rank 0 has measured; all go the same way
        return answer

    def add(name: str, gaps: Mapping[str, float], rest: float, *details: object) -> None:
        if bench.world.is_main:
            found.append(Cause(name, _SENTENCES[name].format(*details), beyond(gaps, tolerance), rest))

    rest = measured(case, EVERYTHING)
    if not agreed(rest):
        parts = bench.replicas * case.accumulation
        even = Case("even shares", case.start, case.start + case.size // parts * parts, case.accumulation)
        # The others that are even as well: one alone may agree by chance.
        others = [each for each in bench.cases if not each.size % (bench.replicas * each.accumulation)]
        left = dict[str, float]()
        if case.start < even.stop < case.stop and all(
            agreed(left := measured(each, EVERYTHING)) for each in (*others, even)
        ):
            ground = even
            add("mean of means", rest, worst(left))
        elif agreed(left := measured(case, EVERYTHING, rescaled=True)):
            rescaled = True
            factor = _ratio(bench.under(strategy, case, EVERYTHING), bench.under(ONE, case, EVERYTHING))
            add("a wrong count", rest, worst(left), factor)
        else:
            name, detail = _of_the_model(bench, case, rest, tolerance) if bench.world.is_main else ("unexplained", "")
            add(name, rest, worst(rest), detail)
            return found
        rest = left
    has_statistics = any(isinstance(each, BatchNorm) for each in bench.job(strategy).model.modules())
    for switch, name, is_there in (
        ("data", "data", KINDS[strategy].has_ranks and bench.world.size > 1),
        ("randomness", "randomness", True),
        ("statistics", "local BatchNorm", has_statistics),
        ("loss", "", bench.step is None),
    ):
        let_in = EVERYTHING - {switch}
        alone = measured(ground, let_in, rescaled=rescaled) if is_there else {}
        if switch == "randomness" and agreed(alone) and not bench.has_global_draws(strategy, ground):
            # Threads that share a generator may happen to draw what one process draws: another seed tells.
            first, second = (bench.under(ONE, ground, let_in, seed=seed) for seed in (1, 2))
            alone = gaps(first, second)
        if is_there and not agreed(alone) and bench.world.is_main:
            add(name or _of_the_loss(bench), alone, worst(rest))
    if not found:
        add("unexplained", {}, worst(rest))
    return found


def _ratio(theirs: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the factor k that minimizes |k × `reference` − `theirs`|². 1 where all are 0."""
    shared = [name for name in reference if name in theirs]
    square = sum(float((reference[name] ** 2).sum()) for name in shared)
    return sum(float((theirs[name] * reference[name]).sum()) for name in shared) / square if square else 1.0


def _of_the_loss(bench: Workbench) -> str:
    """Return how a loss deviates from a sum over samples. Measured on made-up scores."""
    job = bench.job(ONE)
    classes = job.config.model.classes or job.data.train.classes
    scores = torch.randn(4, classes, generator=torch.Generator().manual_seed(0), dtype=job.precision.dtype)
    scores, labels = scores.to(job.world.device), torch.arange(4, device=job.world.device) % classes
    together = float(job.loss_fn(scores, labels, reduction="sum"))
    one_by_one = sum(float(job.loss_fn(scores[at : at + 1], labels[at : at + 1], reduction="sum")) for at in range(4))
    is_mean = abs(4 * together - one_by_one) <= 1e-6 * abs(one_by_one)
    return "a loss that divides by the local batch" if is_mean else "a loss that couples samples"


def _of_the_model(bench: Workbench, case: Case, rest: Mapping[str, float], tolerance: float) -> tuple[str, str]:
    """Return the cause and place of a gap that no switch closes. Runs the model in this process."""
    job, (x, _) = bench.job(ONE), bench.read(case)
    with switched(job.model, frozenset({"statistics"}), job.method.devices), Constants():  # type: ignore[no-untyped-call]
        state = ModelState(job.model)
        with _Watching() as watch, torch.no_grad():
            job.model(x)
        state.restore()
        coarse = list(watch.coarse) if job.precision.name == "fp64" else []
        if unsteady(job.model, x, slice(None), 0.0):
            return "randomness of its own", ""
        shares = [rows for replica in range(bench.replicas) for rows in case.share(replica, bench.replicas)]
        if names := state_of_samples(job.model, x, shares[0]):
            return "state that a forward pass changes", few(names)
        # Some processors round a row otherwise in a batch of another size: float32 is no coupling in float64's digits.
        fine = max(tolerance, TOLERANCE) if coarse else tolerance
        for rows in shares:
            if layer := unsteady(job.model, x, rows, fine):
                return "coupled samples", layer
    if coarse and worst(rest) < TOLERANCE:
        return "coarser arithmetic", ", ".join(coarse[:3])
    return "unexplained", ""


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations whose results are coarser than float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarse: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor) and each.is_floating_point() and each.dtype != torch.float64:
                self.coarse[func.name()] = None
        return found

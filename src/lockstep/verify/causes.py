"""Find why N ranks' gradient differs from one process's.

First, all switchable causes are off on both sides. If the gradients still differ, the exchange is at fault: it averages
the ranks' means (even shares then agree) or divides by a wrong count (all tensors then differ by one factor). Then the
causes are switched on one at a time; the gap with a single cause on is its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import BatchNorm, TorchDispatchMode
from ..checkpoint.state import few
from ..config.registry import KINDS, RARE
from .model_state import ModelState
from .switches import EVERYTHING, Constants, Off, find_sample_state, find_unsteady_layer, switched_off
from .workbench import ONE, TOLERANCE, Case, Workbench, beyond, find_factor, gaps, worst

_SENTENCES = {
    "data": "ranks read other samples than one process does for their shares: the data set, or the order that they are "
    "read in, is not the same on every rank, or draws from an unseeded generator; seed it by the sample's index",
    "randomness": "the model draws random numbers, such as dropout, and each rank or micro-batch draws its own",
    "local BatchNorm": "each replica normalises by the statistics of its share; use --batchnorm sync, which ddp "
    "has by default, or a norm that does not look at the batch",
    "rounded exchange": "gradients travel in 16 bits between the ranks; use --exchange full",
    "low-rank exchange": "gradients travel as matrices of low rank, and ranks keep the rest for the next step; use "
    "--exchange full",
    "rare exchange": "each rank steps by its own gradients, and weights are exchanged every few steps; use --exchange "
    "full",
    "a loss that divides by the local batch": "--loss returns the mean of the samples it is given, although "
    'reduction="sum" is asked for: ranks with other counts weigh samples differently; return the sum',
    "a loss that couples samples": "--loss of a batch is not the sum of its samples' losses: each rank sees its share "
    "alone; this loss needs all samples in one place",
    "mean of means": "ranks' means are averaged, whatever their numbers of samples (a mean of means): with even shares "
    "the gradients agree; divide the summed loss by the global count instead",
    "a wrong count": "every gradient is {:.6g} times one process's: the exchange sums or divides by a wrong count; "
    "divided by that factor, all agree",
    "randomness outside torch": "the model draws from NumPy's or Python's generator, or another one that cannot be "
    "switched off; draw from torch's, so that the rest can be compared",
    "state that a forward pass changes": "{}: each pass changes it by its samples, and a rank's pass has its own share "
    "alone; compute it from all ranks' samples, or do not use it in training",
    "coupled samples": "{}: what it makes of a sample depends on the others of the batch, and a rank has its own share "
    "alone",
    "coarser arithmetic": "the model computes a part in less than float64 ({}), whose rounding this is; verify with "
    f"--tolerance {TOLERANCE:g}",
    "unexplained": "no cause that can be switched off explains the difference alone: several act together, one acts "
    "only at times, or it cannot be switched off",
}
EXCHANGES = {
    "bf16": "rounded exchange",
    "fp16": "rounded exchange",
    "powersgd": "low-rank exchange",
    **dict.fromkeys(RARE, "rare exchange"),
}
"""Causes of an exchange's own, by design."""


class Cause(NamedTuple):
    """One cause of a gradient difference, measured in isolation."""

    name: str
    sentence: str  # its effect and the remedy, without a full stop
    tensors: dict[str, float]
    """Gaps beyond the tolerance with only this cause on, the largest first."""
    residual: float  # the largest gap that remains with this cause off, too

    def merged(self, other: Cause) -> Cause:
        """Return the cause over two batches, with the larger gap of each tensor and the larger residual."""
        both = {name: max(gap, other.tensors.get(name, 0)) for name, gap in self.tensors.items()}
        return self._replace(tensors=beyond(other.tensors | both, 0), residual=max(self.residual, other.residual))


def find(bench: Workbench, strategy: str, case: Case, tolerance: float) -> list[Cause]:
    """Return the causes of a gap under `strategy` (*collective*).

    Rank 0 returns at least one; the result on other ranks has no meaning.
    """
    ground, rescaled, causes = case, False, list[Cause]()

    def measure(case: Case, off: Off, *, rescaled: bool = False) -> dict[str, float]:
        gradients, reference = bench.under(strategy, case, off), bench.under(ONE, case, off)
        return gaps(gradients, reference, find_factor(gradients, reference) if rescaled else 1.0)

    def is_within(gaps: Mapping[str, float]) -> bool:
        answer: bool = bench.world.gather(worst(gaps) <= tolerance)[0]  # rank 0 measures; all ranks take its branch
        return answer

    def add(name: str, gaps: Mapping[str, float], residual: float, *details: object) -> None:
        if bench.world.is_main:
            causes.append(Cause(name, _SENTENCES[name].format(*details), beyond(gaps, tolerance), residual))

    residual = measure(case, EVERYTHING)
    if not is_within(residual):
        parts = bench.replicas * case.accumulation
        even = Case("even shares", case.start, case.start + case.size // parts * parts, case.accumulation)
        # Test the other even batches, too: a single one may agree by chance.
        even_cases = [other for other in bench.cases if not other.size % (bench.replicas * other.accumulation)]
        remaining = dict[str, float]()
        if case.start < even.stop < case.stop and all(
            is_within(remaining := measure(even_case, EVERYTHING)) for even_case in (*even_cases, even)
        ):
            ground = even
            add("mean of means", residual, worst(remaining))
        elif is_within(remaining := measure(case, EVERYTHING, rescaled=True)):
            rescaled = True
            factor = find_factor(bench.under(strategy, case, EVERYTHING), bench.under(ONE, case, EVERYTHING))
            add("a wrong count", residual, worst(remaining), factor)
        else:
            name, detail = "unexplained", ""
            if bench.world.is_main:
                name, detail = _find_model_cause(bench, case, residual, tolerance)
            add(name, residual, worst(residual), detail)
            return causes
        residual = remaining
    exchange = EXCHANGES.get(bench.config.parallel.exchange, "")
    has_statistics = any(isinstance(module, BatchNorm) for module in bench.job(strategy).model.modules())
    for switch, name, is_present in (
        ("data", "data", KINDS[strategy].has_ranks and bench.world.size > 1),
        ("randomness", "randomness", True),
        ("statistics", "local BatchNorm", has_statistics),
        ("exchange", exchange, bool(exchange) and KINDS[strategy].has_ranks),
        ("loss", "", bench.step is None),
    ):
        off = EVERYTHING - {switch}
        alone = measure(ground, off, rescaled=rescaled) if is_present else {}
        if switch == "randomness" and is_within(alone) and not bench.has_global_draws(strategy, ground):
            # Threads that share a generator may draw the same numbers as one process by chance; compare two seeds.
            first, second = (bench.under(ONE, ground, off, seed=seed) for seed in (1, 2))
            alone = gaps(first, second)
        if is_present and not is_within(alone) and bench.world.is_main:
            add(name or _name_loss_cause(bench), alone, worst(residual))
    if not causes:
        add("unexplained", {}, worst(residual))
    return causes


def _name_loss_cause(bench: Workbench) -> str:
    """Return how the loss deviates from a sum over samples, measured on synthetic scores."""
    job = bench.job(ONE)
    classes = job.config.model.classes or job.data.train.classes
    scores = torch.randn(4, classes, generator=torch.Generator().manual_seed(0), dtype=job.precision.dtype)
    scores, labels = scores.to(job.world.device), torch.arange(4, device=job.world.device) % classes
    together = float(job.loss_fn(scores, labels, reduction="sum"))
    one_by_one = sum(
        float(job.loss_fn(scores[row : row + 1], labels[row : row + 1], reduction="sum")) for row in range(4)
    )
    is_mean = abs(4 * together - one_by_one) <= 1e-6 * abs(one_by_one)
    return "a loss that divides by the local batch" if is_mean else "a loss that couples samples"


def _find_model_cause(bench: Workbench, case: Case, residual: Mapping[str, float], tolerance: float) -> tuple[str, str]:
    """Return the cause and place of a gap that no switch closes; run the model in this process."""
    job, (x, _) = bench.job(ONE), bench.read(case)
    with switched_off(job.model, frozenset({"statistics"}), job.method.devices), Constants():  # type: ignore[no-untyped-call]
        state = ModelState(job.model)
        with _CoarseOperations() as watch, torch.no_grad():
            job.model(x)
        state.restore()
        coarse = list(watch.coarse) if job.precision.name == "fp64" else []
        if find_unsteady_layer(job.model, x, slice(None), 0.0):
            return "randomness outside torch", ""
        shares = [rows for replica in range(bench.replicas) for rows in case.share(replica, bench.replicas)]
        if names := find_sample_state(job.model, x, shares[0]):
            return "state that a forward pass changes", few(names)
        # Some processors round a row differently in a batch of another size; with float32 that is not coupling.
        fine = max(tolerance, TOLERANCE) if coarse else tolerance
        for rows in shares:
            if layer := find_unsteady_layer(job.model, x, rows, fine):
                return "coupled samples", layer
    if coarse and worst(residual) < TOLERANCE:
        return "coarser arithmetic", ", ".join(coarse[:3])
    return "unexplained", ""


class _CoarseOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations whose results are coarser than float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarse: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, Tensor) and output.is_floating_point() and output.dtype != torch.float64:
                self.coarse[func.name()] = None
        return result

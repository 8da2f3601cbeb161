"""Gradients of one config under several strategies, from the same samples.

The batches are the first of an epoch, an uneven one, its last one, and one in micro-batches. One process takes each
global micro-batch whole; the ranks take their shares, as in training.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import user_code
from .._torch import as_default_group
from ..batching import BatchPlan
from ..checkpoint.shards import full_tensor, local
from ..checks import difference
from ..checks.digest import digest
from ..config.options import override
from ..config.registry import KINDS
from ..config.schema import RunConfig
from ..errors import RequestError
from ..exchange.base import Call, Header, Part, Pass
from ..jobs.job import Job, assemble
from ..training.draws import GlobalDraws
from ..world.random_state import seed_all
from ..world.world import World
from .curve import FLOOR
from .switches import NOTHING, Off, sum_by_sample, switched_off

if TYPE_CHECKING:
    from ..data.source import Splits

Step = Callable[[nn.Module, Tensor, Tensor], None]
"""The user's training step, forward and backward: step(model, x, y) leaves gradients in the parameters."""
Micros = list[tuple[Tensor, Tensor]]
ONE = "single"
TOLERANCES = {"fp64": 1e-9}
TOLERANCE = 1e-4
"""For all other precisions: float32 has 7 digits, and sums over layers and samples lose some."""


def gaps(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor], scale: float = 1.0) -> dict[str, float]:
    """Return each tensor's largest relative difference from `gradients` ÷ `scale`, by name.

    `curve.FLOOR` bounds the divisor. Infinite if only one side has the tensor or a value is not finite.
    """
    largest = max((float(tensor.abs().max()) for tensor in reference.values() if tensor.numel()), default=0.0)
    compared = difference.compare({name: tensor / scale for name, tensor in gradients.items()}, reference)
    # NaN at the same places on both sides is no agreement.
    lost = {name: math.inf for name, tensor in reference.items() if not bool(tensor.isfinite().all())}
    return compared.sizes(FLOOR * largest or 1.0) | lost


def find_factor(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the factor k that minimizes |k × `reference` − `gradients`|²; 1 if all are 0."""
    pairs = [(gradients[name].double(), tensor.double()) for name, tensor in reference.items() if name in gradients]
    square = sum(float(b.square().sum()) for _, b in pairs)
    return sum(float((a * b).sum()) for a, b in pairs) / square if square else 1.0


def worst(sizes: Mapping[str, float]) -> float:
    """Return the largest gap; 0 without gaps."""
    return max(sizes.values(), default=0.0)


def beyond(sizes: Mapping[str, float], tolerance: float) -> dict[str, float]:
    """Return the gaps beyond `tolerance`, the largest first."""
    return {name: gap for name, gap in sorted(sizes.items(), key=lambda item: -item[1]) if gap > tolerance}


class Case(NamedTuple):
    """A global batch: positions [start, stop) of the first epoch's order."""

    name: str
    start: int
    stop: int
    accumulation: int = 1

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.stop - self.start

    def share(self, rank: int, ranks: int, devices: int = 1) -> list[slice]:
        """Return the rank's slice of each global micro-batch."""
        plan = BatchPlan(global_size=self.size, ranks=ranks, accumulation=self.accumulation, devices=devices)
        return [slice(part.start, part.stop) for part in plan.split(0, self.size, rank)]


class Workbench:
    """Measures gradients of one config under several strategies. All methods are *collective*."""

    def __init__(self, config: RunConfig, world: World, step: Step | None = None) -> None:
        """Assemble the job. `config` names the strategy of `world`'s ranks; rank 0 computes one without ranks."""
        self.config, self.world, self.step = config, world, step
        # The user's step may query torch's world size or communicate: for one process, the world is one rank.
        self._group_of_one: Any = None if world.group is None else dist.new_group([0])
        self._jobs: dict[tuple[str, bool], Job] = {}
        self._read: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._data: Splits | None = None
        first = self.job(config.parallel.strategy)
        self._data, self._order = first.data, first.order(0)
        self.replicas, self._devices = first.replicas, first.plan.devices
        size = min(config.batch.size, first.samples)
        if not 1 < self.replicas <= size:
            raise RequestError(
                f"--strategy {config.parallel.strategy} has {self.replicas} replicas here, and a batch has {size} "
                "samples: one process is what several replicas are measured against, and each needs a sample; give "
                "--devices 2 or more, or a larger --batch."
            )
        self.cases = _cases(config, first.samples, self.replicas, own_step=step is not None)
        world.together(self._check_reference)

    def job(self, strategy: str, *, is_plain: bool = False) -> Job:
        """Return the job of a strategy, with full gradients if `is_plain`; assemble it at the first call."""
        if (strategy, is_plain) not in self._jobs:
            parallel, kind = self.config.parallel, KINDS[strategy]
            overrides: dict[str, Any] = {} if kind.has_ranks else {"devices": None, "batchnorm": "auto"}
            overrides |= {"powersgd_start": None}
            if is_plain or not kind.has_ranks:
                overrides |= {"exchange": "full", "exchange_every": None, "powersgd_rank": None}
            if kind.drives_all and not kind.has_ranks:
                overrides["devices"] = parallel.devices or self.world.size
            # Each case has its own micro-batches.
            config = override(self.config, strategy=strategy, accumulate=None, micro_batch=None, **overrides)
            world = self.world if kind.has_ranks else World.alone(self.world.device)
            self._jobs[strategy, is_plain] = assemble(config, world, data=self._data)
        return self._jobs[strategy, is_plain]

    def close(self) -> None:
        """Close the data set."""
        if self._data is not None:
            self._data.close()

    def under(self, strategy: str, case: Case, off: Off = NOTHING, *, seed: int | None = None) -> dict[str, Tensor]:
        """Return the gradients under `strategy` by name; empty on ranks that take no part.

        `seed` sets the model's randomness.
        """
        if KINDS[strategy].has_ranks:
            is_plain = "exchange" in off and self.config.parallel.exchange != "full"
            job, micros = self.job(strategy, is_plain=is_plain), self._share(case, same="data" in off)
            return self._compute(job, micros, case, off, seed=seed)
        if not self.world.is_main:
            return {}
        with nullcontext() if self._group_of_one is None else as_default_group(self._group_of_one):
            x, y = self.read(case)
            micros = [(x[rows], y[rows]) for rows in case.share(0, 1)]
            return self._compute(self.job(strategy), micros, case, off, seed=seed)

    def has_global_draws(self, strategy: str, case: Case) -> bool:
        """Whether draws under `strategy` equal one process's; never in micro-batches or threads."""
        is_alike = KINDS[strategy].process_per_device or strategy == ONE
        return self.config.batch.draws == "global" and is_alike and case.accumulation == 1

    def _check_reference(self) -> None:
        """Raise `RequestError` if one process has no usable gradients."""
        try:
            gradients = self.under(ONE, self.cases[0])
        except RequestError:
            raise
        except Exception as error:  # any error of a model, a loss or a step in one process
            raise RequestError(f"One process's step {user_code.raised(error)}; there is nothing to compare.") from error
        if self.world.is_main and not gradients:
            raise RequestError("--step leaves no gradient in the model's parameters: it has to call backward().")
        if names := [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]:
            raise RequestError(
                f"One process's gradients are not finite numbers ({', '.join(names[:3])}): nothing can be compared; "
                "look at the data, and at what the model divides by or takes the root of."
            )

    def read(self, case: Case) -> tuple[Tensor, Tensor]:
        """Return the global batch as this rank reads it. x is (n, …), y (n,)."""
        span = (case.start, case.stop)
        if span not in self._read:
            (self._read[span],) = self._fetch(case, [slice(0, case.size)])
        return self._read[span]

    def _share(self, case: Case, *, same: bool) -> Micros:
        """Return this rank's shares. With `same`, rank 0 reads for all ranks."""
        parts = case.share(self.world.rank, self.world.size, self._devices)
        if not same:
            return self._fetch(case, parts)
        x, y = self.read(case)
        self.world.broadcast([x, y])
        return [(x[rows], y[rows]) for rows in parts]

    def _fetch(self, case: Case, parts: Sequence[slice]) -> Micros:
        assert self._data is not None
        indices = [self._order.indices(case.start + part.start, case.start + part.stop) for part in parts]
        return [(x.clone(), y.clone()) for x, y, _ in self._data.train.stream(indices, epoch=0)]

    def _compute(self, job: Job, micros: Micros, case: Case, off: Off, *, seed: int | None = None) -> dict[str, Tensor]:
        job.model.zero_grad()
        loss_fn = sum_by_sample(job.loss_fn) if "loss" in off else job.loss_fn
        with switched_off(job.model, off, job.method.devices), warnings.catch_warnings(), ExitStack() as stack:
            warnings.filterwarnings("ignore", message="Grad strides do not match")  # a matter of speed
            job.exchange.load_state({})  # each batch is a first one
            if seed is not None:
                seed_all(seed)
            elif self.config.batch.draws == "global" and case.accumulation == 1:
                (rows,) = case.share(job.world.rank, job.world.size)
                draws = GlobalDraws(job.world, self.config.seed)
                draws.begin(rows.start, rows.stop - rows.start, case.size, 0)
                stack.callback(draws.end)
            if self.step is None:
                dataclasses.replace(job, loss_fn=loss_fn).train_step(case.size, micros)
            else:
                part = Part()
                for number, (x, y) in enumerate(micros, start=1):
                    run = partial(_run_step, self.step, job.replica, x, y)
                    one = Pass(run, part, Header(Call.BACKWARD.kind, number), 0.0, number == len(micros))
                    if job.exchange.backward(one) is not None and job.world.size > 1:
                        # As DistributedDataParallel does: the mean of the ranks' means.
                        job.exchange.divide(part, torch.tensor(float(job.world.size)))
        weights = job.model.named_parameters(remove_duplicate=False)
        gradients = {name: full_tensor(weight.grad).clone() for name, weight in weights if weight.grad is not None}
        job.model.zero_grad()
        return gradients


def _cases(config: RunConfig, samples: int, replicas: int, *, own_step: bool) -> list[Case]:
    """Return the batches to compare. The user's step gets none in micro-batches."""
    size, last, parts = min(config.batch.size, samples), samples % config.batch.size, config.batch.accumulate or 2
    cases = [Case("the first batch", 0, size)]
    if size % replicas == 0 and size > replicas:
        cases.append(Case("an uneven batch", 0, size - 1))
    if replicas <= last < samples and not config.batch.drop_last:
        cases.append(Case("the epoch's last batch", samples - last, samples))
    if not own_step and size // parts >= replicas and parts > 1:
        cases.append(Case(f"{parts} micro-batches", 0, size, parts))
    return cases


def _run_step(step: Step, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run the user's step; refuse one that changes the weights."""
    weights = [local(parameter) for parameter in model.parameters()]
    weights_digest = int(digest(weights))
    try:
        step(model, x, y)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, ImportError) as error:
        raise RequestError(f"--step {user_code.raised(error)}; it is called as step(model, x, y).") from error
    if int(digest(weights)) != weights_digest:
        raise RequestError(
            "--step changes the model's weights: leave optimizer.step() out; it runs forward and backward, and leaves "
            "gradients in the parameters."
        )

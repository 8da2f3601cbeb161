"""The gradient of N ranks, under each strategy, against the one of a single process: on the user's model and data.

Both compute the same global batches: the first of an epoch, an uneven one, and one in several micro-batches. One
process takes each global micro-batch whole; the ranks take their shares, as in training. In float64 the two agree but
for rounding, about 1e-15 of the largest gradient, or something makes N devices train another model.

A `Workbench` measures, with whatever is switched off on both sides; `causes` asks it why.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from .. import own
from ..batching import BatchPlan
from ..config import RunConfig
from ..engine import train_step
from ..errors import RequestError
from ..job import Job, assemble
from ..kinds import KINDS
from ..randomness import seed_all
from ..verify.digest import digest
from ..world import World
from .cases import Case, cases
from .gaps import Gradients
from .switches import NOTHING, Off, by_sample, switched, untied

if TYPE_CHECKING:
    from ..data.source import Splits

Step = Callable[[nn.Module, Tensor, Tensor], None]
"""A training step of the user's own, forward and backward: step(model, x, y) leaves gradients in the parameters."""
Micros = list[tuple[Tensor, Tensor]]
ONE = "single"


class Workbench:
    """Measures gradients of one config under several strategies on the same data. All methods are *collective*."""

    def __init__(self, config: RunConfig, world: World, step: Step | None = None) -> None:
        """`config` names the strategy of `world`'s ranks; one without ranks is computed by rank 0 alone."""
        self.config = config
        self.world = world
        self.step = step
        self._own_step = None if step is None else _asked(step)
        self._alone = World.alone(world.device)
        # A step of the user's own may ask torch for the world's size, or exchange something: one process has one rank.
        self._group_of_one: Any = None if world.group is None else dist.new_group([0])
        self.unused: list[str] = []
        """Parameters that the loss does not reach on some rank in some case."""
        self._jobs: dict[tuple[str, bool], Job] = {}
        self._read: dict[Case, Micros] = {}
        self._data: Splits | None = None
        first = self.job(config.parallel.strategy)
        self._data = first.data
        self.replicas = first.replicas
        self._devices = first.plan.devices
        if self.replicas < 2:
            raise RequestError(
                f"--strategy {config.parallel.strategy} has one replica here, and one process is what it is measured "
                "against; give --devices 2 or more."
            )
        self.cases = cases(config, first.samples, self.replicas, own_step=step is not None)
        self._check_reference()
        if first.world.size > 1:
            self.unused = self._unreached(first)
        if self.unused:
            self._jobs.clear()  # of a strategy whose ranks would wait for those gradients for ever

    def job(self, strategy: str, *, apart: bool = False) -> Job:
        """Return the job of a strategy; `apart` gives each place in the model parameters of its own."""
        key = (strategy, apart)
        if key not in self._jobs:
            parallel = dataclasses.replace(self.config.parallel, strategy=strategy)
            kind = KINDS[strategy]
            if kind.has_ranks:
                parallel = dataclasses.replace(parallel, find_unused=parallel.find_unused or bool(self.unused))
            elif kind.drives_all:
                parallel = dataclasses.replace(parallel, devices=parallel.devices or self.world.size)
            else:
                parallel = dataclasses.replace(parallel, devices=None, batchnorm="auto")
            batch = dataclasses.replace(self.config.batch, accumulate=None, micro_batch=None)  # each case has its own
            config = dataclasses.replace(self.config, parallel=parallel, batch=batch)
            make = functools.partial(assemble, config, self.world_of(strategy), data=self._data)
            self._jobs[key] = make(prepare=untied) if apart else make()
        return self._jobs[key]

    def world_of(self, strategy: str) -> World:
        """Return the ranks that compute under `strategy`: all, or each by itself."""
        return self.world if KINDS[strategy].has_ranks else self._alone

    def close(self) -> None:
        """End what the data set keeps running."""
        for job in self._jobs.values():
            job.data.close()

    def reference(self, case: Case, off: Off = NOTHING, *, seed: int | None = None) -> Gradients:
        """Return one process's gradients, on rank 0; nothing on others. `seed` is of the model's own randomness."""
        if not self.world.is_main:
            return {}
        job = self.job(ONE, apart=off.sharing)
        with self._by_itself():
            return self._compute(job, self.read(case), case, off, seed=seed)

    def under(self, strategy: str, case: Case, off: Off = NOTHING) -> Gradients:
        """Return the gradients under `strategy` as rank 0 has them; nothing on ranks that have no part in it."""
        if KINDS[strategy].has_ranks:
            job = self.job(strategy, apart=off.sharing)
            return self._compute(job, self.share(case, same=off.data), case, off)
        if not self.world.is_main:
            return {}
        with self._by_itself():
            return self._compute(self.job(strategy, apart=off.sharing), self.read(case), case, off)

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Let this process, rank 0, be the only one that torch knows of within the block."""
        if self._group_of_one is None:
            yield
            return
        whole = dist.group.WORLD
        dist.distributed_c10d._update_default_pg(self._group_of_one)
        try:
            yield
        finally:
            dist.distributed_c10d._update_default_pg(whole)

    def _check_reference(self) -> None:
        """Raise `RequestError`, on every rank, where one process has no gradients to compare with."""

        def attempt() -> None:
            try:
                found = self.reference(self.cases[0])
            except RequestError:
                raise
            except Exception as error:  # whatever a model, a loss or a step raises that one process runs by itself
                whose = "--step" if self.step else f"One process's step of --model {self.config.model.name}"
                raise RequestError(f"{whose} {own.raised(error)}; there is nothing to compare.") from error
            if self.world.is_main and not found:
                raise RequestError(
                    "--step leaves no gradient in the model's parameters: it has to call backward(), and to leave what "
                    "that gives."
                )
            if names := [name for name, each in found.items() if not bool(each.isfinite().all())]:
                raise RequestError(
                    f"One process's gradients are not finite numbers ({', '.join(names[:3])}): nothing can be "
                    "compared; look at the data, and at what the model divides by or takes the root of."
                )

        self.world.together(attempt)

    def _unreached(self, job: Job) -> list[str]:
        """Return the parameters that some rank's share of some case does not reach."""
        alone = dataclasses.replace(job, replica=job.model)  # which exchanges no gradients, and so waits for none
        names: dict[str, None] = {}
        for case in self.cases:
            found = self._compute(alone, self.share(case, same=True), case, NOTHING, exchanges=False)
            own = [name for name, each in job.model.named_parameters() if each.requires_grad and name not in found]
            names |= dict.fromkeys(name for theirs in self.world.gather(own) for name in theirs)
        return list(names)

    def read(self, case: Case) -> Micros:
        """Return the global micro-batches as this rank reads them: x (n, …) and y (n,) of each."""
        if case not in self._read:
            self._read[case] = self._fetch(case, BatchPlan(global_size=case.size, ranks=1, accumulation=1), 0)
        return self._read[case]

    def share(self, case: Case, *, same: bool = False) -> Micros:
        """Return this rank's shares as it reads them, or, `same` on all ranks, as rank 0 does."""
        plan = BatchPlan(
            global_size=case.size, ranks=self.world.size, accumulation=case.accumulation, devices=self._devices
        )
        if not same:
            return self._fetch(case, plan, self.world.rank)
        whole = self.read(case)
        for x, y in whole:
            self.world.broadcast([x, y])
        positions = plan.split(case.start, case.stop, self.world.rank)
        starts = [part.start for part in dataclasses.replace(plan, ranks=1, devices=1).split(case.start, case.stop, 0)]
        return [
            (x[part.start - start : part.stop - start], y[part.start - start : part.stop - start])
            for (x, y), part, start in zip(whole, positions, starts, strict=True)
        ]

    def rows(self, case: Case) -> list[list[slice]]:
        """Return of each global micro-batch which of its rows each replica has."""
        plan = BatchPlan(global_size=case.size, ranks=self.replicas, accumulation=case.accumulation)
        by_rank = [plan.split(0, case.size, rank) for rank in range(self.replicas)]
        return [
            [slice(share.start - shares[0].start, share.stop - shares[0].start) for share in shares]
            for shares in zip(*by_rank, strict=True)
        ]

    def _fetch(self, case: Case, plan: BatchPlan, rank: int) -> Micros:
        job = next(iter(self._jobs.values()))
        plan = dataclasses.replace(plan, accumulation=case.accumulation)
        order = job.order(0)
        parts = [order.indices(part.start, part.stop) for part in plan.split(case.start, case.stop, rank)]
        return [(x.clone(), y.clone()) for x, y, _ in job.data.train.stream(parts, epoch=0)]

    def _compute(
        self, job: Job, micros: Micros, case: Case, off: Off, *, exchanges: bool = True, seed: int | None = None
    ) -> Gradients:
        job.model.zero_grad()
        loss_fn = by_sample(job.loss_fn) if off.loss else job.loss_fn
        parts = [(x, y, number == len(micros)) for number, (x, y) in enumerate(micros, 1)]
        with switched(job.model, off, job.strategy.devices), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Grad strides do not match")  # a matter of speed
            if seed is not None:
                seed_all(seed)
            if self.step is None and exchanges:
                train_step(dataclasses.replace(job, loss_fn=loss_fn), case.size, micros)
            else:
                for x, y, _ in parts:
                    (self._own_step or _plain_step)(job.replica, x, y)
        named = job.model.named_parameters(remove_duplicate=False)
        found = {name: each.grad.detach().clone() for name, each in named if each.grad is not None}
        job.model.zero_grad()
        return found


def _asked(step: Step) -> Step:
    """Return the user's step, which is refused where it raises or changes the weights.

    What torch raises where ranks do not meet is no fault of the step alone, and passes through.
    """

    def taken(model: nn.Module, x: Tensor, y: Tensor) -> None:
        weights = [each.detach() for each in model.parameters()]
        before = int(digest(weights))
        try:
            step(model, x, y)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, ImportError) as error:
            raise RequestError(f"--step {own.raised(error)}; it is called as step(model, x, y).") from error
        if int(digest(weights)) != before:
            raise RequestError(
                "--step changes the model's weights: leave optimizer.step() out; it runs forward and backward, and "
                "leaves gradients in the parameters."
            )

    return taken


def _plain_step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model(x).sum().backward()

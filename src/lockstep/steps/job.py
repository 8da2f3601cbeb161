"""Assembly: from a config and a world to all the parts that the loop needs, each whole."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from .._torch import BatchNorm
from ..batching import BatchPlan, most_ranks
from ..checkpoint import resume
from ..checkpoint.state import check_fits
from ..config import registry
from ..config.schema import BatchConfig, ParallelConfig, RunConfig
from ..data import sets
from ..data.order import Order
from ..data.share import Micro
from ..errors import RequestError, counted
from ..models import table as models_table
from ..models import trial
from ..models.weights import seed_weights
from ..monitor.progress import SETUP
from ..nn import sync_batchnorm
from ..strategies import table as strategies
from ..strategies.base import Strategy
from ..training import losses, optim
from ..training.losses import LossFunction
from ..training.optim import Average, Optimizers
from ..training.precision import Precision
from ..world.random_state import seed_all
from ..world.world import World
from .prepared import Prepared
from .start import Taken, freeze
from .start import load as load_weights

if TYPE_CHECKING:
    from ..data.source import Splits


@dataclass(frozen=True)
class Job:
    """All that the training loop needs. `model` is the user's module, `replica` what the strategy made of it."""

    config: RunConfig
    world: World
    plan: BatchPlan
    data: Splits
    strategy: Strategy
    precision: Precision
    model: nn.Module
    replica: nn.Module
    optimizer: Optimizers
    lr: Callable[[int], float]
    """Learning rate at an optimizer step, counted from 0."""
    average: Average | None
    loss_fn: LossFunction
    batchnorm: str
    """sync, local, or none where the model has no batch statistics."""
    taken: Taken | None
    """What a new run's weights come from, where that is not the seed alone."""

    @property
    def samples(self) -> int:
        """Samples in the training set."""
        return len(self.data.train)

    @property
    def stands_in(self) -> bool:
        """A share without samples is computed as one of size 0."""
        return False

    def steps(self) -> int:
        """Return the optimizer steps of an epoch."""
        return self.plan.steps(self.samples, drop_last=self.config.batch.drop_last)

    @property
    def replicas(self) -> int:
        """Copies of the model that share out a micro-batch: one for each device of each rank."""
        return self.world.size * len(self.strategy.devices)

    @property
    def evaluated_model(self) -> nn.Module:
        """The module that evaluation uses: the averaged weights where there are any."""
        return self.model if self.average is None else self.average.module

    @property
    def eval_batch(self) -> int:
        """Samples that a rank evaluates at once."""
        parts = self.replicas * self.plan.accumulation
        return self.config.batch.eval_batch or -(-self.plan.global_size // parts)

    def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the loss over the samples x (n, …), y (n,), and the logits; n may be 0."""
        with self.precision.autocast():
            logits = self.replica(x)
            return self.loss_fn(logits, y, reduction="sum"), logits

    def prepared(self) -> Prepared:
        """Return the job's parts as a session takes them."""
        found = Prepared(self.config, self.world)
        found.add_model(self.model)
        found.optimizers.extend(self.optimizer.each)
        found.strategy, found.replica, found.average = self.strategy, self.replica, self.average
        found.batchnorm, found.source = self.batchnorm, self
        return found

    def order(self, epoch: int) -> Order:
        """Return the order of the training samples in `epoch`."""
        return Order(self.samples, seed=self.config.seed, epoch=epoch)

    def indices(self, step: int) -> list[np.ndarray]:
        """Return the samples that this rank computes at optimizer step `step`, by global micro-batch.

        Of a part of a set, such as what --holdout leaves, they have the whole set's numbers.
        """
        epoch, within = divmod(step, self.steps())
        order = self.order(epoch)
        shares = self.plan.split(*self.plan.batch(within, self.samples), self.world.rank)
        parts = [order.indices(share.start, share.stop) for share in shares]
        numbers = getattr(self.data.train, "indices", None)
        return parts if numbers is None else [numbers[part] for part in parts]

    def micros(self, epoch: int, *, first: int = 0) -> Generator[Micro, None, None]:
        """Yield this rank's share, (x, y), of each global micro-batch of `epoch`, from its step `first` on."""
        order, drop_last = self.order(epoch), self.config.batch.drop_last
        # One at a time, here and where they are read ahead: an epoch of 10⁹ samples has millions of steps.
        shares, ahead = (
            self.plan.shares(self.samples, self.world.rank, first=first, drop_last=drop_last) for _ in range(2)
        )
        stream = self.data.train.stream((order.indices(start, stop) for start, stop, *_ in ahead), epoch=epoch)
        try:
            for (_, _, total, last), (x, y, indices) in zip(shares, stream, strict=False):
                yield Micro((x, y), len(indices), total, last, indices)
        finally:
            stream.close()


def assemble(
    config: RunConfig,
    world: World,
    *,
    accumulation: int | None = None,
    only_evaluates: bool = False,
    data: Splits | None = None,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    weights: dict[str, Tensor] | None = None,
) -> Job:
    """Return the job that `config` asks for (*collective*).

    `accumulation` is the number of global micro-batches of a run that is being continued: it is part of the model,
    and stays whatever the world has become, unless --micro-batch forbids shares so large. A job that only evaluates
    has no batch that leaves a rank empty. `data` is this rank's, where another job has it already, and `prepare`
    changes the model before anything rests on it; `weights` are those that it will get, and it is only built where they
    fit. Raises `RequestError` for what cannot be honoured.
    """
    world.pulse.enter(SETUP)
    asked = config.batch
    strategy = strategies.build(config.parallel, world)
    _check_alike(world, strategy)
    devices = 1 if only_evaluates else len(strategy.devices)  # an evaluation uses the first
    plan = _plan(asked, accumulation, world.size, devices)
    precision = Precision.of(config.precision, world.device)
    found = world.gather(precision.name)
    if len(set(found)) > 1:
        raise RequestError(
            f"--precision auto came to {' and '.join(sorted(set(found)))} on the ranks' different hardware; name one."
        )
    data = data or sets.build(
        config.data, seed=config.seed, world=world, dtype=precision.dtype, channels_last=precision.channels_last
    )
    if plan.steps(len(data.train), drop_last=asked.drop_last) == 0:
        raise RequestError(
            f"--drop-last leaves no step: the training set has {len(data.train)} samples and the global batch is "
            f"{asked.size}; use --batch {len(data.train)} or less."
        )
    model, batchnorm = _model(config, world, strategy, data, prepare, weights)
    _check_nodes(config.parallel, strategy, batchnorm)
    classes = config.model.classes or data.train.classes
    loss_fn = losses.build(config.optim, classes=classes, device=world.device, dtype=precision.dtype)
    if world.device.type == "cpu" and precision.channels_last and not config.precision.compile:
        model = sync_batchnorm.fold(model)
    model = precision.place(model, world.device)
    # Where it goes on from a checkpoint, that has all; what it began with may be gone.
    is_new = not only_evaluates and all(world.gather(resume.source(config) is None))
    taken = load_weights(config.model, model, world) if is_new else None
    train = data.train
    empty = not only_evaluates and plan.leaves_ranks_empty(len(train), drop_last=asked.drop_last)
    with precision.autocast():
        trial.check(config.model.name, model, classes=train.classes, shape=train.shape, dtype=train.dtype, empty=empty)
    if config.precision.compile:
        model.compile()
    replica = strategy.wrap(model)
    optimizer = optim.build(model, config.optim)  # of the parameters that the strategy left there
    # From here on the generators serve the model's own randomness alone, which each rank draws for itself.
    seed_all(config.seed, world.rank, devices=strategy.devices)
    peak = optim.peak_lr(config.optim, plan.global_size)
    steps_per_epoch = plan.steps(len(data.train), drop_last=asked.drop_last)
    factor = optim.schedule(config.optim, steps_per_epoch=steps_per_epoch, epochs=config.epochs)
    return Job(
        config=config,
        world=world,
        plan=plan,
        data=data,
        strategy=strategy,
        precision=precision,
        model=model,
        replica=replica,
        optimizer=optimizer,
        lr=lambda step: peak * factor(step),
        average=None if config.optim.ema is None else Average(model, config.optim.ema),
        loss_fn=loss_fn,
        batchnorm=batchnorm,
        taken=taken,
    )


def _check_alike(world: World, strategy: Strategy) -> None:
    """Raise, on every rank, where a rank drives other numbers of devices than rank 0: shares follow (*collective*)."""
    first, *others = world.gather(len(strategy.devices))
    for rank, count in enumerate(others, start=1):
        if count != first:
            raise RequestError(
                f"Rank {rank} drives {counted(count, 'device')} and rank 0 {first}, and a batch is shared out evenly: "
                "give every rank as many devices, by --devices or --gpus."
            )


def _check_ranks(global_size: int, accumulation: int, ranks: int, devices: int) -> None:
    """Raise where a continued run's micro-batches, which stay as they are, are too small for so many ranks."""
    micro = global_size // accumulation
    most = most_ranks(micro, devices)
    if ranks > most:
        raise RequestError(
            f"The run was begun with {accumulation} global micro-batches of {micro} samples or more, which are part of "
            f"the model, and some of {ranks} ranks would get no sample of them; continue on {most} ranks or fewer."
        )


def _plan(asked: BatchConfig, accumulation: int | None, ranks: int, devices: int) -> BatchPlan:
    """Return the plan for these ranks, with `accumulation` global micro-batches where a continued run has so many."""
    if accumulation is not None:
        _check_ranks(asked.size, accumulation, ranks, devices)
        kept = BatchPlan.solve(asked.size, ranks, accumulation=accumulation, devices=devices)
        if asked.micro_batch is None or kept.largest_share <= asked.micro_batch:
            return kept
    return BatchPlan.solve(
        asked.size, ranks, micro_size=asked.micro_batch, accumulation=asked.accumulate, devices=devices
    )


def _check_nodes(parallel: ParallelConfig, strategy: Strategy, batchnorm: str) -> None:
    """Raise where the number of nodes may change and the model depends on it: the next start would be refused."""
    if batchnorm == "local" and parallel.nodes != parallel.most_nodes:
        way = "--batchnorm sync" if strategy.can_sync_batchnorm else f"--strategy {registry.per_device()}"
        raise RequestError(
            f"--nodes {parallel.nodes_asked} lets the number of nodes change, and batch statistics of each replica "
            f"make the model depend on it; use {way}, a model without batch statistics, or a fixed number of nodes."
        )


def _model(
    config: RunConfig,
    world: World,
    strategy: Strategy,
    data: Splits,
    prepare: Callable[[nn.Module], nn.Module],
    weights: dict[str, Tensor] | None,
) -> tuple[nn.Module, str]:
    """Return the model with the batch statistics asked for, and which they are."""
    classes = config.model.classes or data.train.classes
    if classes < data.train.classes:
        raise RequestError(
            f"--classes {classes} is less than the {data.train.classes} classes of {config.data.name}: labels would "
            f"lie outside the model's outputs; use {data.train.classes} or more."
        )
    if weights is not None and ":" not in config.model.name:
        with torch.device("meta"):  # no memory: a foreign run may name a model of any size
            skeleton = models_table.build_for(config.model.name, classes=classes, shape=data.train.shape)
        check_fits(skeleton, weights)
    seed_weights(config.seed)  # every rank draws the same ones
    model = prepare(models_table.build_for(config.model.name, classes=classes, shape=data.train.shape))
    trial.check_parts(config.model.name, model)
    freeze(model, config.model.freeze)
    asked = config.parallel.batchnorm
    if asked == "sync" and not strategy.can_sync_batchnorm:
        raise RequestError(
            f"--batchnorm sync cannot work under --strategy {strategy.name}, whose replicas compute their own batch "
            f"statistics in one process; use --batchnorm local, or --strategy {registry.per_device()}."
        )
    if untracked := sync_batchnorm.untracked(model):
        raise RequestError(
            f"--model {config.model.name} has batch norms without running statistics ({', '.join(untracked[:3])}), "
            "with which an evaluation depends on how the samples fall into batches and on the number of ranks; give "
            "them track_running_stats=True, or use another norm."
        )
    if not any(isinstance(each, BatchNorm) and each.training for each in model.modules()):
        return model, "none"  # the frozen ones are as in an evaluation
    if asked == "local" or not strategy.can_sync_batchnorm:
        return model, "local"
    return sync_batchnorm.convert(model, world), "sync"

"""Assembly of a classifier's training job from a config and a world."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import cuda
from .._torch import BatchNorm
from ..batching import BatchPlan, Share
from ..checkpoint import resume
from ..checkpoint.state import State, check_fits
from ..config import registry
from ..config.schema import BatchConfig, RunConfig, rules_out_graphs
from ..data import sets
from ..data.folder import Look
from ..data.mixing import Mixing
from ..data.order import Order
from ..data.share import Micro
from ..errors import RequestError
from ..exchange import method as methods
from ..exchange import replicas
from ..exchange.base import Call, Header, Part, Pass
from ..exchange.method import Method
from ..files import shown, understanding
from ..models import table as models_table
from ..models import trial
from ..monitor.progress import SETUP
from ..nn import sync_batchnorm
from ..nn.recompute import Recomputation
from ..runs.prepared import Prepared, Source
from ..training import losses, memory, optim
from ..training.graphs import Graphs
from ..training.losses import LossFunction
from ..training.memory import MemoryWatch, fitted
from ..training.optim import Average
from ..training.precision import Precision
from ..world.random_state import seed_all, seed_weights
from ..world.world import World
from .initial import InitialWeights, freeze, load_weights

if TYPE_CHECKING:
    from ..data.source import Fetched, Splits
    from ..data.source import Source as Data


@dataclass(kw_only=True)
class Job(Prepared):
    """A classifier's training job: a session's parts, its data and its loss. Yields its own batches."""

    method: Method
    replica: nn.Module
    """Module to call in place of `model`; may split its input over several devices, or run a CUDA graph."""
    plan: BatchPlan
    data: Splits
    lr: Callable[[int], float]
    loss_fn: LossFunction
    mixing: Mixing | None
    initial_weights: InitialWeights | None  # of a new run, if not from the seed alone

    @property
    def source(self) -> Source:
        """The job itself."""
        return self

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        return self.models["model"]

    @property
    def devices(self) -> Sequence[torch.device]:
        """Devices that this process computes on."""
        return self.method.devices

    def copies(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the weights on this process's further devices."""
        return replicas.copies(self.model, self.method.devices)

    @property
    def samples(self) -> int:
        """Samples in the training set."""
        return len(self.data.train)

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"names": [*self.data.names]}

    @property
    def index_bound(self) -> int:
        """Exclusive upper bound of the sample indices."""
        return self.samples

    def loss(self, x: Tensor, y: Tensor, *, reduction: str = "sum") -> tuple[Tensor, Tensor]:
        """Return (loss, logits). x is (n, …), y (n,), logits (n, classes)."""
        return _loss(self.precision, self.loss_fn, self.replica, x, y, reduction=reduction)

    def train_step(self, count: int, shares: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Compute the gradients of a batch of `count` samples. `shares` are each micro-batch's (x, y), n > 0."""
        batch, part = list(shares), Part()
        for number, (x, y) in enumerate(batch, start=1):
            loss, _ = self.loss(x, y)
            is_last = number == len(batch)
            run = partial(self.precision.backward, loss, 1 / count)
            self.exchange.backward(Pass(run, part, Header(Call.BACKWARD.kind, number), 0.0, is_last))

    def steps(self) -> int:
        """Return the number of optimizer steps per epoch."""
        return self.plan.steps(self.samples, drop_last=self.config.batch.drop_last)

    def order(self, epoch: int) -> Order:
        """Return the order of the training samples in `epoch`."""
        return Order(self.samples, seed=self.config.seed, epoch=epoch)

    def epoch_order(self, epoch: int) -> Callable[[int, int], np.ndarray]:
        """Return the order of `epoch`: a function from positions [start, stop) to sample indices."""
        return self.order(epoch).indices

    def indices(self, step: int) -> list[np.ndarray]:
        """Return this rank's sample indices at `step`, by micro-batch. Indices refer to the whole data set."""
        epoch, within = divmod(step, self.steps())
        order = self.order(epoch)
        shares = self.plan.split(*self.plan.batch(within, self.samples), self.world.rank)
        parts = [order.indices(share.start, share.stop) for share in shares]
        numbers = getattr(self.data.train, "indices", None)
        return parts if numbers is None else [numbers[part] for part in parts]

    def micros(self, epoch: int, *, first: int = 0, again: int = 0) -> Generator[Micro, None, None]:
        """Yield this rank's shares of an epoch's micro-batches. `Micro.batch` is (x, y); `first` is the first step.

        y is (n, classes) of mixed samples.
        """
        order, drop_last = self.order(epoch), self.config.batch.drop_last
        # Lazily, also for reading ahead: an epoch of 10⁹ samples has millions of steps.
        shares, ahead = (
            self.plan.shares(self.samples, self.world.rank, first=first, drop_last=drop_last) for _ in range(2)
        )
        stream = self.data.train.stream(map(partial(self._indices, order), ahead), epoch=epoch)
        try:
            yield from map(partial(self._micro, epoch), shares, stream)
        finally:
            stream.close()

    def _indices(self, order: Order, share: Share) -> np.ndarray:
        if self.mixing is not None:
            return self.mixing.indices(order.indices, self.plan, share, self.samples)
        return order.indices(share.start, share.stop)

    def _micro(self, epoch: int, share: Share, fetched: Fetched) -> Micro:
        x, y, indices = fetched
        if self.mixing is not None:
            x, y = self.mixing(x, y, epoch=epoch, step=share.step)
            indices = indices[1:]
        return Micro((x, y), share, indices[: share.size])


def _loss(
    precision: Precision, loss_fn: LossFunction, model: nn.Module, x: Tensor, y: Tensor, *, reduction: str = "sum"
) -> tuple[Tensor, Tensor]:
    with precision.autocast():
        logits = model(x)
        return loss_fn(logits, y, reduction=reduction), logits


def _try_share(
    model: nn.Module, loss_of: Callable[..., tuple[Tensor, Tensor]], data: Data, has_average: bool, samples: int
) -> None:
    """Compute the gradients of so many samples, and drop them."""
    device = next(model.parameters()).device
    with memory.unchanged(model, has_average=has_average):
        x = torch.zeros((samples, *data.shape), dtype=data.dtype, device=device)
        loss, _ = loss_of(model, x, torch.zeros(samples, dtype=torch.int64, device=device))
        torch.autograd.backward(loss)


def _record_graphs(
    config: RunConfig, model: nn.Module, precision: Precision, plan: BatchPlan, data: Data, world: World
) -> Graphs:
    """Return the model by CUDA graphs (*collective*). Raises `RequestError` where there can be none."""
    if not cuda.has_graphs(world.device):
        raise RequestError(f"--cuda-graphs needs CUDA or ROCm, and this rank has {world.device.type}; leave it out.")
    if other := rules_out_graphs(config):
        raise RequestError(f"{other} rules out --cuda-graphs.")
    graphs = Graphs(model, precision.half, world.device)
    layout = torch.channels_last if precision.channels_last and len(data.shape) == 3 else torch.contiguous_format
    # Every rank records all ranks' sizes, since a pass may exchange batch statistics.
    shares = (share for rank in range(plan.ranks) for share in plan.batch_shares(plan.global_size, rank))
    for size in sorted({share.size for share in shares}):
        x = torch.zeros((size, *data.shape), dtype=data.dtype, device=world.device)
        with memory.unchanged(model, has_average=config.optim.ema is not None):
            graphs.record(x.to(memory_format=layout))
    return graphs


def assemble(
    config: RunConfig,
    world: World,
    *,
    continued: State | None = None,
    evaluated: State | None = None,
    data: Splits | None = None,
    plan: BatchPlan | None = None,
) -> Job:
    """Build the job of `config` (*collective*). Raises `RequestError` for an impossible config.

    A `continued` run keeps its accumulation, unless --micro-batch forbids such large shares. For an evaluation, the
    model is built only if the `evaluated` weights fit. `data` reuses another job's data sets. `plan` is the first one
    to try under --micro-batch auto.
    """
    world.progress.enter(SETUP)
    requested = config.batch
    method = methods.build(config.parallel, world)
    precision = Precision.of(config.precision, world.device)
    if registry.KINDS[method.name].divides_weights:  # torch divides tensors in one memory order
        precision = replace(precision, channels_last=False)
    precision.set_up_recipe(deterministic=config.precision.deterministic)
    if mismatch := world.find_mismatch({"devices": len(method.devices), "precision": precision.name}):
        raise RequestError(
            f"Rank {mismatch[0]} has {mismatch[1]}, and all ranks need the same number of devices and the same "
            "precision: set --devices or --gpus alike on every rank, and name one --precision."
        )
    devices = len(method.devices) if evaluated is None else 1
    plan = plan or _solve_plan(requested, resume.accumulation(continued, config), world.size, devices)
    data = data or sets.build(
        config.data,
        seed=config.seed,
        world=world,
        dtype=precision.dtype,
        channels_last=precision.channels_last,
        look=Look(**models_table.images(config.model.name)),
    )
    if (saved := continued or evaluated) is not None:
        with understanding(saved.origin or Path("the checkpoint")):
            data = data.matched(saved.meta.get("names", []), shown(saved.origin))
            data = data.compared(saved.meta.get("contents", {}))
    train, classes = data.train, config.model.classes or data.train.classes
    steps = plan.steps(len(train), drop_last=requested.drop_last)
    if steps == 0:
        raise RequestError(
            f"--drop-last leaves no step: the training set has {len(train)} samples and the global batch is "
            f"{requested.size}; use --batch {len(train)} or less."
        )
    model = _build_model(config, data, classes, evaluated)
    loss_fn = losses.build(config.optim)
    batchnorm = _choose_batchnorm(config, method, model)
    if batchnorm == "sync":
        model = sync_batchnorm.convert(model, world)
    recomputation = Recomputation(config.precision.checkpoint_activations, method.devices)
    recomputation.attach(model)
    recomputation.check()
    cautions = precision.cautions(model)
    model = precision.place(model, world.device)
    # A checkpoint has all weights; the file of --init-from may be gone.
    loaded = load_weights(config.model, model, world) if continued is None and evaluated is None else None
    if loaded is not None and len(loaded.names) == len(data.names):
        data = data.matched(
            loaded.names, loaded.source, ", or name its file model.safetensors to take its weights anyway"
        )
    with precision.autocast():
        trial.check(config.model.name, model, classes=train.classes, shape=train.shape, dtype=train.dtype)
    loss_of = partial(_loss, precision, loss_fn)
    if requested.fits_memory and evaluated is None:
        if batchnorm != "none":
            raise RequestError(
                f"--micro-batch auto: --model {config.model.name} has batch statistics, which are those of a "
                "micro-batch, and a model must not depend on the memory; give --accumulate N."
            )
        plan = fitted(plan, world, partial(_try_share, model, loss_of, train, config.optim.ema is not None))
    if config.precision.compile:
        model.compile()
    with torch.no_grad():
        world.broadcast([*model.parameters(), *model.buffers()])
    replica = replicas.replicate(model, method.devices, method.name)
    averages = [] if config.optim.ema is None else [Average(model, config.optim.ema)]
    method.exchange.attach(model)
    for average in averages:
        method.exchange.shard(average.module)
    optimizers = optim.build(model, config.optim)
    if evaluated is None and config.precision.cuda_graphs != "off":
        try:
            replica = _record_graphs(config, model, precision, plan, train, world)
            method.exchange.overwrites_gradients = True
        except RequestError as error:
            if config.precision.cuda_graphs == "on":
                raise
            cautions.append(f"no CUDA graphs: {error}")
    # From here on the generators serve the model's own randomness alone, which differs between ranks.
    seed_all(config.seed, world.rank, devices=method.devices)
    return Job(
        *(config, world, precision, method.exchange, {"model": model}, optimizers),
        is_recipe=True,
        method=method,
        replica=replica,
        averages=averages,
        batchnorm=batchnorm,
        recomputation=recomputation,
        memory=MemoryWatch(is_on=requested.fits_memory),
        plan=plan,
        data=data,
        lr=optim.rate(config, plan.global_size, steps),
        loss_fn=loss_fn,
        mixing=_mixing(config, train, classes),
        initial_weights=loaded,
        cautions=cautions,
        contents=data.contents,
    )


def _mixing(config: RunConfig, data: Data, classes: int) -> Mixing | None:
    if not (names := config.data.mixes):
        return None
    if len(data.shape) != 3:
        raise RequestError(
            f"--augment {' '.join(names)} mixes images, and the samples have shape {data.shape}; drop it."
        )
    return Mixing(names, classes, config.seed)


def _solve_plan(requested: BatchConfig, accumulation: int | None, ranks: int, devices: int) -> BatchPlan:
    """Return the batch plan. A continued run keeps its `accumulation` if --micro-batch allows that."""
    if accumulation is not None:
        plan = BatchPlan.solve(requested.size, ranks, accumulation=accumulation, devices=devices)
        if requested.micro_batch is None or plan.largest_share <= requested.micro_batch:
            return plan
    sizes = {"micro_size": requested.micro_batch, "accumulation": requested.accumulate}
    return BatchPlan.solve(requested.size, ranks, **sizes, devices=devices)


def _build_model(config: RunConfig, data: Splits, classes: int, evaluated: State | None) -> nn.Module:
    """Build the model, draw its weights, freeze parameters."""
    name, shape = config.model.name, data.train.shape
    if evaluated is not None and ":" not in name:
        with torch.device("meta"):  # uses no memory: a foreign run may name a model of any size
            check_fits(models_table.build_for(name, classes=classes, shape=shape), evaluated.part("model"))
    seed_weights(config.seed)  # alike on every rank
    model = models_table.build_for(name, classes=classes, shape=shape)
    trial.check_parts(name, model)
    freeze(model, config.model.freeze)
    if untracked := sync_batchnorm.untracked(model):
        raise RequestError(
            f"--model {name} has BatchNorm layers without running statistics ({', '.join(untracked[:3])}): its scores "
            "would depend on the evaluation batches and the number of ranks; set track_running_stats=True, or use "
            "another norm."
        )
    return model


def _choose_batchnorm(config: RunConfig, method: Method, model: nn.Module) -> str:
    """Return the kind of batch statistics: sync, local or none."""
    parallel = config.parallel
    if parallel.batchnorm == "sync" and not method.can_sync_batchnorm:
        raise RequestError(
            f"--batchnorm sync cannot work under --strategy {method.name}, whose replicas compute their own batch "
            f"statistics in one process; use --batchnorm local, or --strategy {registry.per_device()}."
        )
    if not any(isinstance(module, BatchNorm) and module.training for module in model.modules()):
        return "none"  # frozen layers use their running statistics
    if parallel.batchnorm != "local" and method.can_sync_batchnorm:
        return "sync"
    if parallel.nodes != parallel.most_nodes:
        remedy = "--batchnorm sync" if method.can_sync_batchnorm else f"--strategy {registry.per_device()}"
        raise RequestError(
            f"--nodes {parallel.nodes_asked} lets the number of nodes change, and batch statistics per replica make "
            f"the model depend on it; use {remedy}, a model without batch statistics, or a fixed number of nodes."
        )
    return "local"

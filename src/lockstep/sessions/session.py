"""A loop of one's own, on any number of devices. `lockstep.session()` returns what one rank of a job has of it.

    session = lockstep.session()
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in session.epochs(10):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

The loader's batch size is the global batch. What it yields is this rank's share of one global micro-batch; the
gradients of all shares are weighed, so that they add up to those of the mean over the global batch, and summed over the
ranks at the end of the last micro-batch's backward pass. Methods marked *collective* are called by every rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import types
from collections.abc import Collection, Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .. import _torch
from ..checkpoint.resume import accumulation
from ..config.options import apply, flatten, leaves
from ..config.schema import RunConfig
from ..data.share import Micro, SharedLoader, moved
from ..errors import RequestError
from ..models.modes import evaluating
from ..models.weights import seed_weights
from ..monitor.signals import StopRequest
from ..nn import sync_batchnorm
from ..nn.sync_batchnorm import SyncBatchNorm
from ..record.base import Nothing, Recorder
from ..record.console import Notices
from ..record.telemetry import SAMPLED
from ..runs.run import Opened, opened
from ..steps.loop import Loop, Source
from ..steps.prepared import Prepared, as_float32
from ..training.gradients import Gradients, Held, check_loss
from ..training.precision import Precision
from ..world.world import World
from . import script

OPTIONS = (
    *("output", "resume", "checkpoint-every", "log-every", "verify-every", "ledger", "seed", "max-steps"),
    *("accumulate", "micro-batch", "batchnorm", "precision", "deterministic"),
    *("timeout", "stall-timeout", "collectives"),
)
"""The options of `lockstep train` that a session takes; on all else the script decides."""
_IDENTITY = ("seed",)
_RECORDED = {
    "model",
    "data",
    *OPTIONS,
    *(leaf.key for leaf in leaves() if leaf.section in ("parallel", "checkpoint", "record")),
}
"""The options that a script leaves to the command, and its name."""
_TAKEN = (
    *("event", "time", "step", "epoch", "loss", "lr", "samples", "grad_norm", "top1"),
    *("samples_per_s", "step_s", "data_wait_s", "eta_s", *SAMPLED),
)
"""What records have of their own."""
_EVALUATED = 4
"""Loaders that are kept ready for further evaluations."""
_PLAIN = {"channels-last": "off"}  # a model keeps the order of memory that its user gave it


def session(**options: Any) -> Session:
    """Return this rank of the job that the script was started in, or alone where nothing has started it.

    `options` are those of `lockstep train` in `OPTIONS`, by their names (`output="runs/mnist"`, `resume="auto"`,
    `accumulate=4`, `precision="bf16"`, `seed=1` …); flags of `lockstep run` beat them. Call it once, before the model
    is made: the weights follow from the seed. Raises `RequestError` for options that cannot be honoured.
    """
    named = {name.replace("_", "-"): value for name, value in options.items()}
    if strange := [name for name in named if name not in OPTIONS]:
        raise RequestError(f"lockstep.session takes no {strange[0]!r}; it takes {', '.join(OPTIONS)}.")
    config = apply(apply(RunConfig(), _PLAIN, source="a session"), named, source="lockstep.session")
    started = script.take()
    by_command = started is not None
    if started is not None:
        flags = flatten(started.config)
        decided = started.given | {"launcher", "strategy", "accelerator", "model", "data"}
        config = apply(config, {key: value for key, value in flags.items() if key in decided}, source="the flags")
    else:
        started = script.own_process(config)
        config = dataclasses.replace(config, parallel=started.config.parallel)  # what started it, and how many
    again = ""
    if not by_command:
        how = "" if config.checkpoint.resume == "auto" else ' and lockstep.session(output=…, resume="auto")'
        again = f"continue with the same command{how}"
    has_folder = by_command or config.record.output is not None
    made = Session(config, started.world, has_folder=has_folder, again=again, only=_RECORDED)
    started.closing.append(made.close)
    return made


class Session:
    """One rank of a job, and what its loop needs. `world` says which ranks there are, `device` where this one is."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        *,
        has_folder: bool,
        console: Recorder | None = None,
        keys: Collection[str] = _IDENTITY,
        run: Opened | None = None,
        again: str = "",
        only: Collection[str] | None = None,
        prepared: Prepared | None = None,
        precision: Precision | None = None,
    ) -> None:
        """Join in (*collective*). Where the session `has_folder`, the run is recorded and saved there.

        `console` shows the run to a person; by default only what the script does not say itself. `keys` are the options
        that a run which is continued has to share with the one before. `run` is one whose folder is held already;
        `again` is as in `Saver`, `only` as in `opened`. `prepared` and its `precision` are there where something else
        than `prepare` has made ready what is trained, and a strategy exchanges its gradients.
        """
        self.world = world
        self.device = world.device
        self.precision = precision or Precision.of(config.precision, world.device)
        self._config = config
        self._held = contextlib.ExitStack()
        ours = run or Opened(config, (console or Notices()) if world.is_main else Nothing(), None)
        if has_folder and run is None:
            ours = self._held.enter_context(opened(config, world, keys=keys, console=console or Notices(), only=only))
        self._state = ours.state
        self._stop = StopRequest(quiet=not world.is_main)
        self._heeding = self._held.enter_context(contextlib.ExitStack())
        """Heeds what asks to stop, from the loop's beginning to its end."""
        self.prepared = prepared or Prepared(ours.config, world)
        self._gradients = Gradients(world)
        parts = (ours.config, world, self.prepared, self.precision, ours.recorder, self._stop)
        self.loop = Loop(*parts, state=ours.state, folder=has_folder, again=again)
        self._held.callback(self.loop.close)
        self._loaders: list[SharedLoader] = []
        self._evaluated: dict[DataLoader[Any], SharedLoader] = {}
        self._micro: Micro | None = None
        """The share under way; None outside of a loader's loop."""
        self._in_epochs = self._has_stepped = self._has_gradients = False
        self._losses: list[Tensor] = []
        """This rank's parts of the losses of the batch under way, one for each `backward` of a micro-batch."""
        self._weights: dict[int, Any] = {}
        """Its weights, likewise, by their number."""
        self._partial: list[Held] = []
        """The gradients of the batch's micro-batches so far, likewise."""
        self._calls = 0
        self._loss: Tensor | None = None
        self._samples = 0
        """Of the whole batches since the last step, likewise."""
        self._is_apart = False
        """Whether the share under way is of a loader by which no steps are counted."""
        self._is_alone = world.group is None and self.precision.scaler is None
        self._lr = 0.0
        self._norm: Tensor | None = None
        if prepared is None:
            seed_weights(config.seed)

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self.world.rank

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: the one that prints and writes. Never guard a collective with it."""
        return self.world.is_main

    @property
    def step(self) -> int:
        """Optimizer steps made: global batches trained on."""
        return self.loop.progress.step

    @property
    def is_last(self) -> bool:
        """Whether the global batch is whole with the share under way, so that optimizers and schedules act."""
        return self._micro is None or self._micro.last

    @property
    def is_new(self) -> bool:
        """Whether the run begins here, and goes on from no checkpoint."""
        return self._state is None

    @property
    def samples(self) -> int:
        """Samples of this rank's share under way; 0 where it is empty, and a sample that does not count stands in."""
        return 0 if self._micro is None else self._micro.size

    def asked_to_stop(self) -> bool:
        """Whether this rank was asked to stop, by Ctrl-C or SIGTERM: the loop does so by itself, at the same step."""
        return self._stop.asked

    def moved(self, batch: Any) -> Any:
        """Return tensors, at any depth of lists, tuples and dicts, on this rank's device and in its precision."""
        dtype = torch.float64 if self.precision.dtype == torch.float64 else None
        return moved(batch, self.device, dtype, False)

    def prepare(self, *parts: Any) -> Any:
        """Return each of `parts` made ready, in their order; a single one by itself (*collective*).

        A model comes back as the same object, on this rank's device, with rank 0's weights and synchronised BatchNorm;
        an optimizer or a schedule as the same object, whose `step` acts at the end of a global batch; a DataLoader as
        one that yields this rank's share of it. Whatever else has `state_dict` and `load_state_dict` is saved with the
        rest. Raises `RequestError` for what cannot be prepared, and once the loop has begun.
        """
        if self.loop.has_begun:
            raise RequestError("session.prepare was called after the loop had begun; prepare everything before it.")
        ready = tuple([self._ready(part) for part in parts])
        return ready[0] if len(ready) == 1 else ready

    def _ready(self, part: Any) -> Any:
        if isinstance(part, nn.Module):
            return self._model(part)
        if isinstance(part, Optimizer):
            self.prepared.optimizers.append(part)
            own = part.step
            before = own if "step" in vars(part) else functools.partial(_torch.step_with_hooks, part)

            def step(optimizer: Optimizer, closure: Any = None) -> Any:
                return self._step(optimizer, before, closure)

            # A bound method of the object: schedules bind anew what they find, and look for the mark of their own.
            part.step = types.MethodType(functools.update_wrapper(step, own), part)  # type: ignore[method-assign]
            if type(part).zero_grad is Optimizer.zero_grad:
                part.zero_grad = types.MethodType(_zero_grad, part)  # type: ignore[method-assign]
            return part
        if isinstance(part, DataLoader):
            shared = self._shared(part)
            self._loaders.append(shared)
            self.prepared.source = self.prepared.source or shared
            return Loader(self, shared)
        if isinstance(part, Loader):
            raise RequestError("session.prepare was given a loader that it had returned; give it each one once.")
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise RequestError(
                f"session.prepare takes models, optimizers, DataLoaders, schedules, and objects with state_dict and "
                f"load_state_dict; found a {type(part).__name__}."
            )
        self.prepared.others.append(part)
        if isinstance(part, LRScheduler):
            self._refine(part, "step", lambda step, *given, **named: step(*given, **named) if self.is_last else None)
        return part

    def _model(self, model: nn.Module) -> nn.Module:
        if sync_batchnorm.has_batchnorm(model):
            local = self._config.parallel.batchnorm == "local"
            self.prepared.batchnorm = "local" if local else "sync"
            model = model if local else sync_batchnorm.convert(model, self.world)
        dtype = torch.float64 if self.precision.dtype == torch.float64 else None
        model = model.to(self.device, dtype)
        with torch.no_grad():
            self.world.broadcast([*model.parameters(), *model.buffers()])
        if self.precision.name in ("bf16", "fp16"):
            self._refine(model, "forward", self._in_half_precision)
        self.prepared.add_model(model)
        self._gradients.add(model)
        return model

    def _in_half_precision(self, forward: Any, *given: Any, **named: Any) -> Any:
        with self.precision.autocast():
            found = forward(*given, **named)
        return found if torch.is_autocast_enabled(self.device.type) else as_float32(found)

    @staticmethod
    def _refine(owner: Any, name: str, by: Any) -> None:
        """Have `owner.name(…)` call `by(what it was, …)`, by its class: a copy is its own, and its state as before."""
        kind: Any = type(owner)

        def refined(self: Any, *given: Any, **more: Any) -> Any:
            return by(types.MethodType(getattr(kind, name), self), *given, **more)

        owner.__class__ = type(kind.__name__, (kind,), {name: refined, "__module__": kind.__module__})

    def _shared(self, loader: DataLoader[Any], *, evaluates: bool = False) -> SharedLoader:
        batch = self._config.batch
        kept = None if self._state is None else accumulation(self._state.meta, self._config)
        dtype = torch.float64 if self.precision.dtype == torch.float64 else None
        return SharedLoader(
            *(loader, self.world),
            seed=self._config.seed,
            accumulate=kept or batch.accumulate,
            micro_batch=None if kept else batch.micro_batch,
            dtype=dtype,
            evaluates=evaluates,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from 0 to `count` - 1, or those that a resumed run has left (*collective*).

        At the end of each one the session is saved; after the last, what was proved is written down.
        """
        if self._is_finished:
            raise RequestError(
                "session.epochs was called again after its last epoch; a session has one loop over epochs."
            )
        self.begin(count)
        self._in_epochs = True
        while self.loop.goes_on(count):
            yield self.loop.progress.epochs
            self.loop.end_epoch()
        self._in_epochs = False
        self._finish()

    def begin(self, epochs: int | None, *how: Any, **more: Any) -> None:
        """Do what `Loop.begin` does, unless that was done (*collective*)."""
        if self.loop.has_begun:
            return
        self._heeding.enter_context(self._stop)
        self.loop.begin(epochs, *how, **more)
        if epochs is None and self.step:
            raise RequestError(
                "A run can be continued where its loop goes over session.epochs(…), and this one does not."
            )

    def batches(self, source: Source) -> Generator[Any, None, None]:
        """Yield this rank's shares of an epoch's batches; count a step after each whole batch of the first source."""
        loop, pulse, counts = self.loop, self.world.pulse, source is self.prepared.source
        progress, strategy, replica = loop.progress, self.prepared.strategy, self.prepared.replica
        # Others begin where the first one does only where a resumed run takes them up together, as in a zip.
        micros = source.micros(progress.epochs, first=progress.within if counts else loop.resumed_at)
        if counts and loop.has_begun:
            loop.start_clock()
        micro: Micro | None = None
        try:
            while not (counts and loop.is_done):  # --max-steps
                pulse.enter("data")
                begun_s = time.perf_counter()
                micro = next(micros, None)
                loop.wait_s += time.perf_counter() - begun_s
                pulse.enter("")  # what follows is the caller's own code
                if micro is None:
                    break
                if not counts:
                    self._is_apart = self._micro is None
                    yield micro.batch
                    self._is_apart = False
                    continue
                self._micro = micro
                self._calls = 0
                stands_in = micro.size == 0 and source.stands_in
                if SyncBatchNorm.stand_in != stands_in:  # a class that changes loses what Python remembers of it
                    SyncBatchNorm.stand_in = stands_in
                if loop.has_begun:
                    loop.note_samples(micro.indices)
                if strategy is None or replica is None:
                    yield micro.batch
                else:
                    with strategy.sync_on(replica, last=micro.last and self._exchanges):
                        yield micro.batch
                if micro.last and loop.has_begun:
                    loop.count_batch()
                    self._end_step(micro.total)
            if counts and loop.has_begun:
                loop.end_data()
                self._compare_data()
                if not self._in_epochs:
                    loop.end_epoch()
        finally:
            micros.close()  # with workers that read ahead
            if counts:
                if micro is not None and not micro.last:  # nothing comes of such a batch
                    self._losses.clear()
                # The caller has left the loop within a batch's turn, by an error maybe: nobody is waited for.
                if micro is not None and micro.last and self._has_stepped:
                    loop.count_batch()
                self._count_step(micro.total if micro is not None and micro.last else 0)
                self._micro, SyncBatchNorm.stand_in = None, False
            self._is_apart = False

    @property
    def _exchanges(self) -> bool:
        listener = self.world.pulse.listener
        return listener is None or listener.exchanges

    def _count_step(self, samples: int) -> bool:
        """Count the step of a batch that is over, if an optimizer made one, and return whether it did."""
        self._calls = 0
        self._weights.clear()
        self._partial.clear()
        for part in self._losses:
            self._loss = part if self._loss is None else self._loss + part
        self._losses.clear()
        self._samples += samples
        if not self._has_stepped:  # a loop may step but once in several batches: what they come to is the step's
            return False
        if self.precision.scaler is not None:
            self.precision.scaler.update()
        loss = torch.zeros((), device=self.device) if self._loss is None else self._loss
        samples, self._samples, self._loss = self._samples, 0, None
        self._has_stepped = self._has_gradients = False
        self.loop.count_step(loss, samples, self._lr, self._norm)
        return True

    def _end_step(self, samples: int) -> None:
        if self._count_step(samples):
            if not self._has_compared:
                self._has_compared = True
                self._compare_data()
            self.loop.end_step()
        elif self._has_gradients and not self.prepared.optimizers:
            raise RequestError(
                "A batch is over, and session.prepare was given no optimizer that could step; give it yours."
            )

    def _compare_data(self) -> None:
        """Compare what the ranks have read of each loader so far (*collective*)."""
        for loader in (*self._loaders, *self._evaluated.values()):
            if not loader.is_compared and (doubt := loader.compare()):
                self.loop.recorder.record("warning", text=doubt)

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, reduction: str = "mean") -> None:
        """Add the gradients of `loss` (0-dim), this rank's, to those of the global batch (*collective*).

        A mean is taken as one over this rank's samples, or over `weight` things, such as tokens that count; a sum, by
        `reduction="sum"`, as one over the whole batch, divided by all ranks' `weight` where that is given. After a
        batch's last micro-batch the gradients are those of the global batch on every rank. Raises `RequestError` for a
        loss that is no number, and for a total weight of zero.
        """
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            check_loss(loss)
        micro, pulse = self._micro, self.world.pulse
        if not self.loop.has_begun:
            self._begin_within(micro)
        last = micro is None or micro.last
        self._has_gradients = True
        factor: float | Tensor = 1.0
        if weight is not None:
            counted = micro is None or micro.size > 0
            own = self._weigh(weight if counted else 0.0)
            # Of nothing that counts, a mean is no number, and neither are its gradients.
            is_void = not isinstance(own, Tensor) and own == 0
            factor = float(counted and not is_void) if reduction == "sum" else own
        elif reduction not in ("mean", "sum"):
            raise RequestError(f"session.backward takes reduction='mean' or 'sum', found {reduction!r}.")
        elif micro is None:
            if self._is_apart:
                raise RequestError(
                    "session.backward was called in a loop over a loader that session.prepare was not given first, and "
                    "steps are counted by the first one's batches; give it this one first, or go over both together."
                )
            factor = 1 / self.world.size if reduction == "mean" else 1.0
        elif reduction == "mean" or not micro.size:
            factor = micro.size / micro.total
        pulse.enter("backward")
        divisor = None
        is_whole = not isinstance(factor, Tensor) and factor == 1.0  # of a tensor the host would wait for the number
        if is_whole and self._is_alone and last and weight is None and not any(self._partial):
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            divisor = self._share_out(loss, factor, last, weighed=weight is not None)
        part, number = loss.detach() if is_whole else _times(loss.detach(), factor), self._calls
        if number == len(self._losses):
            self._losses.append(part)
        else:
            self._losses[number] = self._losses[number] + part
        if divisor is not None:
            self._losses[number] = self._losses[number] / divisor
        self._calls += 1
        pulse.enter("")

    def backward_sum(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Do what `backward` does for the sum of a loss over this rank's samples, or over `weight` things."""
        strategy, micro, pulse = self.prepared.strategy, self._micro, self.world.pulse
        if strategy is None or micro is None:
            if weight is None:
                self.backward(loss / max(1, self.samples))
            else:
                self.backward(loss, weight=weight, reduction="sum")
            return
        pulse.enter("backward")
        # Normalised once, by the global count: the sum over micro-batches and ranks is then the mean's gradient.
        self.precision.backward(loss, strategy.averages_over / micro.total)
        if micro.last and self.precision.scaler is not None:
            self.precision.unscale(each for group in self.prepared.optimizers for each in _parameters(group))
        pulse.enter("")
        self._losses.append(loss.detach())

    def _begin_within(self, micro: Micro | None) -> None:
        """Begin a loop that does not go over `epochs`, with its first gradients."""
        self.begin(None)
        if micro is not None:
            self.loop.note_samples(micro.indices)

    def _share_out(self, loss: Tensor, factor: float | Tensor, last: bool, *, weighed: bool) -> Tensor | None:
        """Make the gradients of `factor` · `loss` those of the global batch; return by what they were divided."""
        gradients, number, divisor = self._gradients, self._calls, None
        there = gradients.set_aside()
        # Nothing is asked of a share that does not count, but that it takes part in BatchNorm's exchanges.
        if isinstance(factor, Tensor) or factor or self.prepared.batchnorm == "sync":
            self.precision.backward(loss, factor)
            if weighed:
                gradients.void(factor)
        # The same loss of the batch's earlier micro-batches: by its number, since gradients may be dropped in between.
        if number < len(self._partial):
            gradients.put_back(self._partial[number])
            self._partial[number] = []
        if last:
            divisor = self._total_weight() if weighed else None
            gradients.sum(divisor, exchanges=self._exchanges)
            self.precision.unscale(gradients.parameters)
        else:
            self._partial += [[] for _ in range(number + 1 - len(self._partial))]
            self._partial[number] = gradients.set_aside()
        gradients.put_back(there)
        return divisor

    def _weigh(self, weight: float | Tensor) -> float | Tensor:
        if isinstance(weight, Tensor) and weight.device.type == "cpu":
            weight = weight.item()
        self._weights[self._calls] = self._weights.get(self._calls, 0) + weight
        return weight

    def _total_weight(self) -> Tensor:
        own = torch.as_tensor(self._weights[self._calls], dtype=torch.float64, device=self.device)
        total = self.world.sum(own)
        if not total.is_cuda and not total > 0:
            raise RequestError(
                f"session.backward was given weights that sum to {total.item():g} over the global batch: a mean is "
                "over a number of things above 0; leave such a batch out of the data."
            )
        return total

    def _step(self, optimizer: Optimizer, step: Any, closure: Any = None) -> Any:
        if closure is not None:
            raise RequestError("optimizer.step(closure) computes gradients that no rank could sum; give it none.")
        if not self.is_last:
            return None
        if not self._has_gradients:
            raise RequestError(
                "optimizer.step() without session.backward(loss) before it: gradients of loss.backward() are not "
                "weighed, nor summed over the ranks; call session.backward(loss) in its place."
            )
        self.world.pulse.enter("step")
        self._lr = float(optimizer.param_groups[0]["lr"])
        found = None
        if self.precision.scaler is None:
            found = step()
        else:
            self.precision.scaler.step(optimizer, step)
        self._has_stepped = True
        self.world.pulse.enter("")
        if self.prepared.source is None and optimizer is self.prepared.optimizers[-1]:
            self._end_step(0)
        return found

    def stepped(self, lr: float, norm: Tensor | None, *, last: tuple[Tensor, Tensor] | None) -> None:
        """Take note of an optimizer step that the caller has made.

        It was at this learning rate and this `norm` of the gradients; `last` is the last micro-batch's (logits, labels)
        on this rank, for the training accuracy.
        """
        self._has_stepped, self._lr, self._norm, self.loop.last = True, lr, norm, last

    def evaluating(self, loader: DataLoader[Any] | Loader) -> Iterator[Any]:
        """Yield this rank's shares of each batch, each sample exactly once, in the data set's order (*collective*).

        Within the loop the models are in evaluation mode, and no gradients are kept. All ranks have as many batches.
        """
        raw = loader.loader if isinstance(loader, Loader) else loader
        if raw not in self._evaluated:
            while len(self._evaluated) >= _EVALUATED:  # a loop may make its loader anew each time
                self._evaluated.pop(next(iter(self._evaluated))).close()
            self._evaluated[raw] = self._shared(raw, evaluates=True)
        before, was, evaluated = self._micro, SyncBatchNorm.stand_in, 0
        if self.loop.has_begun:
            self.loop.settle()
            self.loop.confirm()
        with contextlib.ExitStack() as modes, self.world.pulse.during("eval"):
            for model in self.prepared.models.values():
                modes.enter_context(evaluating(model))
                if self.prepared.batchnorm == "local":
                    self.world.broadcast(list(model.buffers()))
            modes.enter_context(torch.no_grad())
            try:
                for micro in self._evaluated[raw].shares():
                    self._micro = micro
                    self.world.pulse.enter("eval")
                    evaluated += micro.size
                    yield micro.batch
            finally:
                self._micro, SyncBatchNorm.stand_in = before, was
        self._compare_data()
        self.loop.end_evaluation(evaluated, self._evaluated[raw].samples)

    def sum(self, value: Any) -> Any:
        """Return the sum of a number, or of a tensor's elements each, over all ranks (*collective*)."""
        if self._micro is not None and not self._micro.size:
            value = torch.zeros_like(value) if isinstance(value, Tensor) else value * 0  # this rank's sample stands in
        return self._reduced(value, self.world.sum)

    def max(self, value: Any) -> Any:
        """Return the maximum of a number, or of a tensor's elements each, over all ranks (*collective*)."""
        return self._reduced(value, self.world.max)

    def mean(self, value: Any, *, weight: float | Tensor | None = None) -> Any:
        """Return the mean of ranks' means (*collective*), each over its share's samples or over `weight` things.

        Raises `RequestError` for a total weight of zero.
        """
        count = 1 if self._micro is None else self._micro.size
        own = count if weight is None or not count else float(weight)
        total = self.sum(own)
        if not total > 0:
            raise RequestError(f"session.mean was given weights that sum to {total:g} over the ranks.")
        part = value * own if own else torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
        return self.sum(part) / total

    def gather(self, value: Tensor) -> Tensor:
        """Return all ranks' tensors, (n, …) each, one after the other in their order (*collective*); n may differ."""
        if self._micro is not None and self._micro.size == 0:
            value = value[:0]
        sizes: list[int] = self.world.gather(len(value))
        padded = value.new_zeros((max(sizes), *value.shape[1:]))
        padded[: len(value)] = value
        parts = zip(self.world.stack(padded), sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def _reduced(self, value: Any, reduce: Any) -> Any:
        if isinstance(value, Tensor):
            return reduce(value.detach())
        found = reduce(torch.tensor(value, dtype=torch.float64, device=self.device)).item()
        return int(found) if isinstance(value, int) else found

    def print(self, *words: Any, **how: Any) -> None:
        """Print on rank 0 alone, as Python's own `print` does."""
        if self.is_main:
            print(*words, **how)

    def log(self, **values: Any) -> None:
        """Record values by name, in steps.jsonl and TensorBoard.

        Within a training loop they are means over this rank's share, weighed and added up over the ranks for the step
        under way; nothing is waited for. Elsewhere they are recorded as they are on rank 0.
        """
        if taken := [name for name in values if name in _TAKEN]:
            raise RequestError(
                f"session.log was given {taken[0]!r}, which records have of their own; take another name."
            )
        micro = self._micro
        if micro is None:
            told = {name: float(value) for name, value in values.items()}
            self.loop.recorder.record("values", step=self.step, epoch=self.loop.progress.epochs, **told)
            return
        for name, value in values.items() if self.loop.has_begun else ():
            held = torch.as_tensor(value, dtype=torch.float64, device=self.device).detach()
            part = held * (micro.size / micro.total) if micro.size else torch.zeros_like(held)
            self.loop.meter.note(name, part)

    def score(self, value: float) -> None:
        """Tell how good the weights are as they are now, the same on every rank: more is better.

        The next checkpoint, at the end of the epoch as a rule, becomes `best` where none before had a higher score.
        """
        self.loop.judge(float(value))

    def _finish(self) -> None:
        if self.loop.has_begun and not self._is_finished:
            self._is_finished = True
            self.loop.finish()
            self._heeding.close()

    _is_finished = _is_closed = _has_compared = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the session (*collective*): wait for the last checkpoint, record how it ended, give the folder back.

        What has started the script calls it at its end, with what the script has raised; a second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if error is None:
                self._finish()
        except BaseException as late:
            error = late
            raise
        finally:
            for loader in (*self._loaders, *self._evaluated.values()):
                loader.close()
            self._held.__exit__(None if error is None else type(error), error, getattr(error, "__traceback__", None))
        if error is None:
            script.closed()


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _times(loss: Tensor, factor: float | Tensor) -> Tensor:
    """Return the loss (0-dim) times its factor; where that is 0, zero: a mean over nothing is no number."""
    if not isinstance(factor, Tensor):
        return loss * factor if factor else torch.zeros_like(loss)
    return torch.where(factor > 0, loss * factor, 0)


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Do what torch's own does, less a profiler's range, which costs more than the work."""
    if not set_to_none:
        Optimizer.zero_grad(optimizer, set_to_none=False)
        return
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = None


class Loader:
    """A prepared DataLoader: yields this rank's shares. Other attributes are those of the user's own."""

    def __init__(self, session: Session, shared: SharedLoader) -> None:
        self.loader: DataLoader[Any] = shared.loader
        self.shared = shared
        self._session = session

    def __iter__(self) -> Iterator[Any]:
        return self._session.batches(self.shared)

    def __len__(self) -> int:
        """Return the number of optimizer steps in an epoch, which is what a schedule counts."""
        steps = self.shared.steps()
        if steps is None:
            raise TypeError("the length of this loader's data set is not known")
        return steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

"""Session for a user-written training loop on any number of devices.

    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in session.epochs(10):
        for x, y in loader:
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

The loader's batch size is the global batch. The loader yields this rank's share of one global micro-batch. The session
weights the gradients of all shares so that they add up to those of the mean over the global batch, and sums them over
the ranks while the last micro-batch's backward pass runs. Every rank calls the methods marked *collective*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..checkpoint.shards import full_tensor
from ..config.schema import RunConfig
from ..errors import RequestError
from ..exchange import base
from ..exchange.base import Call, on_device
from ..exchange.batch import check_loss
from ..exchange.method import exchange_of
from ..files import shown, understanding
from ..nn.recompute import Recomputation
from ..record.telemetry import SAMPLED
from ..runs.callbacks import Callback, Event
from ..runs.loop import Loop, plain
from ..runs.opened import OpenRun
from ..runs.prepared import Evaluated, Prepared
from ..training.precision import Precision
from ..world.random_state import seed_weights
from ..world.world import World
from . import collectives, parts, script
from .first_step import AverageWatch, FirstStep
from .hooks import NO_HOOKS, Hooks
from .passes import Passes
from .preparation import Preparation
from .randomness import Draws
from .shares import Shares
from .stepper import Stepper

_RESERVED = (
    *("event", "time", "step", "epoch", "loss", "lr", "samples", "grad_norm", "top1"),
    *("samples_per_s", "step_s", "data_wait_s", "eta_s", *SAMPLED),
)
"""Names of the fields that records already have."""
_RESERVED_SCORES = ("event", "time", "step", "epoch", "on", "score")
_NO_GRADIENT = (AttributeError, TypeError, AssertionError, RuntimeError)
_NO_GRADIENT_TEXTS = ("NoneType", "inf checks", "nested_tensorlist")
"""Errors of code, of a GradScaler and of clip_grad_value_ where a gradient is None."""


class Session:
    """One rank's session. `world` describes the ranks, `device` is this rank's device."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        run: contextlib.AbstractContextManager[OpenRun],
        *,
        prepared: Prepared | None = None,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        """Start the session (*collective*); keep `run` open until `close`.

        `prepared` are the parts of a job, whose strategy exchanges the gradients. `hooks` follow the run.
        """
        self.world, self.device = world, world.device
        self.precision = Precision.of(config.precision, world.device) if prepared is None else prepared.precision
        self._resources = contextlib.ExitStack()
        opened = self._resources.enter_context(run)
        self.prepared = prepared or Prepared(
            *(opened.config, world, self.precision, exchange_of(world, opened.config.parallel)),
            recomputation=Recomputation(opened.config.precision.checkpoint_activations, [world.device]),
        )
        self._resources.callback(self.prepared.exchange.close)
        self._hooks = hooks
        self.loop = Loop(opened, self.prepared, is_measurement=hooks.is_measurement, resumed=hooks.resumed)
        self._resources.callback(self.loop.close)
        shares = Shares()
        self._draws = Draws(
            *(world, opened.config.seed, hooks.draws or opened.config.batch.draws),
            is_certain=lambda: shares.is_certain(has_stepped=self._stepper.has_stepped),
        )
        self._stepper = Stepper(self.loop, stepping=self._begin_step, stepped=self._end_step)
        self.loop.pending = lambda: self._stepper.pending() | self._passes.state()
        self._passes = Passes(self.loop, self._stepper, self._draws, shares)
        self._averages: AverageWatch | None = None  # under accumulation
        self._first_step: FirstStep | None = None  # until the end of that step
        self._is_closed = False
        self._has_left = False  # whether the loop has left `epochs` before its end, as by `break`
        self._preparation = Preparation(
            *(self.prepared, self._stepper, self._passes, self._resources),
            own_modules=parts.modules_from_now(self._resources) if prepared is None else None,
        )
        if prepared is None:
            seed_weights(config.seed)
        else:
            for optimizer in prepared.optimizers:
                self._resources.callback(parts.replace_step(optimizer, self._stepper.step))

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self.world.rank

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes. Never guard a collective with `is_main`."""
        return self.world.is_main

    @property
    def is_last(self) -> bool:
        """Whether the current share completes the global batch. Optimizers and schedules then step."""
        current = self._passes.shares.current
        return current is None or current.share.last

    @property
    def samples(self) -> int:
        """Number of samples in the current share; 0 for an empty one, which yields a stand-in sample."""
        return self._passes.samples

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.loop.position.step + self._stepper.has_stepped

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self.loop.position.epochs

    @property
    def best_score(self) -> float:
        """Highest `score` so far; -inf without one."""
        return self.loop.position.best_top1

    @property
    def is_best(self) -> bool:
        """Whether no earlier score is as high as the last one."""
        return self.loop.position.stale == 0

    @property
    def is_resumed(self) -> bool:
        """Whether the run continues from a checkpoint."""
        return self.loop.state is not None

    @property
    def is_done(self) -> bool:
        """Whether the run has made its last step, as of `max_steps`: what follows is the end of its last epoch."""
        return self.loop.is_done

    @property
    def is_logging(self) -> bool:
        """Whether the current step ends an interval of `log_every`: for values that are costly to compute."""
        return self.loop.meter.ends_interval

    def prepare(self, *objects: Any) -> Any:
        """Prepare objects for training; return a tuple of them, or a single one (*collective*).

        Returns a model as the same object, on this rank's device, with rank 0's weights and synchronised BatchNorm; an
        optimizer or a schedule as the same object, whose `step` acts at the end of a global batch; a DataLoader as a
        loader of this rank's share of each batch. Checkpoints include other objects with `state_dict` and
        `load_state_dict`. Raises `RequestError` for objects that cannot be prepared, and after the loop has begun.
        """
        if self.loop.has_begun and not all(isinstance(part, DataLoader) for part in objects):
            raise RequestError(
                "session.prepare was called after the loop had begun; prepare models, optimizers and schedules before "
                "it. Only further DataLoaders may come later."
            )
        ready = tuple([self._preparation.take(part) for part in objects])
        for part in ready:
            self._hooks.prepared(part)
        return ready[0] if len(ready) == 1 else ready

    def average(self, model: nn.Module, *, decay: float | None = None, start: int = 0, every: int = 1) -> nn.Module:
        """Return an average of a prepared model's weights, a copy that each optimizer step updates.

        Its points are the weights after steps `start`, `start` + `every`, …: with a `decay`, an exponential moving
        average of them, else their mean, as in SWA. Until `start` it has the model's weights, and always the model's
        buffers, such as BatchNorm's running statistics. It is in evaluation mode. Checkpoints include it. Raises
        `RequestError` for other models or numbers, and after the loop has begun.
        """
        return self._preparation.average(model, decay, start, every, has_begun=self.loop.has_begun)

    def _begin(self, epochs: int | None) -> None:
        """Begin the loop (*collective*)."""
        source = self.prepared.source
        may_accumulate = source is None or source.plan.accumulation > 1
        if may_accumulate:
            self._preparation.gate()
        self.loop.begin(epochs)
        if may_accumulate:
            self._averages = AverageWatch(self.prepared)
        for loader in self._passes.loaders:
            loader.catch_up(self.loop.position.epochs)
        if epochs is not None:  # earlier passes were looks at the data
            self._passes.begin_epoch()
        if self.loop.state is not None:
            with understanding(self.loop.state.origin or Path("the checkpoint")):
                pending = self.loop.state.meta["pending"]
                self._stepper.restore(pending)
                self._passes.restore(pending)
        self._first_step = FirstStep(
            self.prepared, is_in_epochs=epochs is not None, is_resumed=self.loop.state is not None
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from 0 to `count` - 1; a resumed run yields the remaining ones (*collective*).

        Saves the session at the end of each epoch; records the checks after the last. Raises `RequestError` for a
        second loop, and for an epoch without a prepared loader or without any optimizer step.
        """
        if not isinstance(count, int):
            raise RequestError(f"session.epochs takes the number of epochs; found a {type(count).__name__}.")
        if self.loop.is_finished:
            raise RequestError(
                "session.epochs was called again after its last epoch; a session has one loop over epochs."
            )
        loop, stepper, passes = self.loop, self._stepper, self._passes
        if not loop.has_begun:
            self._begin(count)
        loop.epochs = count
        has_stepped, has_warned = self.step > 0, False
        while loop.goes_on(count):
            first_step, (outside, number) = self.step, (stepper.outside, passes.number)
            try:
                yield loop.position.epochs
            except GeneratorExit:
                self._has_left = True
                raise
            is_outside = stepper.outside > outside and passes.number == number
            stepper.settle(saves=False)  # the end of the epoch saves
            if self.step > first_step and is_outside and self.prepared.source is not None:
                raise RequestError(
                    "An epoch is over, and its loop used no loader that session.prepare returned: use that loader."
                )
            has_stepped = has_stepped or self.step > first_step
            if stepper.has_gradients and self.step == first_step and not has_warned:
                has_warned = True
                loop.warn(
                    "an epoch is over without a step of a prepared optimizer, though session.backward was called; an "
                    "optimizer that is made later is not prepared, and its steps are not counted"
                )
            loop.callbacks.call("epoch", step=self.step, epoch=loop.position.epochs)
            passes.end_epoch()
        if stepper.has_gradients and not has_stepped:
            raise RequestError(
                "The last epoch is over, and no optimizer has stepped after session.backward: call optimizer.step()."
            )
        loop.finish()

    def along(self, dimension: int | None) -> contextlib.AbstractContextManager[None]:
        """Return a context that states the samples' dimension of random draws, or None for no such dimension.

        Resolves ambiguous shapes under `draws="global"`; has no effect otherwise.
        """
        return self._draws.along(dimension)

    def _begin_step(self) -> None:
        self._passes.note_step()
        if self._first_step is not None:
            self._first_step.look()

    def _end_step(self, saves: bool) -> None:
        """End a step: report the first one's findings, compare the ranks' generators (*collective*)."""
        loop = self.loop
        for average in self.prepared.averages:
            average.update(loop.position.step)
        first, self._first_step = self._first_step, None
        if first is not None:
            self._passes.compare()
            for caution in first.cautions():
                loop.warn(caution)
        if warning := self._draws.end_step(loop.position.step):
            loop.warn(warning)
        loop.callbacks.call("step", step=loop.position.step, epoch=loop.position.epochs)
        loop.end_step(saves=saves)
        self._hooks.ended_step(self)

    @property
    def first_draw(self) -> str:
        """Place of the loop's first global draw, such as `train.py:12 (aten.randn.default)`, or ""."""
        return self._draws.first

    def draw_by_rank(self) -> None:
        """Draw different random numbers on each rank from the next share on."""
        self._draws.draw_by_rank()

    def exchange_by(self, exchange: base.Exchange) -> None:
        """Exchange gradients by `exchange` from the next global batch on (*collective*)."""
        self._stepper.exchange_by(exchange)

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        reduction: str = "mean",
        batch: Any = None,
        retain_graph: bool = False,
    ) -> None:
        """Add gradients of this rank's `loss` (0-dim) to the global batch's (*collective*).

        By default `loss` is the mean over this rank's samples, or over `weight` items such as tokens. With
        `reduction="sum"` it is a sum, divided by all ranks' `weight` if given. After a batch's last micro-batch,
        `.grad` is the global batch's on every rank. `batch` names the loss's batch by any tensor of it, for a loop that
        reads ahead and changes tensors before the model's forward. Raises `RequestError` for a loss that is not 0-dim,
        for a total weight of zero, and for an ambiguous batch; `RunError` if ranks train different batches.
        """
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            check_loss(loss)
        if reduction not in ("mean", "sum"):
            raise RequestError(f"session.backward takes reduction='mean' or 'sum', found {reduction!r}.")
        loop, shares, progress = self.loop, self._passes.shares, self.world.progress
        if self._first_step is not None:
            self._first_step.check_leaves(loss, is_sum=reduction == "sum" and weight is None)
            if weight is None:
                self._first_step.look_at_mean(loss)
        if not self.prepared.exchange.parameters:
            raise RequestError(
                "session.backward was called, and session.prepare was given no model, so that each rank would train a "
                "separate model: give it model, optimizer and loader."
            )
        handed = shares.take_current() if self.prepared.is_recipe else shares.take(loss, batch)
        self._draws.come_to(handed)
        if handed is not None and shares.assumed is not None:
            self._passes.check_assumed(handed)
        if handed is not None and not handed.counts:
            raise RequestError(
                "session.backward was called in a loop over a loader that session.prepare was not given first, and "
                "the batches of the first loader count steps; prepare this loader first, or go over both together."
            )
        if handed is not None and weight is None and shares.beside(handed):
            raise RequestError(
                "session.backward was given a loss while batches of two loaders are under way, of which this rank has "
                "different parts: call it for the loss of each, give the loaders batch sizes that split alike, or say "
                "how many of this rank's samples it is a mean over, by weight=."
            )
        if handed is not None and weight is None and batch is None and self._passes.shares.joins(handed):
            raise RequestError(
                "session.backward was given the loss of a batch joined with an earlier one, of which this rank has "
                "another part: say how many samples the loss is a mean over, as in session.backward(loss, weight=n)."
            )
        self._stepper.come_to(handed)
        if not loop.has_begun:  # in a loop that does not go over `epochs`
            self._begin(None)
            if handed is not None:
                loop.note_samples(handed.indices, last=handed.share.last)
        if self._averages is not None and handed is not None and (caution := self._averages.look(handed.share.micro)):
            loop.warn(caution)
        progress.enter("backward")
        recorded = self._preparation.before_scaling(loss)
        self._stepper.backward(
            *(loss, handed, weight, reduction),
            couples=self._draws.have_mixed or self.prepared.batchnorm == "sync",
            recorded=recorded,
            retain_graph=retain_graph,
        )
        progress.enter("")

    def abandon_batch(self) -> None:
        """Discard the batch under way before its step; record and save the last step (*collective*)."""
        self._draws.end()
        self._stepper.abandon()
        self.loop.record_steps()
        self.loop.save()

    def observe(self, grad_norm: Tensor | None, outputs: tuple[Tensor, Tensor] | None = None) -> None:
        """Record the gradients' norm (0-dim) of a step, and the top-1 accuracy of its last micro-batch.

        `outputs` are logits (n, classes) and labels (n,), recorded for an interval's last step. Call it before
        `optimizer.step()`. The host does not wait for the device.
        """
        self._stepper.norm = None if grad_norm is None else full_tensor(grad_norm)
        self.loop.meter.pending.last = outputs if self._counts else None

    def evaluating(self, loader: DataLoader[Any] | parts.Loader | Evaluated) -> Iterator[Any]:
        """Yield evaluation shares, each sample exactly once, in the data set's order (*collective*).

        Within the loop the models are in evaluation mode, and gradients are disabled.
        """
        return self._passes.evaluation(parts.raw(loader))

    @property
    def _counts(self) -> bool:
        return not self._passes.is_within or self.samples > 0

    def _meet(self, *details: Any) -> None:
        """Raise `RunError` unless all ranks make the same call (*collective*)."""
        self.prepared.exchange.meet(Call.REDUCE, self.step, [" ".join(map(str, details))])

    def sum(self, value: Any) -> Any:
        """Sum a number (as float64), or each element of a tensor, over all ranks (*collective*).

        Counts a mask's elements. Shapes are equal on all ranks: where shares differ in size, sum their elements
        first, as in `session.sum((predicted == y).sum())`.
        """
        return collectives.sum_values(value, self.world, self._meet, counts=self._counts)

    def max(self, value: Any) -> Any:
        """Return a number's maximum, or each element's, over all ranks (*collective*)."""
        return collectives.max_values(value, self.world, self._meet, counts=self._counts)

    def mean(self, value: Any, *, weight: float | Tensor | None = None) -> Any:
        """Return the mean of ranks' means, weighted by their shares' samples or `weight` (*collective*).

        Raises `RequestError` between batches without `weight`: the mean would depend on the number of ranks.
        """
        if weight is None and not self._passes.is_within and self.prepared.source is not None:
            raise RequestError(
                "session.mean was called outside of a batch, without weight: call it within the loop over the loader, "
                "or give weight=, the number of samples that this rank's value is a mean over."
            )
        count = self.samples if self._passes.is_within else 1
        rank_weight = float(count if weight is None or not count else weight)
        total = self.sum(rank_weight)
        if not total > 0:
            raise RequestError(f"session.mean was given weights that sum to {total:g} over the ranks.")
        part = value * rank_weight if rank_weight else torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
        return self.sum(part) / total

    def gather(self, value: Any) -> Any:
        """Gather a value of each rank in rank order (*collective*).

        Concatenates tensors (n, …), whose n may differ between ranks. Sums their gradients over the ranks, so that a
        contrastive loss has the gradients of one device, by `session.backward(loss)`: as a mean over all gathered rows,
        the same on every rank, or over this rank's rows against the gathered ones. Concatenates lists too;
        returns a list of all ranks' values for any other value. Lists and values may have numbers, texts, lists and
        dicts; raises `RequestError` for others.
        """
        return collectives.gather_values(value, self.world, self._meet, counts=self._counts)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 alone, as Python's `print`."""
        if self.is_main:
            print(*values, **options)

    def log(self, **values: Any) -> None:
        """Record values by name, in steps.jsonl, TensorBoard and trackers.

        Within a training loop, values are means over this rank's share; the record is the mean over the step's samples
        for which a value was logged, and every rank gives the same names. The host does not wait for the device.
        Elsewhere rank 0's values are recorded. Raises `RequestError` for reserved names, and within `evaluating`.
        """
        if reserved := [name for name in values if name in _RESERVED]:
            raise RequestError(f"session.log was given {reserved[0]!r}, which records already have; use another name.")
        if self._passes.evaluated_share is not None:
            raise RequestError(
                "session.log was called within session.evaluating, whose batches belong to no step: sum "
                "there, and log after the loop."
            )
        current, loop = self._passes.shares.current, self.loop
        if current is None:
            numbers = {name: float(value) for name, value in values.items()}
            loop.recorder.record("values", step=self.step, epoch=loop.position.epochs, **numbers)
            return
        for name, value in values.items():
            mean = on_device(value, self.device)
            size = current.share.size
            loop.meter.note(name, mean * size if size else torch.zeros_like(mean), current.share.rows)

    def score(self, value: float | None, *, on: str = "", **values: float | Tensor) -> None:
        """Record a score of the current weights, equal on every rank; higher is better (*collective*).

        Their checkpoint becomes `best` if the score exceeds all earlier ones. It is saved before the next batch is
        read, or at the end of the epoch. `values` are further numbers of the evaluation on the data set `on`, recorded
        with it. Weights without a score (None) cannot become `best`, and --patience ignores them. Raises
        `RequestError` for reserved names, `RunError` for ranks that differ.
        """
        if reserved := [name for name in values if name in _RESERVED_SCORES]:
            raise RequestError(f"session.score was given {reserved[0]!r}, which its record has; use another name.")
        if not self.loop.has_begun:
            raise RequestError("session.score was called before the loop; score weights within session.epochs.")
        self._stepper.settle(saves=False)
        value = None if value is None else float(value)
        numbers = plain("session.score", values)
        self.prepared.exchange.meet(Call.SCORE, self.step, [f"{value!r} {numbers or ''}".rstrip()])
        self.prepared.synchronise()  # the weights that are scored are those that are saved
        self.loop.judge(value, on, numbers)

    def on(self, event: Event, function: Callback) -> None:
        """Call `function(fields)` at each `event` of the run, `fields` being a dict; several functions in their order.

        - `"step"`: after an optimizer step, before it may be saved: `step` (from 1) and `epoch` (from 0).
        - `"epoch"`: after an epoch's last code in the loop, before it is saved: `step` and `epoch`.
        - `"evaluate"`: after `session.score`: `step`, `epoch`, `on`, `score` and the values given to it.
        - `"save"`: once a checkpoint is on the disk: `step` and `path`. On rank 0 alone: call nothing *collective*.
        - `"end"`: after the last checkpoint: the fields of the summary. It has those that `function` returns, too.

        All but `"save"` are called on every rank. Raises `RequestError` for another event, and after the loop.
        """
        if self.loop.is_finished:
            raise RequestError("session.on was called after the last epoch; call it before the loop.")
        self.loop.callbacks.add(event, function)

    def load_best(self) -> int | None:
        """Load the weights of the best checkpoint; return its step (*collective*).

        Returns None, with a warning, if the run's folder does not have them, as after a full disk or a resume into
        another folder. Raises `RequestError` for a run without a folder.
        """
        loop = self.loop
        if loop.folder is None:
            raise RequestError("session.load_best needs a run's folder, which has the best weights: give output=.")
        self._stepper.settle(saves=False)
        self.prepared.exchange.meet(Call.LOAD_BEST, self.step)
        self.prepared.synchronise()
        if self._has_left and not loop.is_finished:  # `last` shall have the weights of the last step
            loop.save()
        step = loop.load_best()
        if step is None:
            loop.warn(f"the best weights, of score {self.best_score:g}, are not in {shown(loop.folder)}: not loaded")
        return step

    def stop_if_asked(self) -> None:
        """Save and end the run if any rank was asked to stop (*collective*). Raises `Stopped`.

        For long work, such as an evaluation, after an epoch's batches and after the last epoch. A resumed run repeats
        the epoch's code after its batches. So it has no effect once that code has changed a model, an optimizer or
        another prepared object, nor within the batches, where steps stop by themselves.
        """
        loop = self.loop
        if not loop.has_begun:
            return
        self._stepper.settle(saves=False)
        self.prepared.exchange.meet(Call.STOP, self.step)
        stops = loop.stop.asked and loop.may_stop
        # A resumed run repeats the epoch's end, and would repeat changes made since the batches.
        stops = stops and (loop.is_finished or self.prepared.fingerprint() == self._passes.at_data_end)
        if self.world.sum(torch.tensor(float(stops))) > 0:
            raise loop.stopped()

    def warn(self, text: str) -> None:
        """Record a warning, a sentence or a clause, on rank 0."""
        self.loop.warn(text)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the session once: wait for the last checkpoint, record the end, release the folder (*collective*)."""
        if self._is_closed:
            return
        self._is_closed = True
        share = self._stepper.share
        is_within = share is not None and not share.share.last
        if is_within and isinstance(error, _NO_GRADIENT) and any(text in str(error) for text in _NO_GRADIENT_TEXTS):
            error.add_note(
                "a gradient is None until the global batch's last micro-batch: put code that changes gradients under "
                "`if session.is_last`, and give a GradScaler to session.prepare"
            )
        self._draws.close()
        try:
            if error is None:
                self._passes.raise_refusal()
                self.prepared.exchange.meet(Call.CLOSE, self.step)
                self._stepper.settle()
                self.loop.finish()
        except BaseException as late:
            error = late
            raise
        finally:
            self._passes.close()
            self._resources.__exit__(
                None if error is None else type(error), error, getattr(error, "__traceback__", None)
            )
        if error is None:
            script.leave()

    def _close_with_process(self, error: BaseException | None = None) -> None:
        """Close at the end of the process. Python does not reveal whether a script in mid-training has failed."""
        if self.loop.epochs and not self.loop.is_finished:
            self.loop.exit = None
        self.close(error)

"""Session for a user-written training loop on any number of devices.

    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in session.epochs(10):
        for x, y in loader:
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

The loader's batch size is the global batch. The loader yields this rank's share of one global micro-batch; the
gradients of all shares are weighted to add up to those of the mean over the global batch, and summed over the
ranks while the last micro-batch's backward pass runs. Methods marked *collective* are called by every rank.
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, default_collate

from .. import _torch
from ..checkpoint.resume import accumulation
from ..checks.samples import SampleCounts
from ..config.schema import RunConfig
from ..data.share import Micro, SharedLoader
from ..errors import ProofError, RequestError
from ..exchange import base
from ..exchange.base import Header
from ..exchange.batch import GlobalBatch, check_loss, on_device
from ..exchange.method import exchange_of
from ..models.modes import evaluating
from ..nn import sync_batchnorm
from ..nn.sync_batchnorm import SyncBatchNorm
from ..record.telemetry import SAMPLED
from ..runs.run import Opened
from ..steps.loop import Loop
from ..steps.prepared import Prepared, Source
from ..training.draw_watch import DrawWatch
from ..training.draws import GlobalDraws
from ..training.precision import Precision
from ..world.random_state import seed_weights
from ..world.world import World
from . import parts, script
from .attach import attach, gate_schedule
from .first_step import FirstStep
from .shares import Handed, Shares, samples_in

_TAKEN = (
    *("event", "time", "step", "epoch", "loss", "lr", "samples", "grad_norm", "top1"),
    *("samples_per_s", "step_s", "data_wait_s", "eta_s", *SAMPLED),
)
"""Names that records have of their own."""
_CHECKED = 3  # first steps after which the ranks' generators are compared
_CHECKED_EVERY = 50  # steps, from then on
_EVALUATED = 4  # loaders that are kept ready for further evaluations: a loop may make its loader anew each time


class Session:
    """One rank's session. `world` describes the ranks, `device` is this rank's device."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        run: contextlib.AbstractContextManager[Opened],
        *,
        prepared: Prepared | None = None,
    ) -> None:
        """Start the session (*collective*); `run` is held until `close`.

        `prepared` is a job's, whose gradients a strategy exchanges.
        """
        self.world, self.device = world, world.device
        self.precision = Precision.of(config.precision, world.device) if prepared is None else prepared.precision
        self._held = contextlib.ExitStack()
        ours = self._held.enter_context(run)
        self.prepared = prepared or Prepared(ours.config, world, self.precision, exchange=exchange_of(world))
        self.exchange = self.prepared.exchange
        self._held.callback(self.exchange.close)
        self.loop = Loop(ours, self.prepared)
        self.loop.pending = self._pending
        self._held.callback(self.loop.close)
        self._batch = GlobalBatch(self.exchange)
        self._shares = Shares()
        self._loaders: list[SharedLoader] = []
        self._evaluated: dict[DataLoader[Any], SharedLoader] = {}
        self._pass_number = 0  # of the next pass over any prepared loader
        self._passes: dict[int, int] = {}  # by loader: passes over it in this epoch
        self._trained: Handed | None = None  # the share of the last backward pass, until its batch is settled
        self._outside = 0  # backward passes outside of a loader's loop
        self._evaluations = 0
        self._evaluating: Micro | None = None  # the share under way of an evaluation
        self._in_epochs = self._has_stepped = self._has_gradients = self._has_compared = self._is_closed = False
        self._is_scaler_stepping = self._has_warned_of_left = False
        self._keeps_gradients = False
        self._lr = 0.0
        self._stepped_by: set[Optimizer] = set()  # in the batch under way
        self._parts_at_step = 0  # backward passes before the last optimizer step
        self._thread = threading.get_ident()
        self._norm: Tensor | None = None
        self._first_step: FirstStep | None = None
        scaler = self.precision.scaler
        self._unscale = None if scaler is None else lambda: self.precision.unscale(self.prepared.optimizers)
        is_global, seed = ours.config.batch.draws == "global", ours.config.seed
        self._draws = GlobalDraws(world, seed) if is_global else None
        self._draw_watch = DrawWatch(world) if world.size > 1 and not is_global else None
        self._is_watching = False
        self._has_left = False  # whether the loop has left its loader within a global batch
        self._before = {id(module) for module in _modules_so_far()} if prepared is None else set()
        if prepared is None:
            seed_weights(config.seed)
        else:
            for model in prepared.models.values():
                self._watch(model)

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
        current = self._shares.current
        return current is None or current.share.last

    @property
    def _is_whole(self) -> bool:
        """Whether no global batch is half trained: what acts once in a batch then acts."""
        trained = self._trained
        return trained is None or trained.share.last or self._has_left

    @property
    def samples(self) -> int:
        """Number of samples in the current share. 0 for an empty share, whose stand-in sample does not count."""
        if self._evaluating is not None:
            return self._evaluating.size
        current = self._shares.current
        return 0 if current is None else current.share.size

    @property
    def _is_within(self) -> bool:
        """Whether a share is under way, of training or of an evaluation."""
        return self._evaluating is not None or self._shares.current is not None

    @property
    def _counts(self) -> bool:
        return not self._is_within or self.samples > 0

    @property
    def step(self) -> int:
        """Optimizer steps made: global batches trained on."""
        return self.loop.position.step + self._has_stepped

    def prepare(self, *given: Any) -> Any:
        """Prepare parts for training; return them in order (*collective*). A single part is returned by itself.

        A model comes back as the same object, on this rank's device, with rank 0's weights and synchronised BatchNorm;
        an optimizer or a schedule as the same object, whose `step` acts at the end of a global batch; a DataLoader as
        one that yields this rank's share of each batch. Other objects with `state_dict` and `load_state_dict` are saved
        with the rest. Raises `RequestError` for objects that cannot be prepared, and once the loop has begun.
        """
        if self.loop.has_begun and not all(isinstance(part, DataLoader) for part in given):
            raise RequestError(
                "session.prepare was called after the loop had begun; prepare models, optimizers and schedules before "
                "it. Only further DataLoaders may come later."
            )
        ready = tuple([self._ready(part) for part in given])
        return ready[0] if len(ready) == 1 else ready

    def _ready(self, part: Any) -> Any:
        prepared = self.prepared
        if isinstance(part, nn.Module):
            if sync_batchnorm.has_batchnorm(part):
                prepared.batchnorm = "local" if self.loop.config.parallel.batchnorm == "local" else "sync"
                part = part if prepared.batchnorm == "local" else sync_batchnorm.convert(part, self.world)
            number = len(prepared.models) + 1
            part = parts.place(part, self.world, self.precision)
            prepared.models["model" if number == 1 else f"model_{number}"] = _torch.inner(part)
            self.exchange.attach(part)
            self._watch(part)
            if id(part) in self._before or id(_torch.inner(part)) in self._before:
                prepared.cautions.append(
                    "the model was made before lockstep.session(): its weights do not follow from the seed, and "
                    "another start may draw others; call lockstep.session() first"
                )
        elif isinstance(part, Optimizer):
            self._take_optimizers(part)
        elif isinstance(part, DataLoader):
            self._loaders.append(self._shared(part))
            prepared.first_loader = prepared.first_loader or self._loaders[-1]
            return parts.Loader(self._loaders[-1], self.batches)
        elif isinstance(part, parts.Loader):
            raise RequestError("session.prepare was given a loader that it had returned; give it each one once.")
        elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            prepared.others.append(part)
            if not isinstance(part, LRScheduler):
                for held in vars(part).values() if hasattr(part, "__dict__") else ():
                    if isinstance(held, Optimizer):
                        self._take_optimizers(held)
        else:
            raise RequestError(
                "session.prepare takes models, optimizers, DataLoaders, schedules, and objects with state_dict and "
                f"load_state_dict; found a {type(part).__name__}."
            )
        return part

    def _take_optimizers(self, outer: Optimizer) -> None:
        """Take an optimizer, and those that it keeps and steps itself."""
        prepared = self.prepared
        for optimizer in parts.with_inner(outer):
            if optimizer not in prepared.optimizers:
                prepared.optimizers.append(optimizer)
                parts.step_by(optimizer, self._step)
            if optimizer is not outer:
                prepared.inner.add(optimizer)

    def _watch(self, model: nn.Module) -> None:
        """Have the model's forward say which batch it is called with."""
        before, after = parts.Watched(self._see), parts.Watched(self._mark)
        self._held.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._held.callback(model.register_forward_hook(after, with_kwargs=True).remove)

    def _see(self, values: Any) -> None:
        if self._evaluating is None:
            before = self._shares.current
            self._shares.see(values)
            if self._shares.current is not before:
                self._stand_in()
                self._resume_share()

    def _mark(self, output: Any) -> None:
        if self._evaluating is None and torch.is_grad_enabled():
            self._shares.mark(output)

    def _stand_in(self) -> None:
        current = self._shares.current
        stands_in = current is not None and current.share.size == 0 and self.prepared.batchnorm == "sync"
        if SyncBatchNorm.stand_in != stands_in:  # a changed class loses Python's caches
            SyncBatchNorm.stand_in = stands_in

    def _begin(self, epochs: int | None) -> None:
        """Begin the loop (*collective*)."""
        source = self.prepared.source
        if source is not None and source.plan.accumulation > 1:
            # What steps once in a global batch steps at its end, as optimizers do.
            for optimizer in self.prepared.optimizers:
                attach(optimizer, "zero_grad", self._at_last)
            for model in self.prepared.models.values():
                attach(model, "zero_grad", self._at_last)
            for part in (*self.prepared.others, *self.prepared.models.values()):
                if isinstance(part, LRScheduler):
                    gate_schedule(part, lambda: self._is_whole)
                for name in ("update_parameters", "unscale_", "update"):
                    if isinstance(part, AveragedModel | torch.amp.GradScaler) and hasattr(part, name):
                        attach(part, name, self._at_last)
                if isinstance(part, torch.amp.GradScaler):
                    attach(part, "step", self._at_last)
        self.loop.begin(epochs)
        for loader in self._loaders:
            loader.catch_up(self.loop.position.epochs)
        if self.loop.state is not None:
            self._restore_pending(self.loop.state.meta.get("pending"))
        self._first_step = FirstStep(self.prepared, is_in_epochs=epochs is not None)

    def _at_last(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if self._is_whole else None

    def _shared(self, loader: DataLoader[Any], *, evaluates: bool = False) -> SharedLoader:
        config = self.loop.config
        kept = accumulation(self.loop.state, config)
        return SharedLoader(
            *(loader, self.world),
            seed=config.seed,
            accumulate=kept or config.batch.accumulate,
            micro_batch=None if kept else config.batch.micro_batch,
            dtype=self.precision.cast,
            evaluates=evaluates,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from 0 to `count` - 1 (*collective*). A resumed run yields those that are left.

        The end of each epoch saves the session; the end of the last one also records the checks.
        """
        if self.loop.is_finished:
            raise RequestError(
                "session.epochs was called again after its last epoch; a session has one loop over epochs."
            )
        if not self.loop.has_begun:
            self._begin(count)
        self._in_epochs = True
        has_stepped = self.step > 0
        while self.loop.goes_on(count):
            self._passes.clear()
            before = self.step
            has_trained = self._outside, self._pass_number
            yield self.loop.position.epochs
            is_outside = self._outside > has_trained[0] and self._pass_number == has_trained[1]
            self._settle()
            if self.step > before and is_outside and self.prepared.source is not None:
                raise RequestError(
                    "An epoch is over, and its loop was over no loader that session.prepare returned: go over that one."
                )
            has_stepped = has_stepped or self.step > before
            if self._has_gradients and self.step == before and not has_stepped:
                self._warn(
                    "an epoch is over without an optimizer step: session.backward was called, optimizer.step() not"
                )
            self._end_epoch()
        if self._has_gradients and not has_stepped:
            raise RequestError(
                "The last epoch is over, and no optimizer has stepped after session.backward: call optimizer.step()."
            )
        self._in_epochs = False
        self.loop.finish()

    def _end_epoch(self) -> None:
        self._end_draws()
        self._shares.leave()
        self.exchange.meet(Header(base.END_EPOCH, self.step))
        self.loop.end_epoch()

    def _pending(self) -> dict[str, Any] | None:
        """Return what waits for an optimizer step, for a checkpoint (*collective*); None if nothing does."""
        if not (self._has_gradients or self._keeps_gradients):
            return None
        loss, samples = self._batch.waiting()
        return {"samples": samples, "losses": self.world.gather(loss), "steps": self._has_gradients}

    def _restore_pending(self, pending: dict[str, Any] | None) -> None:
        if pending is not None:
            losses, size = pending["losses"], self.world.size
            own = losses[self.world.rank] if len(losses) == size else sum(losses) / size
            self._batch.wait(own, pending["samples"])
            self._has_gradients = self._keeps_gradients = True
            self._has_gradients = pending["steps"]

    def _warn(self, text: str) -> None:
        self.loop.recorder.record("warning", text=text[0].upper() + text[1:].rstrip(".") + ".")

    def batches(self, source: Source) -> Generator[Any, None, None]:
        """Yield this rank's shares of an epoch. Steps are counted by the batches of the first source."""
        if threading.get_ident() != self._thread:
            raise RequestError(
                "A prepared loader was read in another thread than the one that trains, which counts steps by it: read "
                "it in the loop; num_workers= reads ahead."
            )
        loop, progress = self.loop, self.world.progress
        counts = source is self.prepared.source and not loop.is_finished
        self._settle()
        place = self._passes[id(source)] = self._passes.get(id(source), -1) + 1
        number, self._pass_number = self._pass_number, self._pass_number + 1
        # Others begin where the first one does only where a resumed run takes them up together, as in a zip.
        first = loop.begin_pass(place) if counts and loop.has_begun else 0 if place else loop.resumed_at
        if first is None:  # a resumed run has trained on this pass
            return
        may_drop = isinstance(source, SharedLoader) and source.loader.collate_fn is not default_collate
        epoch = loop.position.epochs
        micros = source.micros(epoch, first=first, again=place)
        if counts and loop.has_begun:
            loop.start_clock()
        steps, index = self.step, first * source.plan.accumulation
        try:
            while True:
                self._settle()
                if counts and loop.is_done and not loop.is_finished:  # --max-steps
                    break
                self._end_draws()  # those of the data follow from (seed, epoch, sample)
                progress.enter("data")
                begun_s = time.perf_counter()
                micro = next(micros, None)
                loop.meter.pending.wait_s += time.perf_counter() - begun_s
                progress.enter("")  # what follows is the caller's own code
                if micro is None:
                    break
                samples = samples_in(micro.batch, max(1, micro.size)) if may_drop else micro.size
                handed = Handed(micro.share, number, index, counts, samples if micro.size else 0, may_drop)
                handed.epoch, handed.place, handed.indices = epoch, place, micro.indices
                index += 1
                if counts or self._shares.current is None or not self._shares.current.counts:
                    self._shares.hand_out(handed, micro.batch)
                    self._stand_in()
                    self._begin_draws(handed)
                if counts and not place and loop.has_begun and not loop.is_finished:
                    loop.note_samples(handed.indices, last=handed.share.last)
                box = [micro.batch]
                del micro  # nothing here keeps a batch alive
                yield box.pop()
            self._shares.leave()
            self._stand_in()
            self._end_draws()
            if counts and loop.has_begun and not loop.is_finished:
                self._compare_data()
                if not self._in_epochs and self.step > steps:
                    loop.end_data()
                    self._end_epoch()
                    self._passes.clear()
        except GeneratorExit:
            self._has_left = counts and self._trained is not None and self._shares.current is self._trained
            raise
        finally:
            micros.close()  # with workers that read ahead
            if not loop.has_begun:  # a look at the data, whose values are of no step
                loop.meter.pending.values.clear()

    def _begin_draws(self, handed: Handed) -> None:
        """Make the draws of the code that follows those of one device, or, in the first step, watch them."""
        share, epoch = handed.share, self.loop.position.epochs
        if self._draws is not None:
            number = ((epoch << 16 | handed.place) << 40) + (share.step << 8) + share.micro
            self._draws.begin(share.row, share.size, share.rows, number)
        elif self._draw_watch is not None and not self._is_watching and handed.counts and self.loop.has_begun:
            self._is_watching = True
            self._draw_watch.begin()

    def _resume_share(self) -> None:
        if self._draws is not None and self._draws.is_active and self._shares.current is not None:
            share = self._shares.current.share
            self._draws.resume_share(share.row, share.size, share.rows)

    def _end_draws(self) -> None:
        if self._draws is not None:
            self._draws.end()

    def along(self, dimension: int | None) -> contextlib.AbstractContextManager[None]:
        """Return a context that says where draws have their samples: along `dimension`, or nowhere (None).

        Under `draws="global"`, for draws whose shape does not tell. Without effect otherwise.
        """
        return contextlib.nullcontext() if self._draws is None else self._draws.along(dimension)

    def _settle(self) -> None:
        """End the global batch that was trained on last, if it is complete, and count its step (*collective*)."""
        handed = self._trained
        if handed is not None and not handed.share.last:
            return
        if handed is None and not self._has_stepped:
            return
        self._trained = None
        self._end_step(0 if handed is None else handed.share.total, handed)

    def _count_again(self) -> None:
        """Count the step before, where an optimizer steps again on the same batch (*collective*)."""
        handed = self._trained
        self._end_step(0 if handed is None else handed.share.total, handed, parts=self._parts_at_step)
        self._has_gradients = True

    def _end_step(self, samples: int, handed: Handed | None = None, parts: int | None = None) -> None:
        loop = self.loop
        if handed is not None and handed.counts and loop.has_begun:
            loop.count_batch(handed.place, handed.share.step)
        self._batch.end(samples, parts)
        self._stepped_by.clear()
        if self._has_stepped:  # a loop may step once in several batches: the step has their sum
            self.precision.update()
            self._has_stepped = self._has_gradients = False
            loop.count_step(*self._batch.taken(), self._lr, self._norm)
            if not self._has_compared:
                self._has_compared = True
                self._compare_data()
                if self._first_step is not None:
                    for caution in self._first_step.cautions():
                        self._warn(caution)
            if self._draw_watch is not None and self._is_watching:
                if drawn := self._draw_watch.end():
                    self._warn(drawn)
                self._draw_watch = None
            if self._draws is not None and (self.step <= _CHECKED or self.step % _CHECKED_EVERY == 0):
                self._draws.check()
            loop.end_step()
        elif self._has_gradients and not self.prepared.optimizers:
            raise RequestError("A batch is over, and session.prepare was given no optimizer to step; give it yours.")

    def _compare_data(self) -> None:
        """Compare the ranks' samples of each loader (*collective*)."""
        for loader in (*self._loaders, *self._evaluated.values()):
            if not loader.is_compared and (doubt := loader.compare()):
                self.loop.recorder.record("warning", text=doubt)

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

        A mean is taken as one over this rank's samples, or over `weight` things, such as tokens that count; a sum, by
        `reduction="sum"`, as one over the whole batch, divided by all ranks' `weight` where that is given. After a
        batch's last micro-batch the gradients are those of the global batch on every rank. `batch` says which batch
        the loss is of, by any tensor of it, in a loop that reads ahead and changes what it reads before the model's
        forward. Raises `RequestError` for a loss that is no number, for a total weight of zero, and where it cannot be
        known which batch is meant; `RunError` where ranks train different batches.
        """
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            check_loss(loss)
        if reduction not in ("mean", "sum"):
            raise RequestError(f"session.backward takes reduction='mean' or 'sum', found {reduction!r}.")
        progress = self.world.progress
        if not self.exchange.parameters:
            raise RequestError(
                "session.backward was called, and session.prepare was given no model, so that each rank would train "
                "one of its own: give it model, optimizer and loader."
            )
        handed = self._shares.take(loss, batch)
        self._resume_share()
        if handed is not None and not handed.counts:
            raise RequestError(
                "session.backward was called in a loop over a loader that session.prepare was not given first, and "
                "steps are counted by the first one's batches; give it this one first, or go over both together."
            )
        if handed is not None and weight is None and self._shares.beside(handed):
            raise RequestError(
                "session.backward was given a loss while batches of two loaders are under way, of which this rank has "
                "different parts: call it for the loss of each, or give the loaders batch sizes that split alike."
            )
        self._come_to(handed)
        if not self.loop.has_begun:  # in a loop that does not go over `epochs`
            self._begin(None)
            if handed is not None:
                self.loop.note_samples(handed.indices, last=handed.share.last)
        factor: float | Tensor
        factor, share = self._factor(handed, weight, reduction)
        weight = self._weighed(handed, weight)
        if weight is not None and reduction == "mean":
            factor = weight
        elif weight is not None:
            factor = float(isinstance(weight, Tensor) or weight != 0)
        if handed is None:
            header = Header(base.BACKWARD, self._outside)
            self._outside += 1
        else:
            header = Header(base.pass_kind(handed.epoch, handed.place), handed.index)
        if not self._has_gradients and self._batch.adds_to_existing():
            self._keeps_gradients = True  # of a batch that was stepped on: checkpoints have to hold them
        self._has_gradients, self._trained = True, handed
        progress.enter("backward")
        self._batch.backward(
            loss,
            factor,
            weight,
            share,
            header,
            lambda factor: self.precision.backward(loss, factor, retain_graph=retain_graph),
            last=handed is None or handed.share.last,
            exchanges=self.loop.exchanges,
            unscale=self._unscale,
        )
        progress.enter("")

    def _come_to(self, handed: Handed | None) -> None:
        """Begin the micro-batch of a loss, and end the batch before (*collective*)."""
        self._has_left = False
        before = self._trained
        if before is handed and (handed is not None or not self._has_stepped):
            return
        if handed is not None and handed.share.micro and (before is None or before.index + 1 != handed.index):
            raise RequestError(
                f"session.backward was given the loss of micro-batch {handed.share.micro + 1} of a global batch, and "
                "not of the one before it: under accumulate=, train each global batch's micro-batches in the loader's "
                "order, or skip a whole batch."
            )
        if before is None or handed is None or before.batch != handed.batch:
            self._settle()
            if self._trained is not None:  # left before its last micro-batch
                if not self._has_warned_of_left:
                    self._has_warned_of_left = True
                    self._warn("a global batch was left before its last micro-batch: its gradients are dropped")
                self._batch.drop()
                self._trained = None
        self._batch.begin_micro_batch()

    def _weighed(self, handed: Handed | None, weight: float | Tensor | None) -> float | Tensor | None:
        if weight is None:
            return None
        if handed is not None and not handed.share.size:
            return 0.0
        return weight.item() if isinstance(weight, Tensor) and not weight.is_cuda else weight

    def _factor(
        self, handed: Handed | None, weight: float | Tensor | None, reduction: str
    ) -> tuple[float, tuple[float, float] | None]:
        """Return a loss's factor, and, where samples may have been dropped, (those left, those expected)."""
        if weight is not None:
            return 1.0, None
        if handed is None:
            return 1 / self.world.size if reduction == "mean" else 1.0, None
        share = handed.share
        if reduction == "sum":
            return float(share.size > 0), None
        if share.size == share.total and self.world.size == 1:
            return 1.0, None
        if handed.samples is None:
            raise RequestError(
                f"The DataLoader's collate function made a batch of {share.size} samples none of whose parts has "
                f"{share.size}: its shares cannot be weighed. Say what the loss is a mean over, as in "
                "session.backward(loss, weight=…)."
            )
        share_of_batch = (float(handed.samples), float(share.total)) if handed.may_drop else None
        return handed.samples / share.total, share_of_batch

    def _step(self, optimizer: Optimizer, step: Any, closure: Any) -> Any:
        """Step the optimizer at the end of a global batch."""
        if self._is_scaler_stepping:
            return step()
        if closure is not None:
            raise RequestError("optimizer.step(closure) computes gradients that no rank could sum; give it none.")
        if not self._is_whole:
            return None
        if not self._has_gradients:
            raise RequestError(
                "optimizer.step() without session.backward(loss) before it: gradients of loss.backward() are not "
                "weighed, nor summed over the ranks; call session.backward(loss) in its place."
            )
        if optimizer in self._stepped_by:  # a loop may step twice on one batch
            self._count_again()
        self._stepped_by.add(optimizer)
        self.world.progress.enter("step")
        self._is_scaler_stepping = True  # also while an optimizer steps the one that it keeps
        try:
            found = self.precision.step_one(optimizer, step)
        finally:
            self._is_scaler_stepping = False
        self.stepped(float(optimizer.param_groups[0]["lr"]))
        self.world.progress.enter("")
        if self.prepared.source is None and optimizer is self.prepared.optimizers[-1]:
            self._settle()
        return found

    def stepped(self, lr: float, norm: Tensor | None = None, last: tuple[Tensor, Tensor] | None = None) -> None:
        """Note an optimizer step. `norm` is the gradients' norm, `last` the last micro-batch's (logits, labels)."""
        self._has_stepped, self._lr, self._norm = True, lr, norm
        self._parts_at_step = self._batch.number
        self.loop.meter.pending.last = last if self._counts else None

    def evaluating(self, loader: DataLoader[Any] | parts.Loader) -> Iterator[Any]:
        """Yield evaluation shares, each sample exactly once (*collective*). The order is the data set's.

        Within the loop the models are in evaluation mode, and no gradients are kept.
        """
        raw = loader.loader if isinstance(loader, parts.Loader) else loader
        world, loop = self.world, self.loop
        if raw not in self._evaluated:
            while len(self._evaluated) >= _EVALUATED:
                self._evaluated.pop(next(iter(self._evaluated))).close()
            self._evaluated[raw] = self._shared(raw, evaluates=True)
        shared, evaluated = self._evaluated[raw], 0
        self._settle()
        self._end_draws()
        self.exchange.meet(Header(base.BEGIN_EVALUATION, self._evaluations))
        before = self._evaluating
        check = loop.checks.samples if loop.has_begun and shared.samples is not None else None
        counts = None if check is None else SampleCounts(shared.index_bound)
        if loop.has_begun:
            self._record_steps()
            loop.confirm()
        with contextlib.ExitStack() as modes, world.progress.during("eval"):
            for model in self.prepared.models.values():
                modes.enter_context(evaluating(model))
                if self.prepared.batchnorm == "local":
                    world.broadcast(list(model.buffers()))
            modes.enter_context(torch.no_grad())
            try:
                for micro in shared.shares():
                    self._evaluating = micro
                    world.progress.enter("eval")
                    evaluated += micro.size
                    if counts is not None:
                        counts.add(micro.indices)
                    yield micro.batch
            finally:
                self._evaluating = before
        self.exchange.meet(Header(base.END_EVALUATION, self._evaluations))
        self._evaluations += 1
        self._compare_data()
        found = int(world.sum(torch.tensor(evaluated, device=self.device)))
        if shared.samples not in (None, found) and world.progress.listener is None:
            raise ProofError(f"An evaluation took {found:,} samples, and the data set has {shared.samples:,}.")
        if check is not None and counts is not None:
            check.end_evaluation(counts, shared.samples or 0, self.step)
        if loop.has_begun:
            loop.start_clock()

    def _record_steps(self) -> bool:
        return self.loop.record_steps()

    def _meet(self, *what: Any) -> None:
        """Raise where another rank does not make the same call (*collective*)."""
        self.exchange.meet(Header(base.REDUCE, self.step, zlib.crc32(repr(what).encode())))

    def sum(self, value: Any) -> Any:
        """Sum a number, as float64, or each element of a tensor, over all ranks (*collective*). Of a mask, count."""
        is_mask = isinstance(value, Tensor) and value.dtype == torch.bool
        return self._reduced(value.long() if is_mask else value, self.world.sum, lambda _: 0)

    def max(self, value: Any) -> Any:
        """Return a number's maximum, or each element's, over all ranks (*collective*)."""
        return self._reduced(value, self.world.max, _least)

    def _reduced(self, value: Any, reduce: Callable[[Tensor], Tensor], neutral: Callable[[torch.dtype], float]) -> Any:
        is_tensor = isinstance(value, Tensor)
        own = value.detach() if is_tensor else torch.tensor(value, dtype=torch.float64, device=self.device)
        self._meet("reduce", own.dtype, tuple(own.shape))
        found = reduce(own if self._counts else torch.full_like(own, neutral(own.dtype)))
        if is_tensor:
            return found
        number = float(found.item())  # by its value: this rank's 0 may meet another's 0.5
        return int(number) if isinstance(value, int) and number.is_integer() else number

    def mean(self, value: Any, *, weight: float | Tensor | None = None) -> Any:
        """Return the mean of ranks' means (*collective*). Each is over its share's samples or `weight` things.

        Raises `RequestError` without `weight` between batches: shares differ, and the ranks' number would show.
        """
        if weight is None and not self._is_within and self.prepared.source is not None:
            raise RequestError(
                "session.mean was called outside of a batch, without weight: call it within the loop over the loader, "
                "or give weight=, the number of samples that this rank's value is a mean over."
            )
        count = self.samples if self._is_within else 1
        own = float(count if weight is None or not count else weight)
        total = self.sum(own)
        if not total > 0:
            raise RequestError(f"session.mean was given weights that sum to {total:g} over the ranks.")
        part = value * own if own else torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
        return self.sum(part) / total

    def gather(self, value: Any) -> Any:
        """Gather a value of each rank in rank order (*collective*).

        Tensors (n, …) are concatenated, whatever each rank's n. Their gradients are summed over the ranks, so that a
        loss over all gathered rows, such as a contrastive one, has the gradient of one device. Lists are concatenated
        too; any other value comes back as a list of all ranks' values. Lists and values hold numbers, texts, lists and
        dicts.
        """
        if isinstance(value, Tensor):
            own = value if self._counts else value[:0]
            if self.world.size == 1:
                return own
            self._meet("gather", value.dtype, tuple(value.shape[1:]))
            gathered: Tensor = Gathered.apply(own, self.world)
            return gathered
        self._meet("gather", type(value).__name__)
        try:
            found = self.world.gather(value if self._counts or not isinstance(value, list) else [])
        except TypeError as error:
            raise RequestError(
                f"session.gather takes tensors, and lists, dicts, numbers and texts; found {error}."
            ) from error
        return [item for own in found for item in own] if isinstance(value, list) else found

    def print(self, *words: Any, **how: Any) -> None:
        """Print on rank 0 alone, as Python's own `print` does."""
        if self.is_main:
            print(*words, **how)

    def log(self, **values: Any) -> None:
        """Record values by name, in steps.jsonl and TensorBoard.

        Within a training loop, values are means over this rank's share; recorded is the mean over all samples of the
        current step: every rank gives the same names. The host waits for nothing. Elsewhere rank 0's are recorded.
        """
        if taken := [name for name in values if name in _TAKEN]:
            raise RequestError(
                f"session.log was given {taken[0]!r}, which records have of their own; take another name."
            )
        if self._evaluating is not None:
            raise RequestError(
                "session.log was called within session.evaluating, whose batches are of no step: sum "
                "there, and log after the loop."
            )
        current, loop = self._shares.current, self.loop
        if current is None:
            told = {name: float(value) for name, value in values.items()}
            loop.recorder.record("values", step=self.step, epoch=loop.position.epochs, **told)
            return
        for name, value in values.items():
            held = on_device(value, self.device)
            size = current.share.size
            loop.meter.note(name, held * size if size else torch.zeros_like(held))

    def score(self, value: float) -> None:
        """Record a score of the current weights; higher is better. Give the same on every rank.

        The next checkpoint, usually at the end of the epoch, becomes `best` if none before had as high a score.
        """
        self.loop.judge(float(value))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the session, once (*collective*). Waits for the last checkpoint, records the end, releases the folder."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end_draws()
        try:
            if error is None:
                self._settle()
                self.loop.finish()
        except BaseException as late:
            error = late
            raise
        finally:
            for loader in (*self._loaders, *self._evaluated.values()):
                loader.close()
            self._held.__exit__(None if error is None else type(error), error, getattr(error, "__traceback__", None))
        if error is None:
            script.closed()


class Gathered(torch.autograd.Function):
    """Every rank's rows, in rank order; each rank's gradients of them are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, world: World) -> Tensor:
        parts = world.ragged(own.detach())
        ctx.world, ctx.start = world, sum(map(len, parts[: world.rank]))
        ctx.count = len(own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.world.sum(gradient)[ctx.start : ctx.start + ctx.count], None


def _modules_so_far() -> Iterable[nn.Module]:
    """Return the modules that exist."""
    return (item for item in gc.get_objects() if isinstance(type(item), type) and issubclass(type(item), nn.Module))


def _least(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return -math.inf
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min

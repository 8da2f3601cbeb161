"""Session for a user-written training loop on any number of devices.

    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in session.epochs(10):
        for x, y in loader:
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

The loader's batch size is the global batch. The loader yields this rank's share of one global micro-batch; the
gradients of all shares are weighted to add up to those of the mean over the global batch, and summed over the
ranks at the end of the last micro-batch's backward pass. Methods marked *collective* are called by every rank.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..checkpoint.resume import accumulation
from ..checks.samples import SampleCounts
from ..config.schema import RunConfig
from ..data.share import Micro, SharedLoader
from ..errors import ProofError, RequestError
from ..models.modes import evaluating
from ..nn import sync_batchnorm
from ..nn.sync_batchnorm import SyncBatchNorm
from ..record.telemetry import SAMPLED
from ..runs.run import Opened
from ..steps.loop import Loop
from ..steps.prepared import Prepared, Source
from ..training.gradients import GlobalBatch, check_loss, on_device
from ..training.precision import Precision
from ..world.random_state import seed_weights
from ..world.world import World
from . import parts, script

_TAKEN = (
    *("event", "time", "step", "epoch", "loss", "lr", "samples", "grad_norm", "top1"),
    *("samples_per_s", "step_s", "data_wait_s", "eta_s", *SAMPLED),
)
"""Names that records have of their own."""
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
        self.prepared = prepared or Prepared(ours.config, world, self.precision)
        self.loop = Loop(ours, self.prepared)
        self._held.callback(self.loop.close)
        self._batch = GlobalBatch(world, self.precision)
        self._loaders: list[SharedLoader] = []
        self._evaluated: dict[DataLoader[Any], SharedLoader] = {}
        self._micro: Micro | None = None  # the share under way; None outside of a loader's loop
        self._is_apart = False  # a share is under way of a loader by which no steps are counted
        self._is_evaluating = False
        self._in_epochs = self._has_stepped = self._has_gradients = self._has_compared = self._is_closed = False
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
        """Whether this is rank 0, which prints and writes. Never guard a collective with `is_main`."""
        return self.world.is_main

    @property
    def is_last(self) -> bool:
        """Whether the current share completes the global batch. Optimizers and schedules then step."""
        return self._micro is None or self._micro.last

    @property
    def samples(self) -> int:
        """Number of samples in the current share. 0 for an empty share, whose stand-in sample does not count."""
        return 0 if self._micro is None else self._micro.size

    @property
    def _counts(self) -> bool:
        return self._micro is None or self._micro.size > 0

    @property
    def step(self) -> int:
        """Optimizer steps made: global batches trained on."""
        return self.loop.position.step

    def prepare(self, *given: Any) -> Any:
        """Prepare parts for training; return them in order (*collective*). A single part is returned by itself.

        A model comes back as the same object, on this rank's device, with rank 0's weights and synchronised BatchNorm;
        an optimizer or a schedule as the same object, whose `step` acts at the end of a global batch; a DataLoader as
        one that yields this rank's share of each batch. Other objects with `state_dict` and `load_state_dict` are saved
        with the rest. Raises `RequestError` for objects that cannot be prepared, and once the loop has begun.
        """
        if self.loop.has_begun:
            raise RequestError("session.prepare was called after the loop had begun; prepare everything before it.")
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
            prepared.models["model" if number == 1 else f"model_{number}"] = part
            self._batch.add_model(part)
        elif isinstance(part, Optimizer):
            prepared.optimizers.append(part)
            parts.step_by(part, self._step)
        elif isinstance(part, DataLoader):
            self._loaders.append(self._shared(part))
            prepared.first_loader = prepared.first_loader or self._loaders[-1]
            return parts.Loader(self._loaders[-1], self.batches)
        elif isinstance(part, parts.Loader):
            raise RequestError("session.prepare was given a loader that it had returned; give it each one once.")
        elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            prepared.others.append(part)
            if isinstance(part, LRScheduler):
                parts.refine(part, "step", lambda step, *how, **more: step(*how, **more) if self.is_last else None)
        else:
            raise RequestError(
                "session.prepare takes models, optimizers, DataLoaders, schedules, and objects with state_dict and "
                f"load_state_dict; found a {type(part).__name__}."
            )
        return part

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
            self.loop.begin(count)
        self._in_epochs = True
        while self.loop.goes_on(count):
            before = self.step
            yield self.loop.position.epochs
            if self._has_gradients and self.step == before:
                why = "no optimizer has stepped after session.backward: call optimizer.step()"
                if self._has_stepped:
                    why = "its loop was over no loader that session.prepare returned: go over that one"
                raise RequestError(f"An epoch is over, and {why}.")
            self.loop.end_epoch()
        self._in_epochs = False
        self.loop.finish()

    def batches(self, source: Source) -> Generator[Any, None, None]:
        """Yield this rank's shares of an epoch. Counts a step after each whole batch of the first source."""
        loop, progress, counts = self.loop, self.world.progress, source is self.prepared.source
        position, strategy, replica = loop.position, self.prepared.strategy, self.prepared.replica
        # Others begin where the first one does only where a resumed run takes them up together, as in a zip.
        micros = source.micros(position.epochs, first=position.within if counts else loop.resumed_at)
        if counts and loop.has_begun:
            loop.start_clock()
        micro: Micro | None = None
        try:
            while not (counts and loop.is_done):  # --max-steps
                progress.enter("data")
                begun_s = time.perf_counter()
                micro = next(micros, None)
                loop.meter.pending.wait_s += time.perf_counter() - begun_s
                progress.enter("")  # what follows is the caller's own code
                if micro is None:
                    break
                if not counts:
                    self._is_apart = self._micro is None
                    yield micro.batch
                    self._is_apart = False
                    continue
                self._micro = micro
                self._batch.number = 0
                stands_in = micro.size == 0 and self.prepared.batchnorm == "sync"
                if SyncBatchNorm.stand_in != stands_in:  # a changed class loses Python's caches
                    SyncBatchNorm.stand_in = stands_in
                if loop.has_begun:
                    loop.note_samples(micro.indices)
                if strategy is None or replica is None:
                    yield micro.batch
                else:
                    with strategy.sync_on(replica, last=micro.last and loop.exchanges):
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
                # The caller has left the loop within a batch, maybe by an error: wait for no other rank.
                if micro is not None and not micro.last:
                    self._batch.drop()
                elif micro is not None and self._has_stepped:
                    loop.count_batch()
                self._count_step(micro.total if micro is not None and micro.last else 0)
                self._micro, SyncBatchNorm.stand_in = None, False
                if not loop.has_begun:  # a look at the data, whose values are of no step
                    loop.meter.pending.values.clear()
            self._is_apart = False

    def _count_step(self, samples: int) -> bool:
        """End a batch and count any optimizer step; return whether one happened."""
        self._batch.end(samples)
        if not self._has_stepped:  # a loop may step once in several batches: the step has their sum
            return False
        if self.precision.scaler is not None:
            self.precision.scaler.update()
        self._has_stepped = self._has_gradients = False
        self.loop.count_step(*self._batch.taken(), self._lr, self._norm)
        return True

    def _end_step(self, samples: int) -> None:
        if self._count_step(samples):
            if not self._has_compared:
                self._has_compared = True
                self._compare_data()
            self.loop.end_step()
        elif self._has_gradients and not self.prepared.optimizers:
            raise RequestError("A batch is over, and session.prepare was given no optimizer to step; give it yours.")

    def _compare_data(self) -> None:
        """Compare the ranks' samples of each loader (*collective*)."""
        for loader in (*self._loaders, *self._evaluated.values()):
            if not loader.is_compared and (doubt := loader.compare()):
                self.loop.recorder.record("warning", text=doubt)

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, reduction: str = "mean") -> None:
        """Add gradients of this rank's `loss` (0-dim) to the global batch's (*collective*).

        A mean is taken as one over this rank's samples, or over `weight` things, such as tokens that count; a sum, by
        `reduction="sum"`, as one over the whole batch, divided by all ranks' `weight` where that is given. After a
        batch's last micro-batch the gradients are those of the global batch on every rank. Raises `RequestError` for a
        loss that is no number, and for a total weight of zero.
        """
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            check_loss(loss)
        if reduction not in ("mean", "sum"):
            raise RequestError(f"session.backward takes reduction='mean' or 'sum', found {reduction!r}.")
        micro, progress = self._micro, self.world.progress
        if not self._batch.parameters:
            raise RequestError(
                "session.backward was called, and session.prepare was given no model, so that each rank would train "
                "one of its own: give it model, optimizer and loader."
            )
        if self._is_apart and micro is None:
            raise RequestError(
                "session.backward was called in a loop over a loader that session.prepare was not given first, and "
                "steps are counted by the first one's batches; give it this one first, or go over both together."
            )
        if not self.loop.has_begun:  # in a loop that does not go over `epochs`
            self.loop.begin(None)
            if micro is not None:
                self.loop.note_samples(micro.indices)
        self._has_gradients = True
        factor: float | Tensor = 1.0
        if weight is not None:
            weight = weight if self._counts else 0.0
            if isinstance(weight, Tensor) and not weight.is_cuda:
                weight = weight.item()
            # Of nothing that counts, a mean is no number, and neither are its gradients.
            factor = weight if reduction == "mean" else float(isinstance(weight, Tensor) or weight != 0)
        elif micro is None:
            factor = 1 / self.world.size if reduction == "mean" else 1.0
        elif reduction == "mean" or not micro.size:
            factor = micro.size / micro.total
        progress.enter("backward")
        self._batch.backward(loss, factor, weight, last=self.is_last, exchanges=self.loop.exchanges)
        progress.enter("")

    def backward_sum(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Add the gradients of a loss summed over a rank's samples. With `weight`, the sum is over as many things."""
        strategy, micro, progress = self.prepared.strategy, self._micro, self.world.progress
        if weight is not None:
            self.backward(loss, weight=weight, reduction="sum")
        elif strategy is None or micro is None:
            self.backward(loss / max(1, self.samples))
        else:
            progress.enter("backward")
            # Normalised once, by the global count: the sum over micro-batches and ranks is then the mean's gradient.
            self.precision.backward(loss, strategy.averages_over / micro.total if micro.size else 0.0)
            if micro.last and self.precision.scaler is not None:
                groups = (group for optimizer in self.prepared.optimizers for group in optimizer.param_groups)
                self.precision.unscale(each for group in groups for each in group["params"])
            progress.enter("")
            self._batch.note(loss.detach() if micro.size else torch.zeros_like(loss))

    def _step(self, optimizer: Optimizer, step: Any, closure: Any) -> Any:
        """Step the optimizer at the end of a global batch."""
        if closure is not None:
            raise RequestError("optimizer.step(closure) computes gradients that no rank could sum; give it none.")
        if not self.is_last:
            return None
        if not self._has_gradients:
            raise RequestError(
                "optimizer.step() without session.backward(loss) before it: gradients of loss.backward() are not "
                "weighed, nor summed over the ranks; call session.backward(loss) in its place."
            )
        self.world.progress.enter("step")
        found = None
        if self.precision.scaler is None:
            found = step()
        else:
            self.precision.scaler.step(optimizer, step)
        self.stepped(float(optimizer.param_groups[0]["lr"]))
        self.world.progress.enter("")
        if self.prepared.source is None and optimizer is self.prepared.optimizers[-1]:
            self._end_step(0)
        return found

    def stepped(self, lr: float, norm: Tensor | None = None, last: tuple[Tensor, Tensor] | None = None) -> None:
        """Note an optimizer step. `norm` is the gradients' norm, `last` the last micro-batch's (logits, labels)."""
        self._has_stepped, self._lr, self._norm = True, lr, norm
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
        before = self._micro, self._is_evaluating
        check = loop.checks.samples if loop.has_begun and shared.samples is not None else None
        counts = None if check is None else SampleCounts(shared.index_bound)
        if loop.has_begun:
            loop.record_steps()
            loop.confirm()
        with contextlib.ExitStack() as modes, world.progress.during("eval"):
            for model in self.prepared.models.values():
                modes.enter_context(evaluating(model))
                if self.prepared.batchnorm == "local":
                    world.broadcast(list(model.buffers()))
            modes.enter_context(torch.no_grad())
            try:
                for micro in shared.shares():
                    self._micro, self._is_evaluating = micro, True
                    world.progress.enter("eval")
                    evaluated += micro.size
                    if counts is not None:
                        counts.add(micro.indices)
                    yield micro.batch
            finally:
                self._micro, self._is_evaluating = before
        self._compare_data()
        found = int(world.sum(torch.tensor(evaluated, device=self.device)))
        if shared.samples not in (None, found) and world.progress.listener is None:
            raise ProofError(f"An evaluation took {found:,} samples, and the data set has {shared.samples:,}.")
        if check is not None and counts is not None:
            check.end_evaluation(counts, shared.samples or 0, self.step)
        if loop.has_begun:
            loop.start_clock()

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
        found = reduce(own if self._counts else torch.full_like(own, neutral(own.dtype)))
        if is_tensor:
            return found
        number = float(found.item())  # by its value: this rank's 0 may meet another's 0.5
        return int(number) if isinstance(value, int) and number.is_integer() else number

    def mean(self, value: Any, *, weight: float | Tensor | None = None) -> Any:
        """Return the mean of ranks' means (*collective*). Each is over its share's samples or `weight` things.

        Raises `RequestError` without `weight` between batches: shares differ, and the ranks' number would show.
        """
        if weight is None and self._micro is None and self.prepared.source is not None:
            raise RequestError(
                "session.mean was called outside of a batch, without weight: call it within the loop over the loader, "
                "or give weight=, the number of samples that this rank's value is a mean over."
            )
        count = 1 if self._micro is None else self._micro.size
        own = float(count if weight is None or not count else weight)
        total = self.sum(own)
        if not total > 0:
            raise RequestError(f"session.mean was given weights that sum to {total:g} over the ranks.")
        part = value * own if own else torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
        return self.sum(part) / total

    def gather(self, value: Tensor) -> Tensor:
        """Concatenate all ranks' tensors in rank order (*collective*). Each is (n, …); n may differ."""
        return torch.cat(self.world.ragged(value if self._counts else value[:0]))

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
        if self._is_evaluating:
            raise RequestError(
                "session.log was called within session.evaluating, whose batches are of no step: sum "
                "there, and log after the loop."
            )
        micro, loop = self._micro, self.loop
        if micro is None:
            told = {name: float(value) for name, value in values.items()}
            loop.recorder.record("values", step=self.step, epoch=loop.position.epochs, **told)
            return
        for name, value in values.items():
            held = on_device(value, self.device)
            loop.meter.note(name, held * micro.size if micro.size else torch.zeros_like(held))

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
        try:
            if error is None:
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


def _least(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return -math.inf
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min

"""Passes of a loop over its loaders: this rank's shares for training and for evaluation."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from ..checkpoint.resume import accumulation
from ..checks.samples import SampleCounts
from ..data.share import Micro, SharedLoader
from ..errors import ProofError, RequestError, counted
from ..exchange.base import Call
from ..models.modes import evaluating
from ..nn import sync_batchnorm
from ..nn.sync_batchnorm import SyncBatchNorm
from ..runs.loop import Loop
from ..runs.prepared import Evaluated, Source
from . import parts
from .randomness import Draws
from .shares import Handed, Shares, samples_in
from .stepper import Stepper

_MOST_EVALUATED = 4  # loaders kept for further evaluations: a loop may make a new loader each time


class Passes:
    """The loaders of a session, and the loop's place in them. Every rank makes the same calls."""

    def __init__(self, loop: Loop, stepper: Stepper, draws: Draws, shares: Shares) -> None:
        self.shares = shares
        self.loaders: list[SharedLoader] = []
        self.number = 0
        """Number of passes over any loader so far."""
        self.at_data_end = ""
        """Fingerprint of the prepared objects at the end of an epoch's batches, of a run with a folder."""
        self.evaluated_share: Micro | None = None
        """Current share of an evaluation."""
        self._loop, self._prepared, self._world = loop, loop.prepared, loop.prepared.world
        self._stepper, self._draws = stepper, draws
        self._prepared_loaders: dict[int, weakref.ref[parts.Loader]] = {}  # by source: the loader that the loop has
        self._places: dict[int, int] = {}  # by source: its passes over this epoch, less one
        self._passing: dict[int, list[int]] = {}  # by source: [epoch, place, micro-batches read] of a pass under way
        self._at_step: dict[int, list[int]] = {}  # by source: the same, at the last optimizer step
        self._is_cut = False  # whether --max-steps has ended the first source's pass early
        self._resumed: dict[int, list[int]] = {}  # by source: the same, of a resumed run
        self._evaluation_loaders: dict[DataLoader[Any], SharedLoader] = {}  # of evaluations
        self._evaluations = self._open_evaluations = 0
        self._modes = contextlib.ExitStack()  # of the evaluations under way
        self._thread = threading.get_ident()
        self._refusal: RequestError | None = None  # raised in another thread, which may have swallowed it
        self._has_warned = self._has_warned_of_evaluation = False
        self._forward: Handed | None = None  # share of the last forward pass for training
        self._open_pass: int | None = None  # the last pass over the first source whose iterator exists

    @property
    def samples(self) -> int:
        """Number of samples in the current share; 0 for an empty one, and outside of a loader's loop."""
        if self.evaluated_share is not None:
            return self.evaluated_share.size
        current = self.shares.current
        return 0 if current is None else current.share.size

    @property
    def is_within(self) -> bool:
        """Whether the loop is at a share, of training or of an evaluation."""
        return self.evaluated_share is not None or self.shares.current is not None

    def prepare(self, loader: DataLoader[Any]) -> parts.Loader:
        """Return a loader of this rank's shares (*collective*). The first one's batches count steps."""
        shared = self.shared(loader)
        self.loaders.append(shared)
        if self._prepared.first_loader is None:
            self._prepared.first_loader = shared
            self._prepared.is_renewed = self._loop.has_begun
        prepared = parts.Loader(shared, self.over)
        self._prepared_loaders[id(shared)] = weakref.ref(prepared)
        return prepared

    def _renew(self, source: SharedLoader) -> None:
        """Count steps by this loader's batches if the loop has made it in place of the first one, which is gone."""
        first = self._prepared.source
        has = self._prepared_loaders.get(id(first))
        if first is source or has is None or has() is not None:
            return
        self._prepared.first_loader, self._prepared.is_renewed = source, True
        self._loop.steps = source.steps()
        self.loaders = [loader for loader in self.loaders if loader is not first]
        del self._prepared_loaders[id(first)]
        if isinstance(first, SharedLoader):
            first.close()

    def shared(self, loader: DataLoader[Any], *, evaluates: bool = False) -> SharedLoader:
        """Return the loader's shares (*collective*)."""
        config = self._loop.config
        saved = accumulation(self._loop.state, config)
        return SharedLoader(
            *(loader, self._world),
            seed=config.seed,
            accumulate=saved or config.batch.accumulate,
            micro_batch=None if saved else config.batch.micro_batch,
            dtype=self._prepared.precision.cast,
            evaluates=evaluates,
        )

    def over(self, source: Source) -> Iterator[Any]:
        """Return an iterator over this rank's shares of an epoch. The batches of the first source count steps."""
        return self._over(source, is_early=not self._loop.has_begun)

    def _over(self, source: Source, *, is_early: bool) -> Generator[Any, None, None]:
        """Yield the shares. `is_early`: the iterator was made before the loop, and may go on over several epochs."""
        self._check_thread()
        loop, progress, stepper = self._loop, self._world.progress, self._stepper
        if isinstance(source, SharedLoader):
            self._renew(source)
        counts = source is self._prepared.source and not loop.is_finished
        stepper.settle()
        place = self._places[id(source)] = self._places.get(id(source), -1) + 1
        number, self.number = self.number, self.number + 1
        epoch, first, read = loop.position.epochs, 0, 0
        if counts and loop.has_begun:
            begun = loop.begin_pass(place)
            if begun is None:  # a resumed run has trained on this pass
                return
            first = begun
        elif (resumed := self._resumed.pop(id(source), None)) is not None and (is_early or loop.resumed_at):
            epoch, place, read = resumed
            self._places[id(source)] -= 1  # that pass goes on
            first, read = divmod(read, source.plan.accumulation)
        if counts:
            self._open_pass = number
        may_drop = isinstance(source, SharedLoader) and source.loader.collate_fn is not default_collate
        micros = source.micros(epoch, first=first, again=place)
        for _ in range(read):
            next(micros, None)
        if counts and loop.has_begun:
            loop.start_clock()
        steps, index = loop.position.step + stepper.has_stepped, first * source.plan.accumulation + read
        is_first_batch, here, made_in = True, [epoch, place, index], loop.position.epochs
        self._passing[id(source)] = here
        try:
            while True:
                self._check_thread()
                if not (counts or is_early or loop.position.epochs == made_in):
                    self._warn_of_iterator()
                stepper.settle()
                if stepper.is_clean and (self._forward is None or self._forward.is_used):
                    loop.save_due()
                if counts and loop.is_done and not loop.is_finished:  # --max-steps
                    self._is_cut = True
                    break
                self._draws.end()
                progress.enter("data")
                begun_s = time.perf_counter()
                micro = next(micros, None)
                loop.meter.pending.wait_s += time.perf_counter() - begun_s
                progress.enter("")  # the caller's code follows
                if micro is None:
                    break
                if is_first_batch and counts and loop.is_running and (order := getattr(source, "order_digest", "")):
                    self._prepared.exchange.meet(Call.ORDER, number, [f"order {order}"])
                if is_first_batch and getattr(source, "has_changed", False):
                    loop.warn(
                        f"the stream's last sample before batch {first + 1} is not the one that the resumed run read: "
                        "this run trains on other samples; seed the data set's shuffle, and keep its files"
                    )
                is_first_batch = False
                samples = samples_in(micro.batch, max(1, micro.size)) if may_drop else micro.size
                handed = Handed(micro.share, number, index, counts, samples if micro.size else 0, may_drop)
                handed.epoch, handed.place, handed.indices = epoch, place, micro.indices
                index += 1
                here[2] = index
                if self.shares.hand_out(handed, None if self._prepared.is_recipe else micro.batch):
                    self._stand_in()
                    self._draws.begin(handed, watches=counts and loop.has_begun)
                if counts and not place and loop.is_running:
                    loop.note_samples(handed.indices, last=handed.share.last)
                box = [micro.batch]
                del micro  # nothing here keeps a batch alive
                yield box.pop()
            self.shares.leave()
            self._stand_in()
            self._draws.come_to(self.shares.newest_open)  # the loop may draw for batches that it keeps
            if counts and loop.is_running:
                self.compare()
                if self._prepared.exchange.drift and loop.is_done and loop.position.within != loop.steps:
                    loop.warn(
                        "max_steps has ended the run between two exchanges of weights, and they are exchanged now: a "
                        "run that continues from here differs from one without this end; give a multiple of "
                        "--exchange-every"
                    )
                self._prepared.synchronise()
                loop.position.is_open = loop.epochs is not None
                self.at_data_end = "" if loop.folder is None else self._prepared.fingerprint()
                if loop.epochs is None and loop.position.step + stepper.has_stepped > steps:
                    loop.end_data()
                    self.end_epoch()
        except GeneratorExit:
            stepper.is_left = False
            if counts and stepper.share is not None and self.shares.current is stepper.share:
                stepper.leave()
            raise
        finally:
            if self._open_pass == number:
                self._open_pass = None
            if self._passing.get(id(source)) is here:
                del self._passing[id(source)]
                if not self._is_cut:
                    self._at_step.pop(id(source), None)
            self.shares.end_pass(number)
            micros.close()  # with workers that read ahead
            if not loop.has_begun:  # a look at the data: its values belong to no step
                loop.meter.pending.values.clear()

    def note_step(self) -> None:
        """Note where the loop is in each loader, right before an optimizer step."""
        if len(self.loaders) > 1:
            self._at_step = {key: [*here] for key, here in self._passing.items()}

    def state(self) -> dict[str, Any]:
        """Return the loop's place in its loaders, for a checkpoint.

        `loaders` has, for each but the first, its number of passes in this epoch and its pass under way, if any, as it
        was at the last step: a loop may have read a batch for the next one. A loader that is read along with the first
        one, as in a zip, continues where that does. `streams` has what `SharedLoader.place` returns.
        """
        source, position, passing = self._prepared.source, self._loop.position, self._passing | self._at_step
        batches_read = passing.get(id(source), [0, 0, 0])[2]
        trained = 0 if source is None else position.within * source.plan.accumulation
        positions, streams = list[Any](), list[Any]()
        for loader in self.loaders:
            here: list[int] | None = [position.epochs, position.passes, trained]
            if loader is not source:
                here = passing.get(id(loader))
                if here is not None and here[2] == batches_read:
                    here = [*here[:2], trained]
                positions.append([self._places.get(id(loader), -1), here])
            streams.append([] if here is None else loader.place(here[:2], here[2] // loader.plan.accumulation))
        return {"loaders": positions, "streams": streams}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned."""
        if state is None:
            return
        for loader, place in zip(self.loaders, state.get("streams", []), strict=False):
            loader.restore(place)
        loaders = [loader for loader in self.loaders if loader is not self._prepared.source]
        for loader, (place, here) in zip(loaders, state["loaders"], strict=False):
            self._places[id(loader)] = place
            if here is not None:
                self._resumed[id(loader)] = here

    def begin_epoch(self) -> None:
        """Count the passes over each loader from 0."""
        self._places.clear()

    def end_epoch(self) -> None:
        """End an epoch (*collective*)."""
        self.raise_refusal()
        self._warn_of_open_pass()
        self._draws.end()
        self._stepper.leave()
        self.shares.leave()
        self.shares.forget()
        self._prepared.exchange.meet(Call.END_EPOCH, self._loop.position.step + self._stepper.has_stepped)
        self._prepared.synchronise()
        self.begin_epoch()
        loop, position = self._loop, self._loop.position
        is_within = loop.is_done and position.within != loop.steps and bool(self.at_data_end)
        position.is_cut = is_within and self._prepared.fingerprint() != self.at_data_end
        if position.is_cut:
            loop.warn(
                f"max_steps has ended the run within an epoch of {counted(loop.steps or 0, 'step')}, and the code "
                "after its batches has changed a model, an optimizer or a schedule: a run that continues from here "
                "repeats that code; give a multiple of an epoch's steps"
            )
        loop.end_epoch()

    def _check_thread(self) -> None:
        """Refuse to hand out batches in another thread."""
        if threading.get_ident() != self._thread:
            self._refusal = RequestError(
                "A prepared loader was read in another thread than the one that trains, which counts steps by it: read "
                "it in the loop; num_workers= reads ahead."
            )
            raise self._refusal

    def raise_refusal(self) -> None:
        """Raise in this thread what was raised in another one."""
        if self._refusal is not None:
            raise self._refusal

    def _warn_of_open_pass(self) -> None:
        loop, current = self._loop, self.shares.current
        is_open = current is not None and current.pass_number == self._open_pass
        if is_open and loop.position.epochs + 1 < (loop.epochs or 0):
            self._warn_of_iterator()

    def _warn_of_iterator(self) -> None:
        if self._has_warned or self._loop.folder is None:
            return
        self._has_warned = True
        self._loop.warn(
            "an epoch is over, and an iterator over a loader of it is not: if the iterator outlives its epoch, a "
            "resumed run differs, since it begins the epoch at the first batch. Make an iterator in each epoch, as "
            "`for batch in loader` does, or, of a second loader, before session.epochs"
        )

    def see(self, values: Any) -> None:
        """Note the inputs of a model's forward, which show the batch that the loop trains."""
        if self.evaluated_share is None:
            current = self.shares.current
            self.shares.see(values)
            if self.shares.current is not current:
                self.come_to()
            stepper = self._stepper
            if not torch.is_grad_enabled():
                return
            if stepper.has_stepped and self.shares.current is not stepper.share:
                stepper.settle()  # before a forward pass of the next batch changes the state to save
            self._forward = self.shares.current

    def mark(self, output: Any) -> None:
        """Note a model's output, whose losses belong to the current share."""
        if self.evaluated_share is None and torch.is_grad_enabled():
            self.shares.mark(output)

    def come_to(self) -> None:
        """Continue with the current share."""
        self._stand_in()
        self._draws.come_to(self.shares.current)

    def check_assumed(self, handed: Handed) -> None:
        """Raise `RequestError` if the forward pass of this share's loss was taken to be of an unlike one."""
        assumed, self.shares.assumed = self.shares.assumed, None
        if assumed is None or assumed[0] is handed:
            return
        stood_in = assumed[0] is not None and assumed[0].share.size == 0
        if (self._prepared.batchnorm == "sync" and stood_in != (handed.share.size == 0)) or self._draws.is_other(
            assumed[0], handed
        ):
            raise RequestError(
                "session.backward was given the loss of a batch whose tensors the loop replaced before it called the "
                "model, while it had read others: BatchNorm's statistics or random draws were those of another batch. "
                "Call the model with the batch's own tensors, or train each batch before you read the next."
            )

    def _stand_in(self) -> None:
        current = self.shares.current
        stands_in = current is not None and current.share.size == 0 and self._prepared.batchnorm == "sync"
        if SyncBatchNorm.stand_in != stands_in:  # a changed class loses Python's caches
            SyncBatchNorm.stand_in = stands_in

    def evaluation(self, loader: DataLoader[Any] | Evaluated) -> Iterator[Any]:
        """Yield evaluation shares (*collective*). See `Session.evaluating`."""
        world, loop, exchange = self._world, self._loop, self._prepared.exchange
        self._stepper.settle(saves=False)  # code of this step may follow, such as a schedule's
        self._draws.end()
        exchange.meet(Call.BEGIN_EVALUATION, self._evaluations)
        self._prepared.synchronise()
        shared, evaluated = self._evaluation_shares(loader) if isinstance(loader, DataLoader) else loader, 0
        self._warn_of_evaluation(shared)
        outer_share = self.evaluated_share
        check = loop.checks.samples if loop.has_begun and shared.samples is not None else None
        counts = None if check is None else SampleCounts(shared.index_bound)
        if loop.has_begun:
            loop.record_steps()
            loop.confirm()
            if shared.samples is not None:
                loop.recorder.record("evaluate", step=loop.position.step, samples=shared.samples)
        with self._evaluating():
            try:
                for micro in shared.shares():
                    self.evaluated_share = micro
                    world.progress.enter("eval")
                    evaluated += micro.size
                    if counts is not None:
                        counts.add(micro.indices)
                    yield micro.batch
            finally:
                self.evaluated_share = outer_share if self._open_evaluations > 1 else None
        exchange.meet(Call.END_EVALUATION, self._evaluations)
        self._evaluations += 1
        self.compare()
        total = int(world.sum(torch.tensor(evaluated, device=world.device)))
        if shared.samples not in (None, total) and not world.is_imagined:
            raise ProofError(f"An evaluation took {total:,} samples, and the data set has {shared.samples:,}.")
        if check is not None and counts is not None:
            check.end_evaluation(counts, shared.samples or 0, loop.position.step)
        self._draws.come_to(self.shares.current)
        if loop.has_begun:
            loop.start_clock()

    def _evaluation_shares(self, loader: DataLoader[Any]) -> SharedLoader:
        """Return the loader's shares for evaluation, which outlive one (*collective*)."""
        if loader not in self._evaluation_loaders:
            while len(self._evaluation_loaders) >= _MOST_EVALUATED:
                self._evaluation_loaders.pop(next(iter(self._evaluation_loaders))).close()
            self._evaluation_loaders[loader] = self.shared(loader, evaluates=True)
        return self._evaluation_loaders[loader]

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluate the models without gradients until the last evaluation ends (*collective*).

        The two evaluations of `zip(session.evaluating(a), session.evaluating(b))` end in the order in which they began.
        """
        if not self._open_evaluations:
            self._modes.enter_context(self._world.progress.during("eval"))
            for model in self._prepared.groups.values():
                self._modes.enter_context(evaluating(model))
                if self._prepared.batchnorm == "local":
                    self._world.broadcast(list(model.buffers()))
            self._modes.enter_context(torch.no_grad())
        self._open_evaluations += 1
        try:
            yield
        finally:
            self._open_evaluations -= 1
            if not self._open_evaluations:
                self._modes.close()

    def _warn_of_evaluation(self, shared: Evaluated) -> None:
        untracked = [name for model in self._prepared.models.values() for name in sync_batchnorm.untracked(model)]
        # An `Evaluated` of another kind marks its stand-ins.
        is_small = isinstance(shared, SharedLoader) and (shared.samples or self._world.size) < self._world.size
        if self._world.size == 1 or self._has_warned_of_evaluation or not (untracked or is_small):
            return
        self._has_warned_of_evaluation = True
        if untracked:
            self._loop.warn(
                f"scores depend on the number of ranks: BatchNorm {untracked[0]} keeps no running statistics, and "
                "evaluates each rank's share by those of the share"
            )
        if is_small:
            self._loop.warn(
                f"an evaluation has {counted(shared.samples or 0, 'sample')}, fewer than ranks: a rank without one "
                "computes another's. Sum within the loop by session.sum, which leaves it out"
            )

    def compare(self) -> None:
        """Compare the ranks' samples of each loader (*collective*)."""
        for loader in (*self.loaders, *self._evaluation_loaders.values()):
            for warning in () if loader.is_compared else loader.compare():
                self._loop.warn(warning)

    def close(self) -> None:
        """End all workers; leave the current share, which an error may have interrupted."""
        self.shares.leave()
        self._stand_in()
        for loader in (*self.loaders, *self._evaluation_loaders.values()):
            loader.close()

"""Run loop: counts, records, saves and checks steps, and ends the run.

A `Session` calls `Loop` at the end of each step and epoch. Every rank makes the same calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint import resume
from ..checkpoint.state import State
from ..checks.samples import Indices
from ..errors import RequestError, RunError, Stopped, counted, ranks_named
from ..exchange.base import Call
from ..files import own_folder, shown, understanding, write_json
from ..monitor.signals import NOT_SAVED, StopRequest
from ..world.random_state import load_generators, save_generators, seed_all
from .callbacks import Callbacks
from .checks import RunChecks
from .folders import unwritable
from .meter import Meter
from .opened import OpenRun
from .position import Position
from .prepared import Prepared
from .report import describe_start
from .saving import Saver

if TYPE_CHECKING:
    from .profiler import Profiler


_STOP_S = 30.0
"""Wait of a stop for an upload: schedulers grant a minute or two."""


class Stage(Enum):
    """Stage of a run."""

    PREPARING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Loop:
    """Position and records of one run."""

    def __init__(
        self,
        run: OpenRun,
        prepared: Prepared,
        *,
        is_measurement: bool = False,
        resumed: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the checkpoints of the run's folder, if any.

        Calls `resumed` whenever the clock starts. See `Hooks` on `is_measurement`.
        """
        config, world = run.config, prepared.world
        self.config, self.recorder, self.state, self.folder = config, run.recorder, run.state, config.record.output
        self.prepared, self.position = prepared, Position()
        self.callbacks = Callbacks()
        self.summary: dict[str, Any] = {}
        """Summary of a run that has ended."""
        self.meter = Meter(world, run.recorder, prepared.devices, log_every=config.record.log_every)
        self.stop = StopRequest(quiet=not world.is_main, saves=self.folder is not None)
        self.pending: Callable[[], dict[str, Any] | None] = lambda: None
        """Returns the state between backward and optimizer step, for a checkpoint."""
        self.checks: RunChecks  # once the loop has begun
        self.stage = Stage.PREPARING
        self.epochs: int | None = None
        """Number of epochs; None for a loop without `session.epochs`."""
        self.steps: int | None = None  # per epoch; None if unknown
        self.total_steps = 0  # 0 if unknown
        self.exit: int | None = 0
        """Exit code in the summary; None if unknown."""
        self.resumed_at = 0  # batches of the current epoch before the resume; 0 after the first batch
        self._world, self._is_measurement, self._on_resume = world, is_measurement, resumed
        self._saver = None if self.folder is None else Saver(self.folder, run, world, self.callbacks)
        self._saved_at = None if self._saver is None else self._saver.resumed_at
        self._profiler: Profiler | None = None
        if config.record.profile:
            if self.folder is None:
                raise RequestError("--profile writes its traces to the run's folder, and there is none: give --output.")
            from .profiler import Profiler  # late: it imports torch.profiler

            self._profiler = Profiler(config.record.profiled_steps, world, self.folder)
        prepared.exchange.asks = lambda: self.stop.asked
        self._stop_handling = contextlib.ExitStack()  # from the loop's beginning to its end
        self._is_stopping = self._is_due = self._has_recorded_checks = self._has_compared = False
        self._has_differed = False
        self._has_waited = False  # whether a save waits for the ranks' next exchange of weights
        self._train_s = 0.0  # at the beginning of the epoch
        self._score: tuple[int, float] | None = None  # (step, score) of the last scored weights, until they are saved
        self._evaluation: dict[str, Any] = {}
        self._batches = 0  # that the loop has received in the epoch's first pass
        self._resumed: tuple[int, int, list[int]] | None = None  # passes, batches and trained passes of the epoch

    @property
    def has_begun(self) -> bool:
        """Whether the loop has begun; it may have ended."""
        return self.stage is not Stage.PREPARING

    @property
    def is_running(self) -> bool:
        """Whether the loop has begun and has not ended."""
        return self.stage is Stage.RUNNING

    @property
    def is_finished(self) -> bool:
        """Whether the loop has ended."""
        return self.stage is Stage.FINISHED

    def warn(self, text: str) -> None:
        """Record a warning, a sentence or a clause."""
        self.recorder.record("warning", text=text[0].upper() + text[1:].rstrip(".") + ".")

    def begin(self, epochs: int | None) -> None:
        """Restore the state, if any; record the start (*collective*)."""
        config, world, source = self.config, self._world, self.prepared.source
        self._stop_handling.enter_context(self.stop)
        self.epochs = epochs
        self.steps = None if source is None else source.steps()
        self.total_steps = min(filter(None, ((epochs or 0) * (self.steps or 0), config.max_steps)), default=0)
        self.prepared.begin()
        if self.state is not None:
            self._restore(self.state)
        else:  # from here on the generators serve the model's own randomness, which differs between ranks
            seed_all(config.seed, world.rank, devices=self.prepared.devices)
        world.progress.step = self.position.step
        world.together(self._record_start)
        self.checks = RunChecks(self.prepared, self._remedy, self.position)
        self.stage = Stage.RUNNING
        self._profile()
        self.start_clock()

    def _record_start(self) -> None:
        try:
            self.recorder.record("start", **describe_start(self))
            if self.state is not None and self.state.caution:
                self.recorder.record("warning", text=self.state.caution)
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def start_clock(self) -> None:
        """Start timing steps, at the first one and after non-training work."""
        self.meter.start()
        self._on_resume()

    @property
    def is_done(self) -> bool:
        """Whether the run has made all steps that --max-steps allows or a recipe plans."""
        limit = self.total_steps if self.prepared.is_recipe else self.config.max_steps or 0
        return 0 < limit <= self.position.step and not self._is_measurement

    def goes_on(self, epochs: int) -> bool:
        """Return whether another epoch remains."""
        position = self.position
        if self._is_measurement:
            return True
        is_left = position.is_open or (position.epochs < epochs and not self.is_done)
        return is_left and not position.stalled(self.config.patience)

    def note_samples(self, indices: Indices, *, last: bool) -> None:
        """Note this rank's sample indices (n,) of a micro-batch; the `last` one completes its batch."""
        if self.checks.samples is not None:
            self.checks.samples.add(indices)
            if last:
                self.checks.samples.end_batch()
                self._batches += 1

    def judge(self, score: float | None, on: str, values: dict[str, float]) -> None:
        """Record the current weights' score. See `Session.score`."""
        position = self.position
        self._is_due |= score is not None and self.is_running and score > position.best_top1
        position.judge(score, values)
        self._score = None if score is None else (position.step, score)
        evaluation = {"step": position.step, "epoch": position.epochs, "on": on, "score": score} | values
        if values:
            self._evaluation = evaluation
        self.callbacks.call("evaluate", **evaluation)

    def begin_pass(self, place: int) -> int | None:
        """Return the first batch of pass `place` over this epoch's data; None for a completed pass.

        A resumed epoch skips the passes that it has trained on, and continues within the current one.
        """
        position = self.position
        if self._resumed is not None:
            passes, within, trained = self._resumed
            if place < passes:
                return None if place in trained else 0
            self._resumed = None
            if place == passes:
                return within
        position.passes, position.within = place, 0
        return 0

    def count_batch(self, place: int, batch: int) -> None:
        """Note a trained global batch of this epoch by pass and number, with or without a step.

        Raises `RequestError` for a batch that was trained before a resume.
        """
        position = self.position
        if place == position.passes and batch < self.resumed_at:
            raise RequestError(
                f"The checkpoint holds {counted(self.resumed_at, 'batch')} of this epoch, and the resumed loop trains "
                f"number {batch + 1} again: read the loader within the epoch, as in `for batch in loader`, or leave "
                "--checkpoint-every out, so that checkpoints are those of whole epochs."
            )
        position.passes, position.within, position.is_open = place, batch + 1, False
        if place not in position.trained:
            position.trained.append(place)
        self.resumed_at = 0

    def count_step(self, loss: Tensor, samples: int, lr: float, norm: Tensor | None) -> None:
        """Count a step of `samples`. `loss` is this rank's part; `norm` is the gradients' norm, if known."""
        position = self.position
        position.step = step = position.step + 1
        self._world.progress.step = step
        self.meter.add(step, position.epochs, lr, samples, loss, norm)

    def end_step(self, *, saves: bool = True) -> None:
        """Verify, record and save as due after a step (*collective*). Raises `Stopped`, `RunError` or `ProofError`.

        Without `saves`, a save or stop waits for `save_due`, or for a later step; and for the ranks' next exchange of
        weights, if they step by their own gradients.
        """
        step, every = self.position.step, self.config.checkpoint.checkpoint_every
        self._profile()
        waits = self.prepared.exchange.drift > 0
        if not waits and self.checks.replicas.due(step):
            self.checks.replicas.check(step, self.meter.step_s)
        # The end of an epoch saves anyway, once the weights are evaluated.
        save = every is not None and step % every == 0 and self.position.within != self.steps and not self.is_done
        self._is_due, save = False, save or self._has_waited
        self._has_waited = save and waits
        due = (save or self._is_stopping) and not waits
        if due or self.meter.due(self.stop.asked) or self.prepared.exchange.is_asked:
            stopping = self.record_steps()
            # Without a source an epoch cannot be resumed midway. At the end of an epoch, code after the user's loop
            # over batches may need the loop's results.
            self._is_stopping = self._is_stopping or stopping
            is_kept = self.prepared.source is not None and not self.prepared.is_renewed
            has_ended = (not is_kept and self.epochs) or self.position.within == self.steps
            self._is_due = (self._is_stopping or save) and not has_ended and not waits
            if saves:
                self.save_due()

    def _profile(self) -> None:
        """Begin, continue or end the trace of `--profile`, if any; record its report (*collective*)."""
        profiler, step = self._profiler, self.position.step
        if profiler is None:
            return
        if step == profiler.steps[-1]:
            self._is_stopping = self.record_steps() or self._is_stopping
        if (report := profiler.advance(step)) is not None:
            self.start_clock()  # writing the trace is no part of a step
            self.recorder.record("profile", **report)

    def save_due(self) -> None:
        """Save or stop if that is due since the last step (*collective*)."""
        if not self._is_due:
            return
        self._is_due = False
        if self._is_stopping:
            raise self.stopped()
        self.save()

    def end_data(self) -> None:
        """Record and verify after an epoch's or run's last step (*collective*). A stop waits for `end_epoch`."""
        self._is_stopping = self.record_steps() or self._is_stopping
        self.confirm()

    def end_epoch(self) -> None:
        """Record an epoch and its evaluation, and save (*collective*)."""
        position, source = self.position, self.prepared.source
        position.is_open = False
        self.record_steps()
        if not self.is_done or position.within == self.steps:
            if source is not None and self.checks.samples is not None:
                due = min(self._batches * source.plan.global_size, source.samples or 0)
                self.checks.samples.end_epoch(position.epochs, due, source.index_bound)
            self._batches = 0
            position.epoch_s.append(self.meter.train_s - self._train_s)
            self._train_s = self.meter.train_s
            self.recorder.record("epoch", step=position.step, epoch=position.epochs, epoch_s=position.epoch_s[-1])
            position.epochs += 1
            position.within, position.passes, position.trained = 0, 0, []
            self._resumed, self.resumed_at = None, 0
        if self._evaluation:
            self.recorder.record("eval", **self._evaluation)
            self._evaluation = {}
        self.save()
        if self._is_stopping:
            raise self.stopped()

    def record_steps(self) -> bool:
        """Record pending steps; return whether any rank has a stop request (*collective*)."""
        if not self.meter.pending.rows:
            return False
        pending, step = self.meter.pending, self.position.step
        pending.values.sort(key=lambda value: value[:2])  # ranks may log in another order
        first = step + 1 - len(pending.rows)
        names = [f"{name} of step {first + number}" for number, name, *_ in pending.values]
        self.prepared.exchange.meet(Call.RECORD, step, names)
        self.prepared.exchange.is_asked = False
        stopping, non_finite = self.meter.flush(stop=self.stop.asked, total_steps=self.total_steps)
        if non_finite is not None:
            raise self._non_finite_error(*non_finite)
        if self._saver is not None:
            self._saver.poll()
        return stopping

    def _non_finite_error(self, step: int, ranks: list[int]) -> RunError:
        """Return the error for a non-finite loss (*collective*). Ranks with such a loss write their sample indices."""
        doubt = ""
        if not self.prepared.exchange.drift:
            doubt = self.checks.replicas.explain_loss(self.position.step, step)
        location, indices = ranks_named(ranks), getattr(self.prepared.source, "indices", None)
        if self.folder is not None and indices is not None:
            rank, folder = self._world.rank, self.folder / "failures"
            with contextlib.suppress(OSError):  # a full disk must not hide why the run failed
                if rank in ranks:
                    own_folder(folder)
                    report = {"step": step, "rank": rank, "indices": [part.tolist() for part in indices(step - 1)]}
                    write_json(folder / f"nonfinite_step_{step}_rank_{rank}.json", report)
                location += f"; the batch's sample indices are in {shown(folder)}"
        advice = f"{self.prepared.remedy()} {doubt}".rstrip()
        return RunError(f"The loss at step {step} is not a finite number on {location}. {advice}")

    def _remedy(self) -> str:
        self.record_steps()  # raises for a non-finite loss, which is the better explanation
        return self.prepared.remedy()

    def confirm(self) -> None:
        """Compare the replicas, unless already compared after this step (*collective*)."""
        if not self.prepared.exchange.drift:
            self.checks.replicas.confirm(self.position.step, self.meter.step_s)

    def save(self) -> None:
        """Compare the replicas, then save a checkpoint (*collective*)."""
        if not self._is_measurement:
            self.prepared.synchronise()
            self.confirm()
            step, scored = self.position.step, self._score
            score = scored[1] if scored is not None and scored[0] == step else None
            self._score, self._saved_at, self._is_due, self._has_waited = None, step, False, False
            if self._saver is not None:
                self._saver.save(self._capture, step=step, score=score)
        self.start_clock()

    def stopped(self) -> Stopped:
        """Save; return the error of a requested stop (*collective*)."""
        step, ending = self.position.step, f"; {NOT_SAVED}."
        if self._saved_at != step:
            self.save()
        if self._saver is not None:
            reason, hint = self._saver.finish(step, upload_limit_s=_STOP_S)
            ending = f" and saved; {hint}."
            if reason:
                ending = f", but its checkpoint could not be written; {reason}: {hint}."
        total = f" of {self.total_steps}" if self.total_steps else ""
        return Stopped(f"Stopped on request at step {step}{total}{ending}")

    @property
    def may_stop(self) -> bool:
        """Whether a run that stops here can be continued here: the epoch's batches, or all epochs, are over."""
        is_kept = self.prepared.source is not None and not self.prepared.is_renewed
        return self.is_finished or (is_kept and self.position.is_open)

    def load_best(self) -> int | None:
        """Load the weights of the best checkpoint; return its step (*collective*). None unless every rank has it."""
        if self.folder is None or self._saver is None:
            return None
        self._world.together(self._saver.close)  # `best` may be on its way to the disk
        best = str(self.folder / "checkpoints" / "best")
        checkpoint = dataclasses.replace(self.config.checkpoint, resume=best)
        state: State | None = None
        with contextlib.suppress(RequestError):
            state = resume.load(dataclasses.replace(self.config, checkpoint=checkpoint), self._world)
        # After a full disk the folder may lack the best weights.
        if state is None or (state.meta["scores"] or {}).get("top1") != self.position.best_top1:
            return None
        self.prepared.load_weights(state)
        return int(state.meta["step"])

    def finish(self) -> None:
        """End a running loop: wait for the last checkpoint, record the result (*collective*)."""
        if not self.is_running:
            return
        self.stage = Stage.FINISHED
        self.record_steps()
        if self._profiler is not None and not self._profiler.is_done:
            self.warn(f"--profile {self.config.record.profile}: this start has not made all of these steps: no trace")
        position = self.position
        if self._saved_at != position.step:
            if position.scores is not None and position.evaluated == position.step:  # in the resumed folder
                self._score = position.step, position.scores["top1"]
            self.save()
        reason, hint = ("", "") if self._saver is None else self._saver.finish(position.step)
        fields = self._measured()
        self.summary = plain('session.on("end")', self.callbacks.call("end", **fields)) | fields
        self._record_checks()
        self.recorder.record("finish", **self.summary | {"proof": self.checks.outcomes()})
        self.recorder.flush()  # while Python can start threads, unlike at the end of a script
        if reason:
            raise RunError(f"The weights of the last step, {position.step}, are not on the disk: {reason}; {hint}.")
        self._stop_handling.close()

    def _measured(self) -> dict[str, Any]:
        """Return the summary fields of every loop (*collective*). None for what this start has not measured."""
        meter, position = self.meter, self.position
        peak = meter.telemetry.peak_memory_bytes()
        peak_bytes = torch.tensor([peak["host"] or 0, peak["device"] or 0], device=self._world.device)
        host, device = self._world.sum(peak_bytes).tolist()
        p50_s, p95_s = meter.clock.percentiles(50, 95) if meter.images else (None, None)
        return {
            "steps": position.step,
            "epoch_s": list(position.epoch_s),
            "samples_per_s": meter.images / meter.train_s if meter.images else None,
            "step_p50_s": p50_s,
            "step_p95_s": p95_s,
            "data_wait_s": meter.wait_s if meter.images else None,
            "peak_memory_bytes": {"host": host, "device": device} if meter.images else None,
            "stopped": "" if self.is_done else position.stalled(self.config.patience),
            "output": shown(self.folder),
            "exit": self.exit,
        }

    def close(self) -> None:
        """Release the folder, also after an error."""
        with self._stop_handling:
            if self._profiler is not None:
                self._profiler.close()
            if self._saver is not None:
                self._saver.close()
            if self.has_begun:
                self._record_checks()

    def _record_checks(self) -> None:
        if not self._has_recorded_checks:
            self._has_recorded_checks = True
            self.recorder.record("proof", checks=self.checks.outcomes())

    def _capture(self) -> State:
        """Return the state for an exact continuation (*collective*)."""
        self.position.partial_s = self.meter.train_s - self._train_s
        pending = self.pending()
        state = self.prepared.state(self.position.step, pending=pending is not None and pending["is_held"])
        if not self._has_differed and (differing := self.prepared.find_differing_state(state)):
            self._has_differed = True
            self.warn(
                f"the state of {differing} differs between ranks, and a checkpoint holds rank 0's: let its state_dict "
                "return what session.gather returns, and its load_state_dict take this rank's part"
            )
        if self._world.is_main and not self._has_compared:
            self._has_compared = True
            for sentence in self.prepared.compare_restored(state):
                self.warn(sentence)
        meta = self.position.meta() | state.meta
        meta |= {
            "planned_epochs": self.epochs,
            "pending": pending,
            "ranks": self._world.size,
            "precision": self.prepared.precision.name,
            "scaler": self.prepared.precision.state(),
            "generators": save_generators(self._world, self.prepared.devices),
            "config": resume.identity(self.config),
        }
        return State(state.tensors, meta)

    def _restore(self, state: State) -> None:
        step = state.meta["step"]
        if self.prepared.is_recipe and 0 < self.total_steps < step:
            raise RequestError(
                f"The checkpoint is of step {step}, and this run would end at step {self.total_steps}; give more "
                "--epochs or --max-steps, or start a new run in another --output."
            )
        if self.epochs is None and step:
            raise RequestError("A run can be continued only if its loop uses session.epochs(…): this one does not.")
        with understanding(state.origin or Path("the checkpoint")):
            self.prepared.load(state)
            self.prepared.precision.load_state(state.meta["scaler"])
            self.position = Position.of(state.meta)
            self.resumed_at = self.position.within
            self._batches = self.position.within if not self.position.passes else self.steps or 0
            self._resumed = self.position.passes, self.position.within, list(self.position.trained)
            self._train_s = -self.position.partial_s
            seed, devices = (self.config.seed, step), self.prepared.devices
            load_generators(self._world, state.meta["generators"], *seed, devices=devices)


def plain(function: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with numbers for 0-dim tensors. Raises `RequestError` for values that JSON cannot hold."""
    numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
    try:
        json.dumps(numbers)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{function} takes numbers, texts, lists and dicts: {error}.") from error
    return numbers

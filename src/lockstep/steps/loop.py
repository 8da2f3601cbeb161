"""The course of a run: its steps counted, recorded, saved and proved, and its end.

A `Session` calls this at the end of each step and epoch. Everything here is called by every rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..batching import BatchPlan
from ..checkpoint.resume import identity
from ..checkpoint.state import State
from ..checks.pages import Indices
from ..config.schema import RunConfig
from ..data.share import Micro
from ..errors import ProofError, RequestError, RunError, Stopped, ranks_named
from ..files import own_folder, shown, understanding, write_json
from ..monitor.signals import StopRequest
from ..record.base import Recorder
from ..record.result import Scores
from ..runs.folders import unwritable
from ..training.precision import Precision
from ..world.random_state import load_generators, save_generators, seed_all
from ..world.world import World
from .meter import COVERS, Meter, NonFiniteLossError
from .prepared import Prepared
from .progress import Progress
from .proofs import Proofs
from .report import told
from .saving import Saver


class Source(Protocol):
    """Data by whose batches steps are counted."""

    @property
    def plan(self) -> BatchPlan:
        """How a global batch is shared out."""

    @property
    def samples(self) -> int | None:
        """In the training set; None where nobody knows."""

    @property
    def stands_in(self) -> bool:
        """Whether a sample that does not count stands in where a share is empty."""

    def steps(self) -> int | None:
        """Return the optimizer steps of an epoch; None where nobody knows."""

    def micros(self, epoch: int, *, first: int = 0) -> Generator[Micro, None, None]:
        """Yield this rank's share of each global micro-batch of `epoch`, from its step `first` on."""


class Loop:
    """The course of one run: how far it has come, and what is written down of it."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        prepared: Prepared,
        precision: Precision,
        recorder: Recorder,
        stop: StopRequest,
        *,
        state: State | None,
        folder: bool,
        again: str = "",
    ) -> None:
        """`state` is what the run goes on from; without a `folder` nothing is saved; `again` is as in `Saver`."""
        self.folder = config.record.output if folder else None
        self.progress = Progress()
        self.resumed_at = 0
        """Steps made in the epoch under way, as long as a resumed run has not made its first."""
        self.wait_s = 0.0
        """Seconds that this rank has waited for data since the last record."""
        self.score: float | None = None
        """Of the weights as they are, where somebody has told it since the last save."""
        self.last: tuple[Tensor, Tensor] | None = None
        """The last micro-batch's (logits, labels), where a step's accuracy is to be recorded."""
        self.has_begun = False
        self.meter: Meter
        self.proofs: Proofs
        """There once the loop has begun, as the meter is."""
        self.total_steps = 0
        """Of the whole run; 0 where nobody knows."""
        self.prepared, self.precision, self.recorder = prepared, precision, recorder
        self._config, self._world, self._stop, self._state = config, world, stop, state
        self._listener = world.pulse.listener
        self._is_endless = self._listener is not None and self._listener.is_endless
        self._saver = Saver(self.folder, world, recorder, taken_up=state, again=again)
        self._is_proof_told = self._is_stopping = False
        self._train_s = 0.0  # at the beginning of the epoch
        self._saved_at = -1
        self._evaluation: dict[str, Any] = {}
        self._result: Callable[[], dict[str, Any]] = self.summary
        self._is_scored = False

    def begin(
        self,
        epochs: int | None,
        facts: dict[str, Any] | None = None,
        result: Callable[[], dict[str, Any]] | None = None,
        *,
        is_scored: bool = False,
    ) -> None:
        """Go on from the state that there is, and say what begins (*collective*).

        `epochs` is how many there will be, None where nobody knows. `facts` are recorded of the start besides those of
        every loop, `result()` is what the run has come to (*collective*; by default `summary`), and where the run
        `is_scored`, it ends once its last weights are. Raises `RequestError` where the state is of another loop, and
        where the record cannot be begun.
        """
        config, world, prepared, source = self._config, self._world, self.prepared, self.prepared.source
        plan, samples, steps = (source.plan, source.samples, source.steps()) if source else (None, None, None)
        self._plan, self._samples, self._steps, self._epochs = plan, samples, steps, epochs
        self._result, self._is_scored = result or self.summary, is_scored
        whole = epochs * steps if epochs and steps else 0
        self.total_steps = min(whole or config.max_steps, config.max_steps) if config.max_steps is not None else whole
        prepared.begin()
        if self._state is None:
            # From here on the generators serve the model's own randomness, which each rank draws for itself.
            seed_all(config.seed, world.rank, devices=prepared.devices)
        else:
            self._restore(self._state)
        progress = self.progress
        world.pulse.step = progress.step
        world.together(lambda: self._tell(facts or {}))
        self.meter = Meter(
            *(world, self.recorder),
            log_every=config.record.log_every,
            total_steps=self.total_steps,
            devices=prepared.devices,
            sums=prepared.strategy is not None,
        )
        known = None
        if plan is not None and samples is not None and steps is not None:
            known = {"samples": samples, "accumulation": plan.accumulation, "steps_per_epoch": steps}
            known["devices"] = plan.devices
        self.proofs = Proofs(config, world, prepared, self._remedy, step=progress.step, ledger=known)
        self.has_begun = True
        self.start_clock()

    def start_clock(self) -> None:
        """Begin to time steps: at the first, and again after whatever is not training."""
        self.meter.start()
        if self._listener is not None:
            self._listener.resumed()

    def _tell(self, facts: dict[str, Any]) -> None:
        """Record that the run begins, or its next part."""
        output = self._config.record.output
        try:
            self.recorder.record(
                "start",
                plan={} if self._plan is None else dataclasses.asdict(self._plan),
                output=shown(output),
                first_step=self.progress.step,
                epoch_s=list(self.progress.epoch_s),
                total_steps=self.total_steps,
                steps_per_epoch=self._steps or 0,
                epochs=self._epochs or 0,
                covers=COVERS,
                **told(
                    self._config, self._world, self.prepared, self.precision, self.progress, self.total_steps, facts
                ),
            )
        except OSError as error:
            raise unwritable(output, error) from error

    @property
    def is_done(self) -> bool:
        """Whether as many steps were made as the run is to have; never where nobody knows."""
        return 0 < self.total_steps <= self.progress.step and not self._is_endless

    def goes_on(self, epochs: int) -> bool:
        """Whether there is an epoch to begin of `epochs`: with steps to make, or with weights to be scored."""
        progress = self.progress
        if self._is_endless:
            return True
        if progress.stalled(self._config.patience):
            return False
        if progress.epochs < epochs and (not self.is_done or progress.within == self._steps):
            return True
        return self._is_scored and progress.evaluated != progress.step

    def note_samples(self, indices: Indices) -> None:
        """Note the samples (n,) that this rank computes in the step under way."""
        self.proofs.note(self.progress.step + 1, indices)

    def end_evaluation(self, evaluated: int, samples: int | None) -> None:
        """Begin to time steps again; this rank has `evaluated` of so many `samples` in all (*collective*).

        Raises `ProofError` where the ranks have not evaluated each of them.
        """
        found = int(self._world.sum(torch.tensor(evaluated, device=self._world.device)))
        if samples is not None and found != samples and self._listener is None:
            raise ProofError(f"An evaluation took {found:,} samples, and the data set has {samples:,}.")
        if self.has_begun:
            self.start_clock()

    def take(self, scores: Scores, *, on: str) -> None:
        """Take the scores of the weights as they are, over the whole set that `on` names (*collective*).

        Raises `ProofError` where the ledger says that it did not take each sample once.
        """
        progress = self.progress
        progress.take(scores)
        self.proofs.end_evaluation(progress.epochs, progress.step, scores.samples)
        self._evaluation = {"step": progress.step, "epoch": progress.epochs, "on": on} | dataclasses.asdict(scores)
        self.score = scores.top1

    def judge(self, score: float) -> None:
        """Take the score of the weights as they are: more is better."""
        self.progress.judge(score)
        self.score = score

    def count_batch(self) -> None:
        """Count a global batch of the epoch under way, whether or not a step follows from it."""
        self.progress.within += 1
        self.resumed_at = 0

    def count_step(self, loss: Tensor, samples: int, lr: float, norm: Tensor | None) -> None:
        """Count a step of `samples`: `loss` is this rank's part of it, `norm` that of the gradients, if it is known."""
        progress = self.progress
        progress.step = step = progress.step + 1
        self._world.pulse.step = step
        self.meter.add(step, progress.epochs, lr, samples, loss, norm)

    def end_step(self) -> None:
        """See to all that is due after a step (*collective*).

        Raises `Stopped` where that was asked for, `RunError` for a loss that is not finite, `ProofError` for replicas
        that are not the same bits.
        """
        meter, step, listener = self.meter, self.progress.step, self._listener
        if listener is None or listener.exchanges:
            self.proofs.after_step(step, meter.step_s)
        every = self._config.checkpoint.checkpoint_every
        # After an epoch's last step it is saved anyway, once the weights are evaluated.
        save = every is not None and step % every == 0 and self.progress.within != self._steps and not self.is_done
        if save or meter.due(self._stop.asked):
            stopping = self._flush()
            if self._plan is None and self._epochs:  # nobody could go on within such an epoch
                self._is_stopping = self._is_stopping or stopping
            elif stopping:
                raise self.stopped()
            elif save:
                self.save()
        if listener is not None:
            listener.ended_step(self)

    def end_data(self) -> None:
        """See to all that is due after the last step of an epoch, or of the run, as `end_step` does (*collective*)."""
        self.resumed_at = 0
        if self.meter.pending and self._flush():
            raise self.stopped()
        self.confirm()

    def end_epoch(self) -> None:
        """Record the end of an epoch, and of the evaluation after it, and save (*collective*)."""
        progress = self.progress
        self.settle()
        if not self.is_done or progress.within == self._steps:
            if self._plan is not None:
                seen = progress.within * self._plan.global_size
                self.proofs.end_epoch(progress.epochs, min(seen, self._samples or 0))
            progress.epoch_s.append(self.meter.train_s - self._train_s)
            self._train_s = self.meter.train_s
            ended = {"step": progress.step, "epoch": progress.epochs, "epoch_s": progress.epoch_s[-1]}
            progress.epochs += 1
            progress.within = 0
            self.recorder.record("epoch", **ended)
        if self._evaluation:
            self.recorder.record("eval", **self._evaluation)
            self._evaluation = {}
        self.save()
        if self._is_stopping:
            raise self.stopped()

    def confirm(self) -> None:
        """Compare the replicas, unless that was done after this step (*collective*)."""
        if self._listener is None or self._listener.exchanges:
            self.proofs.before_save(self.progress.step, self.meter.step_s)

    def save(self) -> None:
        """Save, after a comparison of the replicas (*collective*)."""
        if self._listener is None:  # a thread would write, while another variant has its turn
            self.confirm()
            score, self.score = -math.inf if self.score is None else self.score, None
            self._saver.save(lambda: self._captured(score), step=self.progress.step, top1=score)
            self._saved_at = self.progress.step
        self.start_clock()

    def stopped(self) -> Stopped:
        """Save, and return the error of a run that is stopped on request (*collective*)."""
        if self._saved_at != self.progress.step:
            self.save()
        step = self.progress.step
        of = f" of {self.total_steps}" if self.total_steps else ""
        return Stopped(f"Stopped on request at step {step}{of}{self._saver.finish(step)}")

    def finish(self) -> None:
        """Wait for the last checkpoint, and record what the loop has come to (*collective*).

        Raises `RunError` where the last weights are not on the disk: what they came to is recorded all the same.
        """
        self.settle()
        progress = self.progress
        if self._saved_at != progress.step:
            self.save()
        top1 = -1.0 if progress.scores is None else progress.scores.top1
        unsaved = self._saver.conclude(lambda: self._captured(top1), step=progress.step, top1=top1)
        fields = self._result()
        self._tell_proof()
        self.recorder.record("finish", **fields | {"proof": self.checks()})
        if unsaved:
            raise RunError(unsaved)

    def summary(self) -> dict[str, Any]:
        """Return what is known of every loop's end."""
        meter, progress = self.meter, self.progress
        return {
            "steps": progress.step,
            "epoch_s": list(progress.epoch_s),
            "samples_per_s": meter.images / meter.train_s if meter.images else None,
            "data_wait_s": meter.wait_s,
            "output": shown(self._config.record.output),
            "exit": 0,
        }

    def close(self) -> None:
        """Let go of the folder, whatever became of the loop."""
        self._saver.close()
        if self.has_begun:
            self.proofs.close()
            self._tell_proof()

    def _tell_proof(self) -> None:
        if not self._is_proof_told:
            self._is_proof_told = True
            self.recorder.record("proof", checks=self.checks())

    def checks(self) -> dict[str, dict[str, Any]]:
        """Return what was proved so far, as summary.json has it under "proof"."""
        return self.proofs.checks()

    def _flush(self) -> bool:
        progress, wait_s, self.wait_s = self.progress, self.wait_s, 0.0
        try:
            stopping = self.meter.flush(stop=self._stop.asked, wait_s=wait_s, last=self.last)
        except NonFiniteLossError as bad:
            doubt = self.proofs.explain_loss(progress.step, bad.step)
            where = f"{ranks_named(bad.ranks)}{self._note_bad(bad)}"
            advice = f"{self.prepared.remedy()} {doubt}".rstrip()
            raise RunError(f"The loss at step {bad.step} is not a finite number on {where}. {advice}") from bad
        self._saver.poll()
        self.proofs.keep(progress.epochs)
        return stopping

    def _note_bad(self, bad: NonFiniteLossError) -> str:
        """Note which samples this rank had where the loss was not finite; return a clause that says where, or ""."""
        indices: Callable[[int], list[Indices]] | None = getattr(self.prepared.source, "indices", None)
        if self.folder is None or indices is None:
            return ""
        if self._world.rank in bad.ranks:
            path = self.folder / "failures" / f"nonfinite_step_{bad.step}_rank_{self._world.rank}.json"
            held = [part.tolist() for part in indices(bad.step - 1)]
            try:
                own_folder(path.parent)
                write_json(path, {"step": bad.step, "rank": self._world.rank, "indices": held})
            except OSError:
                return ""  # a full disk must not hide why the run failed
        return f"; the batch's sample indices are in {shown(self.folder / 'failures')}"

    def settle(self) -> None:
        """Record the steps that wait for it, before something that is no training (*collective*)."""
        if self.meter.pending:
            self._flush()

    def _remedy(self) -> str:
        self.settle()  # raises where the loss itself was not finite, which is then the better explanation
        return self.prepared.remedy()

    def _captured(self, score: float) -> State:
        """Return all that an exact continuation needs (*collective*)."""
        self.progress.partial_s = self.meter.train_s - self._train_s
        state = self.prepared.state(self.progress.step)
        meta = self.progress.meta()
        if meta["scores"] is None and score > -math.inf:
            meta["scores"] = {"top1": score}
        meta |= state.meta | {
            "planned_epochs": self._epochs,
            "ranks": self._world.size,
            "scaler": self.precision.state(),
            "generators": save_generators(self._world, self.prepared.devices),
            "config": identity(self._config),
        }
        return State(state.tensors, meta)

    def _restore(self, state: State) -> None:
        step, epochs, steps = state.meta["step"], state.meta["epochs"], self._steps
        if self.prepared.strategy is not None and 0 < self.total_steps < step:
            raise RequestError(
                f"The checkpoint is of step {step}, and this run would end at step {self.total_steps}; give more "
                "--epochs or --max-steps, or start a new run in another --output."
            )
        with understanding(state.origin or Path("the checkpoint")):
            self.prepared.load(state)
            if self.prepared.strategy is not None and steps and not 0 <= step - epochs * steps <= steps:
                raise RequestError(
                    f"The checkpoint is of step {step}, which cannot come after {epochs} epochs of {steps} steps; give "
                    "another one."
                )
            self.precision.load_state(state.meta["scaler"])
            self.progress = Progress.of(state, steps)
            self.resumed_at = self.progress.within
            self._train_s = -self.progress.partial_s
            self._saved_at = self.progress.step
            seed = (self._config.seed, self.progress.step)
            load_generators(self._world, state.meta["generators"], *seed, devices=self.prepared.devices)

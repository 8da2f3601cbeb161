"""What is kept of a user's own loop while it runs: its steps counted, recorded, saved and proved, and its end.

A `Session` calls this at the end of each step and epoch. Everything here is called by every rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batching import BatchPlan
from .config import RunConfig
from .errors import ProofError, RequestError, RunError, Stopped, ranks_named
from .files import shown, understanding
from .interrupts import StopRequest
from .meter import COVERS, Meter, NonFiniteLossError
from .precision import Precision
from .prepared import Prepared
from .proof import by_name
from .proofs import of_ledger, open_ledger
from .randomness import load_generators, save_generators, seed_all
from .record.base import Recorder
from .resume import identity
from .saving import Saver
from .state import State
from .verify.ledger import Ledger
from .verify.pages import Indices
from .verify.replicas import ReplicaCheck
from .world import World

_LOWER = "lower the learning rate, clip the gradients, or compute in fp32"


class Loop:
    """The course of one session: how far it has come, and what is written down of it."""

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
    ) -> None:
        """`state` is what the run goes on from; without a `folder` nothing is saved."""
        self.step = 0
        """Optimizer steps made, global batches that is."""
        self.epoch = 0
        self.within = 0
        """Of them in the epoch under way."""
        self.resumed_at = 0
        """The same, as long as a resumed run has not made its first step."""
        self.wait_s = 0.0
        """Seconds that this rank has waited for data since the last record."""
        self.score: float | None = None
        """Of the weights as they are, where somebody has told it since the last save."""
        self.has_begun = False
        self.batchnorm = "none"
        self.before_save: Callable[[], None] = lambda: None
        self._config, self._world, self._prepared, self._precision = config, world, prepared, precision
        self._recorder, self._stop, self._state = recorder, stop, state
        self._saver = Saver(config.record.output if folder else None, world, recorder, taken_up=state)
        self._meter = Meter(world, recorder, log_every=config.record.log_every, total_steps=0, sums=False)
        self._replicas = ReplicaCheck(
            world,
            prepared.replicated,
            config.proof.verify_every,
            local=prepared.local_buffers,
            remedy=self._remedy,
            begun=0 if state is None else state.meta["step"],
        )
        self._ledger: Ledger | None = None
        self._short = ""
        self._epoch_s: list[float] = []
        self._train_s = 0.0  # at the beginning of the epoch
        self._saved_at = -1

    def begin(self, epochs: int | None, plan: BatchPlan | None, samples: int | None, steps: int | None) -> None:
        """Go on from the state that there is, and say what begins (*collective*).

        `epochs` is how many there will be, `steps` how many steps each has, `samples` those of the training set; None
        where nobody knows. Raises `RequestError` where the state is of another loop.
        """
        self.has_begun = True
        self._prepared.settle()
        self._plan, self._samples, self._epochs = plan, samples, epochs
        if self._state is None:
            # From here on the generators serve the model's own randomness, which each rank draws for itself.
            seed_all(self._config.seed, self._world.rank, devices=[self._world.device])
        else:
            self._restore(self._state)
        self._world.pulse.step = self.step
        self._ledger = self._open_ledger(plan, samples, steps)
        total = epochs * steps if epochs and steps else 0
        self._meter = Meter(
            self._world, self._recorder, log_every=self._config.record.log_every, total_steps=total, sums=False
        )
        self._recorder.record(
            "start",
            lines=self._lines(),
            plan={} if plan is None else dataclasses.asdict(plan),
            chosen=self._chosen(),
            output=shown(self._config.record.output),
            first_step=self.step,
            epoch_s=list(self._epoch_s),
            total_steps=total,
            steps_per_epoch=steps or 0,
            epochs=epochs or 0,
            covers=COVERS,
        )
        self._meter.start()

    def _open_ledger(self, plan: BatchPlan | None, samples: int | None, steps: int | None) -> Ledger | None:
        if plan is None or samples is None or steps is None:
            if self._config.proof.ledger:
                raise RequestError(
                    "--ledger counts the samples of an epoch, and nobody tells how many these data have."
                )
            return None
        return open_ledger(
            *(self._config, self._world, self.step),
            samples=samples,
            accumulation=plan.accumulation,
            steps_per_epoch=steps,
        )

    def _lines(self) -> list[str]:
        lines = [f"{self._world.size} rank(s)" if self._plan is None else str(self._plan)]
        if self.batchnorm == "local" and self._world.size > 1:
            lines.append("batch statistics are each rank's own (batchnorm local): the model depends on their number")
        if self._state is not None:
            lines.append(f"continuing at step {self.step:,}, from {shown(self._state.origin)}")
        return lines

    def _chosen(self) -> dict[str, Any]:
        parallel, memory = self._config.parallel, self._world.memory
        return {
            "loop": "own",
            "launcher": parallel.launcher,
            "accelerator": self._world.device.type,
            "devices": self._world.size,
            "precision": self._precision.name,
            "collectives": "none" if self._world.size == 1 else "gloo" if memory is None else "shared-memory",
            "batchnorm": self.batchnorm,
            "accumulate": 1 if self._plan is None else self._plan.accumulation,
        }

    @property
    def is_done(self) -> bool:
        """Whether as many steps were made as were asked for."""
        return self._config.max_steps is not None and self.step >= self._config.max_steps

    def note_samples(self, indices: Indices) -> None:
        """Note the samples (n,) that this rank computes in the step under way."""
        if self._ledger is not None:
            self._ledger.add(self.step + 1, indices)

    def end_evaluation(self, evaluated: int, samples: int | None) -> None:
        """Begin to time steps again; this rank has `evaluated` of so many `samples` in all (*collective*).

        Raises `ProofError` where the ranks have not evaluated each of them.
        """
        found = int(self._world.sum(torch.tensor(evaluated, device=self._world.device)))
        if samples is not None and found != samples:
            raise ProofError(f"An evaluation took {found:,} samples, and the data set has {samples:,}.")
        if self.has_begun:
            self._meter.start()

    def note(self, name: str, value: Tensor) -> None:
        """Record this rank's part of a value of the step under way."""
        self._meter.note(name, value)

    def tell(self, **values: float) -> None:
        """Record values of the loop's as they are."""
        self._recorder.record("values", step=self.step, epoch=self.epoch, **values)

    def start_clock(self) -> None:
        """Begin to time steps, after whatever was no training."""
        self._meter.start()

    def count_step(self, loss: Tensor, samples: int, lr: float) -> None:
        """Count a step: `loss` is this rank's part of the mean over the batch of `samples`."""
        self.step += 1
        self.within += 1
        self.resumed_at = 0
        self._world.pulse.step = self.step
        self._meter.add(self.step, self.epoch, lr, samples, loss, None)

    def end_step(self) -> None:
        """See to all that is due after a step (*collective*).

        Raises `Stopped` where that was asked for, `RunError` for a loss that is not finite, `ProofError` for replicas
        that are not the same bits.
        """
        meter = self._meter
        if self._prepared.models and self._replicas.due(self.step):
            self._replicas.check(self.step, meter.step_s)
        every = self._config.checkpoint.checkpoint_every
        save = every is not None and self.step % every == 0
        if save or meter.due(self._stop.asked):
            stopping = self._flush()
            if save or stopping:
                self.save()
            if stopping:
                self._recorder.record("proof", checks=self.checks())
                raise Stopped(f"Stopped on request at step {self.step}{self._saver.finish(self.step)}")

    def end_epoch(self) -> None:
        """Record the end of an epoch, and save (*collective*)."""
        self.settle()
        if self.is_done:  # within an epoch, as a rule
            return
        if self._ledger is not None and self._plan is not None:
            expected = self.within * self._plan.global_size
            found = self._ledger.close_epoch(self.epoch, min(expected, self._samples or 0))
            if found:
                self._short = found
                raise ProofError(f"Not each sample was trained on exactly once: {found}.")
        self._epoch_s.append(self._meter.train_s - self._train_s)
        self._train_s = self._meter.train_s
        self._recorder.record("epoch", step=self.step, epoch=self.epoch, epoch_s=self._epoch_s[-1])
        self.epoch += 1
        self.within = 0
        self.save()

    def save(self) -> None:
        """Save, after a comparison of the replicas (*collective*)."""
        if self._prepared.models:
            self._replicas.confirm(self.step, self._meter.step_s)
        self._saver.save(self._captured, step=self.step, top1=-math.inf if self.score is None else self.score)
        self.score = None
        self._saved_at = self.step
        self._meter.start()

    def finish(self) -> None:
        """Wait for the last checkpoint, and record what the loop has come to (*collective*)."""
        self.settle()
        if self._saved_at != self.step:
            self.save()
        unsaved = self._saver.conclude(self._captured, step=self.step)
        checks = self.checks()
        self._recorder.record("proof", checks=checks)
        self._recorder.record(
            "finish",
            steps=self.step,
            epoch_s=list(self._epoch_s),
            samples_per_s=self._meter.images / self._meter.train_s if self._meter.images else None,
            data_wait_s=self._meter.wait_s,
            proof=checks,
            output=shown(self._config.record.output),
            exit=0,
        )
        if unsaved:
            raise RunError(unsaved)

    def close(self) -> None:
        """Let go of the folder, whatever became of the loop."""
        self._saver.__exit__()
        if self._ledger is not None:
            self._ledger.close()

    def checks(self) -> dict[str, dict[str, Any]]:
        """Return what was proved so far, as summary.json has it under "proof"."""
        ledger = [] if self._ledger is None else of_ledger(self._ledger, 0, self._short)
        return by_name([*self._replicas.proof(), *ledger])

    def _flush(self) -> bool:
        wait_s, self.wait_s = self.wait_s, 0.0
        try:
            stopping = self._meter.flush(stop=self._stop.asked, wait_s=wait_s)
        except NonFiniteLossError as bad:
            doubt = self._replicas.explain_loss(self.step, bad.step)
            raise RunError(
                f"The loss at step {bad.step} is not a finite number on {ranks_named(bad.ranks)}: {_LOWER}. "
                f"{doubt}".rstrip()
            ) from bad
        self._saver.poll()
        if self._ledger is not None:
            self._ledger.flush(self.epoch)
        return stopping

    def settle(self) -> None:
        """Record the steps that wait for it, before something that is no training (*collective*)."""
        if self._meter.pending:
            self._flush()

    def _remedy(self) -> str:
        self.settle()  # raises where the loss itself was not finite, which is then the better explanation
        return f"{_LOWER[0].upper()}{_LOWER[1:]}."

    def _captured(self) -> State:
        """Return all that an exact continuation needs (*collective*)."""
        self.before_save()
        state = self._prepared.state()
        accumulation = 1 if self._plan is None else self._plan.accumulation
        meta = state.meta | {
            "step": self.step,
            "epochs": self.epoch,
            "within": self.within,
            "epoch_s": list(self._epoch_s),
            "partial_s": self._meter.train_s - self._train_s,
            "best_top1": -1.0,
            "scores": None if self.score is None else {"top1": self.score},
            "evaluated": 0,
            "stale": 0,
            "planned_epochs": self._epochs,
            "batchnorm": self.batchnorm,
            "replicas": self._world.size,
            "accumulation": accumulation,
            "batch": 0 if self._plan is None else self._plan.global_size,
            "ranks": self._world.size,
            "samples": self._samples or 0,
            "scaler": self._precision.state(),
            "generators": save_generators(self._world, [self._world.device]),
            "config": identity(self._config),
        }
        return State(state.tensors, meta)

    def _restore(self, state: State) -> None:
        meta = state.meta
        if "within" not in meta:
            raise RequestError(f"{shown(state.origin)} is no checkpoint of a session's loop, but of lockstep train.")
        for what, before, now in (
            ("samples in the training set", meta["samples"], self._samples or 0),
            ("samples in a global batch", meta.get("batch"), 0 if self._plan is None else self._plan.global_size),
        ):
            if before != now:
                raise RequestError(
                    f"{shown(state.origin)} was trained with {before} {what}, and here are {now}: its order would be "
                    "another; give it the same data, or start a new run in another output."
                )
        with understanding(state.origin or Path("the checkpoint")):
            self._prepared.load(state)
            self._precision.load_state(meta["scaler"])
            self.step, self.epoch, self.within = meta["step"], meta["epochs"], meta["within"]
            self.resumed_at = self.within
            self._epoch_s = list(meta["epoch_s"])
            self._train_s = -meta["partial_s"]
            devices = [self._world.device]
            load_generators(self._world, meta["generators"], self._config.seed, self.step, devices=devices)

"""What a run proves of itself while it trains: that its replicas are the same, and that each sample came exactly once.

The loop tells what happens; what is looked at then, and how often, is decided here. Each proof ends as a `Check` in the
run's summary.json and proof.md, whatever became of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import folders, proof, resume
from .config import RunConfig
from .errors import ProofError, RequestError, counted
from .job import Job, Note
from .meter import Meter
from .proof import Check
from .record.base import Recorder
from .saving import remedy
from .verify import pages
from .verify.ledger import Ledger
from .verify.replicas import ReplicaCheck
from .world import World


class Proofs:
    """The proofs of one run. A context: on leaving it, what was proved so far is recorded."""

    def __init__(self, job: Job, meter: Meter, recorder: Recorder, *, step: int) -> None:
        """`step` is the one that the run goes on from (*collective*).

        Raises `RequestError` where the ledger that was asked for cannot be kept.
        """
        self.note: Note = _nothing
        """Hears of (step, counted from 0, sample indices) of each micro-batch that this rank trains on."""
        self.note_evaluated: Callable[[np.ndarray], None] = _nothing
        """Hears of the sample indices of each batch that this rank evaluates."""
        self._job = job
        self._meter = meter
        self._recorder = recorder
        self._replicas = ReplicaCheck(
            job.world,
            job.replicated,
            job.config.proof.verify_every,
            local=job.local_buffers,
            copies=lambda: job.strategy.copies(job.model),
            remedy=self._remedy,
            replicas=len(job.strategy.devices),
            begun=step,
        )
        self._ledger = _ledger(job, step)
        self._evaluations, self._short = 0, ""
        if self._ledger is not None:
            add = self._ledger.add
            self.note = lambda step, indices: add(step + 1, indices)
            self.note_evaluated = self._ledger.add_evaluated

    def __enter__(self) -> Proofs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ledger is not None:
            self._ledger.close()
        self._recorder.record("proof", checks=self.checks())

    def after_step(self, step: int) -> None:
        """Compare the replicas after `step` if that is due (*collective*). Raises as `ReplicaCheck.check` does."""
        if self._replicas.due(step):
            self._replicas.check(step, self._meter.step_s)

    def keep(self, epoch: int) -> None:
        """Write down what was noted of `epoch` (*collective*)."""
        if self._ledger is not None:
            self._ledger.flush(epoch)

    def explain_loss(self, step: int, bad_step: int) -> str:
        """Return what replicas may have to do with a loss that is not finite, as `ReplicaCheck` does (*collective*)."""
        return self._replicas.explain_loss(step, bad_step)

    def before_save(self, step: int) -> None:
        """Compare the replicas unless that was done after `step`: what is saved is what all hold (*collective*)."""
        self._replicas.confirm(step, self._meter.step_s)

    def end_epoch(self, epoch: int) -> None:
        """Ask whether the epoch held each sample exactly once (*collective*). Raises `ProofError` where it did not."""
        if self._ledger is None:
            return
        plan, drop_last = self._job.plan, self._job.config.batch.drop_last
        expected = self._job.steps_per_epoch * plan.global_size if drop_last else self._job.samples
        self._ask(self._ledger.close_epoch(epoch, expected), "Not each sample was trained on exactly once")

    def end_evaluation(self, epoch: int, step: int, samples: int) -> None:
        """Write down which of `samples` samples the evaluation after `step` took (*collective*).

        Raises `ProofError` where it did not take each sample exactly once.
        """
        if self._ledger is not None:
            self._evaluations += 1
            finding = self._ledger.flush_evaluation(epoch, step, samples)
            self._ask(finding, "The evaluation did not take each sample exactly once, as planned")

    def _ask(self, finding: str | None, wrong: str) -> None:
        if finding:
            self._short = finding
            raise ProofError(
                f"{wrong}, by {pages.NAME}: {finding}. The data's order or its loader differs from rank to rank; "
                "lockstep verify run tells where."
            )

    def checks(self) -> dict[str, dict[str, Any]]:
        """Return what was proved so far, as summary.json has it under "proof"."""
        return proof.by_name([*self._replicas.proof(), *self._of_ledger()])

    def _of_ledger(self) -> list[Check]:
        return [] if self._ledger is None else of_ledger(self._ledger, self._evaluations, self._short)

    def _remedy(self) -> str:
        self._meter.settle()  # raises where the loss itself was not finite, which is then the better explanation
        return remedy(self._job)


def of_ledger(ledger: Ledger, evaluations: int, short: str) -> list[Check]:
    """Return what a ledger has proved: of its whole epochs, and of so many evaluations; `short` is what it misses."""
    epochs = ledger.whole_epochs
    asked = f"{counted(epochs, 'whole epoch')} and {counted(evaluations, 'evaluation')} were asked"
    found = short or asked
    if ledger.waiting:
        found += f"; {ledger.waiting} pages could not be written ({ledger.trouble})"
    judged = epochs + evaluations
    return [
        Check(
            name="ledger",
            claim="Each epoch and each evaluation held each sample exactly once",
            outcome=Check.FAILS if short else Check.HOLDS if judged else Check.OPEN,
            times=judged,
            tolerance="exactly",
            found=found,
            cost_s=ledger.cost_s,
        )
    ]


def _nothing(*_: Any) -> None:
    """Hear of it, and do nothing."""


def _ledger(job: Job, step: int) -> Ledger | None:
    return open_ledger(
        job.config,
        job.world,
        step,
        samples=job.samples,
        accumulation=job.plan.accumulation,
        steps_per_epoch=job.steps_per_epoch,
        devices=job.plan.devices,
    )


def open_ledger(config: RunConfig, world: World, step: int, **known: int) -> Ledger | None:
    """Return the run's ledger, cut back to `step`; None where there is to be none (*collective*).

    A run that has begun one keeps it, whether or not that is asked for again: a gap would be no proof. `known` is what
    a `Ledger` has to know of the run.
    """
    folder = config.record.output
    path = None if folder is None else folder / pages.NAME
    there = world.together(lambda: _taken_up(path, config, step) if world.is_main and path else False)
    if not (config.proof.ledger or world.gather(there)[0]):
        return None
    return Ledger(path, world, **known)


def _taken_up(path: Path, config: RunConfig, step: int) -> bool:
    """Return whether there is a ledger at `path`, after cutting back or carrying over what the run continues."""
    source = resume.source(config)
    begun = None if source is None else folders.run_of(source)
    if begun is not None and not path.exists():  # it goes on in another folder
        pages.carry_over(begun, path, step=step)
    last = pages.rewind(path, step=step)
    if last is not None and last < step:
        raise RequestError(
            f"{path} ends at step {last}, and the run goes on from step {step}: what lies between was lost, such as in "
            "a power cut, and the ledger would prove nothing; move it away, and with --ledger a new one begins here."
        )
    return last is not None

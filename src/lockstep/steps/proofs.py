"""What a run proves of itself while it trains: that its replicas are the same, and that each sample came exactly once.

The loop tells what happens; what is looked at then, and how often, is decided here. Each proof ends as a `Check` in the
run's summary.json and proof.md, whatever became of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint import resume
from ..checks import pages
from ..checks.ledger import Ledger
from ..checks.pages import Indices
from ..checks.replicas import ReplicaCheck
from ..config.schema import RunConfig
from ..errors import ProofError, RequestError, counted
from ..record import checks as proof
from ..record.checks import Check
from ..runs import folders
from ..world.world import World
from .prepared import Prepared


class Proofs:
    """The proofs of one run."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        parts: Prepared,
        remedy: Callable[[], str],
        *,
        step: int,
        ledger: dict[str, int] | None,
    ) -> None:
        """`step` is the one that the run goes on from (*collective*).

        `remedy` is that of a `ReplicaCheck`, and `ledger` what a `Ledger` has to know, None where nobody knows it.
        Raises `RequestError` where the ledger that was asked for cannot be kept.
        """
        self._replicas = ReplicaCheck(
            world,
            parts.replicated,
            config.proof.verify_every,
            copies=parts.copies,
            remedy=remedy,
            begun=step,
        )
        if ledger is None and config.proof.ledger:
            raise RequestError("--ledger counts the samples of an epoch, and nobody tells how many these data have.")
        self._ledger = None if ledger is None else _open_ledger(config, world, step, **ledger)
        self._evaluations, self._short = 0, ""

    def note(self, step: int, indices: Indices) -> None:
        """Note the samples (n,) that this rank computes in optimizer step `step`, counted from 1."""
        if self._ledger is not None:
            self._ledger.add(step, indices)

    def note_evaluated(self, indices: Indices) -> None:
        """Note the samples (n,) that this rank evaluates."""
        if self._ledger is not None:
            self._ledger.add_evaluated(indices)

    def keep(self, epoch: int) -> None:
        """Write down what was noted of `epoch` (*collective*)."""
        if self._ledger is not None:
            self._ledger.flush(epoch)

    def close(self) -> None:
        """Let go of the ledger."""
        if self._ledger is not None:
            self._ledger.close()

    def after_step(self, step: int, step_s: float) -> None:
        """Compare the replicas after `step` if that is due (*collective*). Raises as `ReplicaCheck.check` does."""
        if self._replicas.due(step):
            self._replicas.check(step, step_s)

    def before_save(self, step: int, step_s: float) -> None:
        """Compare the replicas unless that was done after `step`: what is saved is what all hold (*collective*)."""
        self._replicas.confirm(step, step_s)

    def explain_loss(self, step: int, bad_step: int) -> str:
        """Return what replicas may have to do with a loss that is not finite, as `ReplicaCheck` does (*collective*)."""
        return self._replicas.explain_loss(step, bad_step)

    def end_epoch(self, epoch: int, expected: int) -> None:
        """Ask whether the epoch held each of `expected` samples exactly once (*collective*).

        Raises `ProofError` where it did not.
        """
        if self._ledger is not None:
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
        checks, ledger = [self._replicas.proof()], self._ledger
        if ledger is not None:
            judged = ledger.whole_epochs + self._evaluations
            epochs, evaluations = counted(ledger.whole_epochs, "whole epoch"), counted(self._evaluations, "evaluation")
            found = self._short or f"{epochs} and {evaluations} were asked"
            if ledger.waiting:
                found += f"; {ledger.waiting} pages could not be written ({ledger.trouble})"
            checks.append(
                Check(
                    name="ledger",
                    claim="Each epoch and each evaluation held each sample exactly once",
                    outcome=Check.FAILS if self._short else Check.HOLDS if judged else Check.OPEN,
                    times=judged,
                    tolerance="exactly",
                    found=found,
                    cost_s=ledger.cost_s,
                )
            )
        return proof.by_name(checks)


def _open_ledger(config: RunConfig, world: World, step: int, **known: int) -> Ledger | None:
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
    last = pages.rewind(path, step=step, begun=None if source is None else folders.run_of(source))
    if last is not None and last < step:
        raise RequestError(
            f"{path} ends at step {last}, and the run goes on from step {step}: what lies between was lost, such as in "
            "a power cut, and the ledger would prove nothing; move it away, and with --ledger a new one begins here."
        )
    return last is not None

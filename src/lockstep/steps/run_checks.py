"""Checks during training: equal replicas, and each sample exactly once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint import resume
from ..checks import pages
from ..checks.ledger import Ledger
from ..checks.replicas import ReplicaCheck
from ..config.schema import RunConfig
from ..errors import RequestError
from ..record.checks import by_name
from ..runs import folders
from .prepared import Prepared


class RunChecks:
    """Checks of one run: `replicas`, and the `ledger` if any."""

    def __init__(self, prepared: Prepared, remedy: Callable[[], str], *, step: int) -> None:
        """Set up the checks (*collective*). `step` is the resumed step; `remedy` is that of a `ReplicaCheck`."""
        config, world, source = prepared.config, prepared.world, prepared.source
        every, copies = config.proof.verify_every, prepared.copies
        self.replicas = ReplicaCheck(world, prepared.replicated, every, copies=copies, remedy=remedy, begun=step)
        self.ledger: Ledger | None = None
        samples, steps = (source.samples, source.steps()) if source else (None, None)
        if source is not None and samples is not None and steps is not None:
            path = None if config.record.output is None else config.record.output / pages.NAME
            # A run that has begun a ledger keeps the ledger, with or without --ledger: a gap would be no proof.
            is_begun = world.from_main(lambda: path is not None and _taken_up(path, config, step))
            if is_begun or config.proof.ledger:
                known = {"accumulation": source.plan.accumulation, "devices": source.plan.devices}
                self.ledger = Ledger(path, world, samples=samples, steps_per_epoch=steps, **known)
        elif config.proof.ledger:
            raise RequestError("--ledger counts the samples of an epoch, and nobody tells how many these data have.")

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Return the checks' outcomes so far, as "proof" in summary.json."""
        checks = [self.replicas.proof(), *([] if self.ledger is None else [self.ledger.proof()])]
        return by_name(checks)


def _taken_up(path: Path, config: RunConfig, step: int) -> bool:
    """Return whether a ledger is at `path`. A continued run's ledger is first cut back or carried over."""
    source = resume.source(config)
    last = pages.rewind(path, step=step, begun=None if source is None else folders.run_of(source))
    if last is not None and last < step:
        raise RequestError(
            f"{path} ends at step {last}, and the run goes on from step {step}: what lies between was lost, such as in "
            "a power cut, and the ledger would prove nothing; move it away, and with --ledger a new one begins here."
        )
    return last is not None

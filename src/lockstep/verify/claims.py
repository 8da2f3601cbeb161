"""Judge a run by its records alone: no model, no data set.

What has to hold of any run is in `_CLAIMS`: its records can be read, its steps follow one another with their planned
samples, its losses are finite, its checkpoints whole; replicas agreed, and the ledger has each sample exactly once.
Besides, what the run itself has found wrong stays wrong. Any content of a run's folder gives a verdict or one error.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import checkpoint
from ..checks import ledger, pages
from ..checks.ledger import Planned
from ..config.schema import RunConfig
from ..data.order import SHUFFLED
from ..errors import ProofError, RequestError, Stopped, counted
from ..files import understanding
from ..record.checks import BIT_FOR_BIT, Check
from .evidence import CONFIG, MANIFEST, STEPS, SUMMARY, Evidence, at, read, reason

_COMPLETE = (0, Stopped.exit_code)


class Judgement(NamedTuple):
    """The outcome of each claim about a run."""

    checks: Sequence[Check]  # those judged here, then others that the run has written
    unfinished: str  # why the run has no end, as a clause; "" for one that is complete

    @property
    def failing(self) -> list[Check]:
        """The claims that are wrong, the most basic first."""
        return [check for check in self.checks if check.fails]


def judge(folder: Path) -> Judgement:
    """Judge each claim about the run in `folder`. Reads its files alone; writes nothing.

    Raises `RequestError` for records that lockstep did not write.
    """
    with understanding(folder / STEPS):
        run = read(folder)
        checks = [_judged(run, claim) for claim in _CLAIMS if not (run.is_own_loop and claim.judge is _samples)]
        names = {check.name for check in checks}
        return Judgement([*checks, *(check for name, check in run.held.items() if name not in names)], run.unfinished)


def refusal(folder: Path, judged: Judgement) -> ProofError:
    """Return the error for failed claims: names the first, and the place."""
    first, *others = judged.failing
    more = f" {counted(len(others), 'more claim')} {'fail' if others[1:] else 'fails'}." if others else ""
    return ProofError(f"{folder} is not what its records claim: {first.name} {first.outcome}: {first.found}.{more}")


class _OpenError(Exception):
    """The reason that a claim cannot be judged, as a clause."""


class _Claim(NamedTuple):
    name: str
    sentence: str
    judge: Callable[[Evidence], Iterable[str] | Check]
    """Returns what contradicts the claim, in clauses, or the check itself."""
    event: str = ""  # the kind of events that it is about, which are counted
    tolerance: str = ""


def _judged(run: Evidence, claim: _Claim) -> Check:
    begun_s, times, found, outcome = time.perf_counter(), 0, list[str](), Check.OPEN
    try:
        with understanding(Path("its records")):
            if not run.parts and claim.judge is not _damage:
                raise _OpenError(f"{STEPS} cannot be read")
            judged = claim.judge(run)
            if isinstance(judged, Check):
                return judged
            found, times = [*judged], len(run.rows(claim.event))
            if not found and not times:
                raise _OpenError("there is none in these records")
            outcome = Check.FAILS if found else Check.HOLDS
    except _OpenError as error:
        found = [str(error)]
    except RequestError as error:  # a value that no event, config or checkpoint of ours has
        outcome, found = Check.FAILS, [reason(error)]
    return Check(
        name=claim.name,
        claim=claim.sentence,
        outcome=outcome,
        times=times,
        tolerance=claim.tolerance,
        found="".join(found[:1]) + (f"; and {counted(len(found) - 1, 'more finding')}" if found[1:] else ""),
        cost_s=time.perf_counter() - begun_s,
    )


def _config(run: Evidence) -> RunConfig:
    if run.config is None:
        raise _OpenError(f"{CONFIG} cannot be read")
    return run.config


# ---- the claims


def _damage(run: Evidence) -> Sequence[str]:
    return run.damage


def _steps(run: Evidence) -> Iterator[str]:
    made = {"start": "first_step", "step": "step", "finish": "steps"}  # how many, by event
    before = run.first_step
    for row in run.rows(*made):
        event, step = row["event"], row[made[row["event"]]]
        if step != before + (event == "step"):
            yield f"{'' if event == 'step' else f'the {event} at '}step {step} follows step {before} ({at(row)})"
        before = step


def _samples(run: Evidence) -> Iterator[str]:
    samples = _training_set(run)
    for part in run.parts:
        size, per_epoch = part.start["plan"]["global_size"], part.start["steps_per_epoch"]
        for row in part.of("step"):
            epoch, within = divmod(row["step"] - 1, per_epoch)
            planned = min(size, samples - within * size)
            if (row["epoch"], row["samples"]) != (epoch, planned):
                told, due = (f"{counted(each, 'sample')} of epoch" for each in (row["samples"], planned))
                yield f"step {row['step']} has {told} {row['epoch']}, and by the plan {due} {epoch} ({at(row)})"


def _training_set(run: Evidence) -> int:
    """Return the training set's size. Read from a checkpoint, else derived from an epoch's steps."""
    meta = checkpoint.peek(run.folder / "checkpoints" / "last") or {}
    start = run.parts[0].start
    size, per_epoch = start["plan"]["global_size"], start["steps_per_epoch"]
    lasts = [row["samples"] for row in run.rows("step") if row["step"] % per_epoch == 0]
    return int(meta.get("samples") or (per_epoch - 1) * size + (lasts or [size])[0])


def _losses(run: Evidence) -> Iterator[str]:
    for row in run.rows("step"):
        if type(row["loss"]) not in (int, float) or not abs(row["loss"]) < math.inf:
            yield f"the loss of step {row['step']} is not a finite number ({at(row)})"


def _checkpoints(run: Evidence) -> Iterator[str]:
    saved, folder = {row["step"] for row in run.rows("checkpoint")}, run.folder / "checkpoints"
    if not saved and not os.path.lexists(folder / "last"):
        raise _OpenError("none was written")
    for name in ("last", "best") if os.path.lexists(folder / "best") else ("last",):
        try:
            step = checkpoint.load(folder / name).meta["step"]
        except RequestError as error:
            yield reason(error)
            continue
        # A kill may come between a checkpoint and its event.
        least = run.last_step if run.exit == 0 else max(saved, default=0)
        if name == "last" and step != (due := min(max(step, least), run.last_step)):
            yield f"last: it is of step {step}, and the run of {due}"


def _replicas(run: Evidence) -> Check:
    """Judge the run's own replica check: equal, also after the last step."""
    held = run.held.get("replicas")
    if held is None or run.exit is None:
        raise _OpenError(run.unfinished or f"{STEPS} has no comparison")
    # What is wrong with replicas ends a run; in the summary of any other, only an earlier judgement can say that.
    if held.outcome == Check.OPEN or run.exit not in _COMPLETE or held.at_step in (None, run.last_step):
        return held
    found = f"compared last after step {held.at_step}; but the run's last step is {run.last_step}"
    return dataclasses.replace(held, outcome=Check.FAILS, found=found)


def _ledger(run: Evidence) -> Sequence[str] | Check:
    """Judge the ledger, if one was recorded."""
    held, path = run.held.get("ledger"), run.folder / pages.NAME
    keeping = [part for part in run.parts if part.start["chosen"].get("ledger") is True]
    if held is not None and held.fails:
        return held
    if path.exists():
        check = ledger.check(path, _planned(run, keeping[0].first_step if keeping else None))
        recording_s = None if held is None else held.cost_s
        return dataclasses.replace(check, cost_s=recording_s or check.cost_s)
    if (held is not None and held.times) or any(part.last_step > part.first_step for part in keeping):
        return [f"the run kept a {pages.NAME}, and it is not there"]
    raise _OpenError("not recorded; --ledger records it")


def _planned(run: Evidence, begun: int | None) -> Planned:
    """Return the plan to check a ledger against. `begun` is the step before the ledger's first."""
    start, own = run.parts[-1].start, run.is_own_loop
    return Planned(
        global_batch=start["plan"]["global_size"],
        drop_last=start["chosen"].get("drop-last") is True if own else _config(run).batch.drop_last,
        order=start["chosen"].get("order", "") if own else SHUFFLED,
        seed=_config(run).seed,
        is_own_loop=own,
        first=None if begun is None else begun + 1,
        steps=run.last_step if run.exit in _COMPLETE else None,
        evaluations=[] if begun is None else [row["step"] for row in run.rows("eval") if row["step"] > begun],
    )


_CLAIMS = (
    _Claim("files", f"{CONFIG}, {MANIFEST}, {STEPS} and {SUMMARY} can be read to their ends", _damage, "start"),
    _Claim("steps", "Each optimizer step is recorded once, in order", _steps, "step", "exactly"),
    _Claim("samples", "Each optimizer step has its planned samples", _samples, "step", "exactly"),
    _Claim("losses", "Each loss is a finite number", _losses, "step"),
    _Claim("checkpoints", "The checkpoints are whole, and last is the newest", _checkpoints, "checkpoint", BIT_FOR_BIT),
    _Claim("replicas", "All ranks hold the same bits", _replicas),
    _Claim("ledger", ledger.CLAIM, _ledger, tolerance="exactly"),
)
"""What has to hold, the most basic first. Of a loop of the user's own, nobody else knows the samples of a step."""

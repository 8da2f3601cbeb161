"""Whether the recorded evaluations are whole, and whether `summary.json` says what the records say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import counted
from ..proof import BIT_FOR_BIT, Check
from .claim import Claim
from .on_disk import SCORES, STEPS, SUMMARY, Part, Records, is_finite, whole

_EVALUATIONS = Claim("evaluations", "Where an evaluation was due, the whole set was evaluated once", "exactly")
_SUMMARY = Claim("summary", f"{SUMMARY} says what {STEPS} says", BIT_FOR_BIT)


def evaluations(run: Records) -> Check:
    """Judge at which steps there are evaluations, over how many samples, and whether their scores are possible."""
    if why := run.lacking(STEPS):
        return _EVALUATIONS.open(why)
    problems = [*_misplaced(run), *_missing(run), *_of_other_sizes(run), *_impossible(run)]
    rows = list(run.rows("eval"))
    if not rows and not problems:
        return _EVALUATIONS.open(f"none is due in these records: {run.unfinished or 'they begin after the last one'}")
    found = f"each over {counted(rows[0]['samples'], 'sample')}" if rows else ""
    return _EVALUATIONS.judged(problems, times=len(rows), found=found)


def _misplaced(run: Records) -> Iterator[str]:
    """Yield the evaluations that stand where none is due, or that come twice."""
    cuts = {part.start["total_steps"] for part in run.parts}
    for part in run.parts:
        # A part that was killed in between may have evaluated the step that the next one begins after: once each.
        step, per_epoch, seen = part.first_step, part.start["steps_per_epoch"], set()
        for row in part.rows:
            if row.event == "step":
                step = row["step"]
            if row.event != "eval":
                continue
            of = row["step"]
            if of != step:
                yield f"the evaluation of step {of} stands after step {step} ({row.at})"
            elif of in seen:
                yield f"step {of} is evaluated twice ({row.at})"
            elif not _is_due(part, of) and of not in cuts:
                yield f"step {of} is evaluated, at which no epoch ends whose evaluation is due ({row.at})"
            elif row["epoch"] != (epoch := (of - 1) // per_epoch):
                yield f"the evaluation of step {of} is said to be of epoch {row['epoch']}, and it is {epoch} ({row.at})"
            seen.add(of)


def _missing(run: Records) -> Iterator[str]:
    """Yield the steps after which an evaluation is missing; at the last one it may be under way."""
    there = {row["step"] for row in run.rows("eval")}
    due = {part.last_step for part in run.parts if _is_finished(part)} | ({run.last_step} if run.exit == 0 else set())
    for part in run.parts:
        due |= {row["step"] for row in part.rows if row.event == "step" and _is_due(part, row["step"])}
    if run.exit != 0:
        due -= {run.last_step}
    for step in sorted(due - there):
        if step > run.first_step:
            yield f"the evaluation after step {step} is not in {STEPS}"


def _is_due(part: Part, step: int) -> bool:
    """Whether an epoch ends at `step` of which --eval-every asks for an evaluation."""
    epochs, within = divmod(step, part.start["steps_per_epoch"])
    return bool(within == 0 and epochs % max(1, whole(part.start.fields.get("eval_every")) or 1) == 0)


def ran_out_of_patience(run: Records) -> bool:
    """Whether the last evaluations, as many as --patience allows, have brought no better top1 than those before."""
    patience = run.config.patience if run.config else None
    top1 = list({row["step"]: row["top1"] for row in run.rows("eval") if is_finite(row["top1"])}.values())
    before, since = top1[: -(patience or 1)], top1[-(patience or 1) :]
    if patience is None or len(since) < patience:
        return False
    return max(since) <= max(before) if before else run.first_step > 0


def _is_finished(part: Part) -> bool:
    return part.end is not None and part.end["exit"] == 0


def _of_other_sizes(run: Records) -> Iterator[str]:
    """Yield the evaluations over another number of samples than the first of that set said before it began."""
    sizes: dict[bool, int] = {}
    for row in run.rows("evaluate", "eval", "test"):
        is_test = "of" in row.fields  # at the end, beside a validation set
        size = sizes.setdefault(is_test, row["samples"])
        if row["samples"] != size or size < 1:
            counts = counted(row["samples"], "sample")
            yield f"the evaluation after step {row['step']} has {counts}, and the set has {size:,} ({row.at})"


def _impossible(run: Records) -> Iterator[str]:
    for row in run.rows("eval", "test"):
        top1, top5, samples = row["top1"], row["top5"], max(1, row["samples"])
        numbers = {name: row[name] for name in ("top1", "top5", "loss")}
        wrong = [f"{name} is not a finite number" for name, value in numbers.items() if not is_finite(value)]
        if not wrong and not 0 <= top1 <= top5 <= 1:
            wrong = [f"0 ≤ top1 {top1} ≤ top5 {top5} ≤ 1 does not hold"]
        # A share of the samples is a quotient of whole numbers, to the last bit.
        elif not wrong and any(round(share * samples) / samples != share for share in (top1, top5)):
            wrong = [f"top1 {top1} or top5 {top5} is no share of {counted(samples, 'sample')}"]
        for text in wrong:
            yield f"after step {row['step']}, {text} ({row.at})"


def summary(run: Records) -> Check:
    """Judge `summary.json` by the events that it sums up."""
    if why := run.lacking(STEPS):
        return _SUMMARY.open(why)
    end = run.parts[-1].end
    if run.summary is None and end is None:
        what = "the one there is an earlier start's" if run.has_old_summary else "there is none"
        return _SUMMARY.open(f"{what}: {run.unfinished}")
    if run.summary is None:
        assert end is not None
        why = (
            f"{SUMMARY} is not there or is none, and {STEPS} has the run's end with exit code {end['exit']} ({end.at})"
        )
        return _SUMMARY.judged([why], times=0)
    expected = _expected(run)
    problems = [
        f"{name} is {run.summary.get(name)}, and by {STEPS} it is {value}"
        for name, value in expected.items()
        if run.summary.get(name) != value
    ]
    if run.exit == 0 and not _is_best(run, run.summary.get("best_top1")):
        problems.append(f"best_top1 is {run.summary.get('best_top1')}, and by {STEPS} it is {_best(run)}")
    return _SUMMARY.judged(problems, times=len(expected) + (run.exit == 0))


def _expected(run: Records) -> dict[str, Any]:
    """Return the fields that follow from the events; of a run without an end, those that its last start measured."""
    last = run.parts[-1]
    seconds = dict(enumerate(run.parts[0].start["epoch_s"]))
    seconds |= {row["epoch"]: row["epoch_s"] for row in run.rows("epoch")}
    expected: dict[str, Any] = {"steps": run.last_step, "epoch_s": [seconds[epoch] for epoch in sorted(seconds)]}
    if last.end is not None:
        # Null is what this start did not measure: that stays as an earlier one has left it.
        told = {name: value for name, value in last.end.fields.items() if value is not None}
        expected = told | expected | {"exit": last.end["exit"]}
    # The summary of a run that failed knows of the evaluations of its last start alone.
    since = 0 if run.exit == 0 else last.start.line
    rows = [row.fields for row in run.rows("eval") if row.line > since]
    saved = run.metas.get("last", {}).get("scores")
    measured = rows[-1] if rows else saved if run.exit == 0 and isinstance(saved, dict) else {}
    expected |= {name: measured[name] for name in SCORES if name in measured}
    # One that was stopped while it tested ends without.
    tests = {_TESTS.get(row["of"]): row for row in last.rows if row.event == "test" and run.exit == 0}
    for name, row in tests.items():
        if name:
            expected[name] = {"step": row["of_step"]} | {key: row[key] for key in SCORES}
    return {name: value for name, value in expected.items() if name not in _NOT_SUMMED_UP}


_TESTS = {"last": "test", "best": "test_best"}
_NOT_SUMMED_UP = ("event", "time", "best_top1", "proof")
"""Of an end's fields, those that are judged by themselves."""


def _best(run: Records) -> float | None:
    return max((row["top1"] for row in run.rows("eval") if is_finite(row["top1"])), default=None)


def _is_best(run: Records, told: Any) -> bool:
    """Whether `told` is the best of the recorded evaluations; one before a run's first record may have been better."""
    best = _best(run)
    return bool(told == best if run.first_step == 0 else is_finite(told) and (best is None or told >= best))

"""Judge a run by its records alone: no model, no data set.

A claim is a function that compares files written at different times (the config, the steps, the summary, the
checkpoints) and yields each contradiction. Any content of a run's folder gives a verdict or one error.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .. import checkpoint, files
from ..batching import BatchPlan
from ..checkpoint import resume
from ..checks import ledger, pages
from ..checks.ledger import Planned
from ..config.options import read_toml
from ..config.schema import RunConfig
from ..data.order import SHUFFLED
from ..errors import ProofError, RequestError, Stopped, counted
from ..files import lines_of, parse_json, understanding
from ..record.checks import BIT_FOR_BIT, Check, from_json
from ..training import optim

CONFIG, MANIFEST, STEPS, SUMMARY = "config.toml", "manifest.json", "steps.jsonl", "summary.json"
_SCORES = ("top1", "top5", "loss", "samples")
"""Results of an evaluation, by their names in an `eval` event and a summary."""
_COMPLETE = (0, Stopped.exit_code)
_T = TypeVar("_T")
_Row = Mapping[str, Any]
"""An event of steps.jsonl, with the number of its "line"."""


class _Part(NamedTuple):
    """The rows of steps.jsonl from one start or resumption of the run."""

    rows: Sequence[_Row]
    start: _Row
    end: _Row | None  # `finish` or `failed`; None where it was killed, or still runs
    first_step: int  # the step after which it begins
    last_step: int  # its last optimizer step, or the one it began after


class _Run(NamedTuple):
    """The content of a run's folder. None or empty for unreadable files, which `damage` names."""

    folder: Path
    config: RunConfig | None
    summary: Mapping[str, Any]  # empty, too, where the last start has not ended
    parts: Sequence[_Part]
    damage: Sequence[str]
    exit: int | None = None  # the exit code with which the last start ended; None where it was killed, or still runs
    first_step: int = 0  # the step after which the records begin: 0, unless the run was begun in another folder
    last_step: int = 0
    unfinished: str = ""  # why the run has no end yet, as a clause; "" for one that is complete
    is_own_loop: bool = False

    def rows(self, *events: str) -> list[_Row]:
        return [row for part in self.parts for row in part.rows if row["event"] in events]


def _read(folder: Path) -> _Run:
    damage: list[str] = []

    def understood(name: str, load: Callable[[], _T]) -> _T | None:
        try:
            with understanding(Path(name)):
                return load()
        except RequestError as error:
            damage.append(_reason(error))
            return None

    def json_object(name: str) -> dict[str, Any]:
        return {**parse_json(files.read(folder / name))}

    lines = understood(STEPS, lambda: list(lines_of(folder / STEPS))) or []
    is_torn = bool(lines) and not lines[-1].endswith(b"\n")
    numbered = enumerate(lines[: len(lines) - is_torn], start=1)
    found = [understood(f"{STEPS} line {number}", partial(_row, number, line)) for number, line in numbered]
    rows = [row for row in found if row is not None]
    begins = [index for index, row in enumerate(rows) if row["event"] == "start"]
    if begins[:1] != [0]:
        damage.append(f"{STEPS} does not begin with the event of a start")
        begins = []
    parts = [_part(rows[begin:end]) for begin, end in zip(begins, [*begins[1:], len(rows)], strict=False)]
    config = understood(CONFIG, lambda: read_toml(folder / CONFIG))
    manifest = understood(MANIFEST, lambda: json_object(MANIFEST))
    summary = understood(SUMMARY, lambda: json_object(SUMMARY)) if (folder / SUMMARY).exists() else None
    if summary is None or summary.get("exit") is None:  # a new start clears the exit code; or the file has proofs alone
        summary = {}
    if not parts:
        return _Run(folder, config, summary, parts, damage)
    first, last = parts[0], parts[-1]
    for name, own in {"batch_plan": "plan", "first_step": "first_step", "chosen": "chosen"}.items():
        if manifest is not None and manifest.get(name) != last.start[own]:
            damage.append(f"{MANIFEST} has {name} {manifest.get(name)}, and {STEPS} {last.start[own]}")
    code = None if last.end is None else last.end["exit"]
    if is_torn and code is not None:  # a kill does not cause that
        damage.append(f"the last line of {STEPS} is cut short")
    if summary and code is None:  # which is written after that end
        damage.append(f"{STEPS} lacks the end of the run, which {SUMMARY} has (exit code {summary['exit']})")
    total = last.start["total_steps"]  # 0 where that is not known
    at = f"step {last.last_step:,}" + (f" of {total:,}" if total else "")
    unfinished = {
        0: "",
        None: f"it was killed after {at}, or still runs",
        Stopped.exit_code: f"it was stopped on request at {at}, and can be resumed",
    }.get(code, f"it failed at {at} with exit code {code}")
    is_own = first.start["chosen"].get("loop") == "own"
    return _Run(folder, config, summary, parts, damage, code, first.first_step, last.last_step, unfinished, is_own)


def _row(line: int, text: bytes) -> _Row:
    row = {**parse_json(text), "line": line}
    for name, kind in {"event": str, "step": int, "first_step": int, "samples": int, "exit": int}.items():
        if type(row.get(name, kind())) is not kind or not row["event"]:  # exactly: a bool is no number here
            raise ValueError(f"{name} is {row[name]!r}")
    return row


def _part(rows: Sequence[_Row]) -> _Part:
    first, steps = rows[0]["first_step"], [row["step"] for row in rows if row["event"] == "step"]
    ends = [row for row in rows if row["event"] in ("finish", "failed")]
    return _Part(rows, rows[0], ends[-1] if ends else None, first, steps[-1] if steps else first)


def _reason(error: Exception) -> str:
    return str(error).partition(";")[0].rstrip(".")


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _at(row: _Row) -> str:
    return f"{STEPS} line {row['line']}"


# ---- judging


class _OpenError(Exception):
    """The reason that a claim cannot be judged, as a clause."""


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
        run = _read(folder)
        # In place of the summary's, to which others may have added: the checks in the run's own events.
        held = {check.name: check for check in from_json(run.summary.get("proof"))}
        for part in run.parts:
            told = next((row.get("checks") for row in reversed(part.rows) if row["event"] == "proof"), None)
            # A start that made no step has only checks that it made.
            has_steps = part.last_step > part.first_step or part is run.parts[0]
            held |= {check.name: check for check in from_json(told) if has_steps or check.times}
        claims = [claim for claim in _CLAIMS if not (run.is_own_loop and claim[0] in _OF_THE_COMMAND)]
        checks = [_judged(run, *claim) for claim in claims]
        checks += [_replicas(run, held.get("replicas")), _ledger(run, held.get("ledger"))]
        names = {check.name for check in checks}
        return Judgement([*checks, *(check for name, check in held.items() if name not in names)], run.unfinished)


def refusal(folder: Path, judged: Judgement) -> ProofError:
    """Return the error for failed claims: names the first, and the place."""
    first, *others = judged.failing
    more = f" {counted(len(others), 'more claim')} {'fail' if others[1:] else 'fails'}." if others else ""
    return ProofError(f"{folder} is not what its records claim: {first.name} {first.outcome}: {first.found}.{more}")


def _judged(
    run: _Run, name: str, claim: str, tolerance: str, event: str, problems: Callable[[_Run], Iterator[str]]
) -> Check:
    """Judge a claim by the contradictions that `problems` yields. `event` is the kind of events it counts."""
    begun_s, times, found, outcome = time.perf_counter(), 0, [""], Check.OPEN
    try:
        with understanding(Path("its records")):
            if not run.parts and name != "files":
                raise _OpenError(f"{STEPS} cannot be read")
            found, times = [*problems(run)], len(run.rows(event))
            outcome = Check.FAILS if found else Check.HOLDS if times else Check.OPEN
    except _OpenError as error:
        found = [str(error)]
    except RequestError as error:  # a value that no event, config or checkpoint of ours has
        outcome, found = Check.FAILS, [_reason(error)]
    more = f"; and {counted(len(found) - 1, 'more finding')}" if found[1:] else ""
    told, cost_s = "".join(found[:1]) + more, time.perf_counter() - begun_s
    return Check(name=name, claim=claim, outcome=outcome, times=times, tolerance=tolerance, found=told, cost_s=cost_s)


def _config(run: _Run) -> RunConfig:
    if run.config is None:
        raise _OpenError(f"{CONFIG} cannot be read")
    return run.config


def _damage(run: _Run) -> Iterator[str]:
    yield from run.damage


def _steps(run: _Run) -> Iterator[str]:
    before = run.first_step
    for row in run.rows("start", "step"):
        step, expected = (row["first_step"], before) if row["event"] == "start" else (row["step"], before + 1)
        if step != expected:
            yield f"step {step} follows step {before} ({_at(row)})"
        before = step
    if run.is_own_loop:
        return
    config, samples = _config(run), _samples(run)
    plan = BatchPlan(global_size=config.batch.size, ranks=1, accumulation=1)
    per_epoch = plan.steps(samples, drop_last=config.batch.drop_last)
    total = min(per_epoch * config.epochs, config.max_steps or per_epoch * config.epochs)
    for part in run.parts:
        if (begun := part.start["plan"]["global_size"]) != config.batch.size:
            yield f"{CONFIG} has batch {config.batch.size}, and the run was started with {begun} ({_at(part.start)})"
    for last, part in itertools.pairwise(run.parts):
        then, now = (each.start["plan"]["accumulation"] for each in (last, part))
        if now != then and part.start["chosen"].get("batchnorm") != "none":
            yield (
                f"from step {part.first_step + 1} on, batch statistics are those of one of "
                f"{counted(now, 'global micro-batch')}, and were of one of {then}: another model ({_at(part.start)})"
            )
    for row in run.rows("step"):
        epoch, within = divmod(row["step"] - 1, per_epoch)
        begin, end = plan.batch(within, samples)
        if (row["epoch"], row["samples"]) != (epoch, end - begin):
            told, due = (f"{counted(each, 'sample')} of epoch" for each in (row["samples"], end - begin))
            yield f"step {row['step']} has {told} {row['epoch']}, and by the plan {due} {epoch} ({_at(row)})"
    if not run.unfinished and run.last_step != total and not _is_out_of_patience(run, config.patience):
        yield f"the run is complete at step {run.last_step:,}, and {CONFIG} asks for {total:,}"


def _is_out_of_patience(run: _Run, patience: int | None) -> bool:
    """Return whether the last `patience` evaluations did not raise the best top1."""
    scores = list({row["step"]: row["top1"] for row in run.rows("eval")}.values())
    if patience is None or len(scores) <= patience:
        return patience is not None and run.first_step > 0  # those before may be in another folder
    return bool(max(scores[-patience:]) <= max(scores[:-patience]))


def _samples(run: _Run) -> int:
    """Return the training set's size. Read from a checkpoint, else derived from an epoch's steps."""
    meta = checkpoint.peek(run.folder / "checkpoints" / "last") or {}
    start = run.parts[0].start
    size, per_epoch = start["plan"]["global_size"], start["steps_per_epoch"]
    lasts = [row["samples"] for row in run.rows("step") if row["step"] % per_epoch == 0]
    return int(meta.get("samples") or (per_epoch - 1) * size + (lasts or [size])[0])


def _losses(run: _Run) -> Iterator[str]:
    for part in run.parts:
        # fp16 scales the loss up until gradients overflow: such a step is skipped, and its norm recorded.
        overflows = part.start["chosen"].get("precision") == "fp16"
        for row in (row for row in part.rows if row["event"] == "step"):
            for name, value in (("loss", row["loss"]), ("grad_norm", 0 if overflows else row.get("grad_norm", 0))):
                if not _is_finite(value):
                    yield f"the {name} of step {row['step']} is not a finite number ({_at(row)})"


def _rates(run: _Run) -> Iterator[str]:
    config = _config(run)
    peak = optim.peak_lr(config.optim, config.batch.size)
    for part in run.parts:  # a schedule may span the epochs, of which each start has its own number
        epochs, per_epoch = part.start["epochs"], part.start["steps_per_epoch"]
        factor = optim.schedule(config.optim, steps_per_epoch=per_epoch, epochs=epochs)
        for row in part.rows:
            if row["event"] == "step" and row["lr"] != (expected := peak * factor(row["step"] - 1)):
                rates = f"{row['lr']!r}, and {CONFIG} gives {expected!r}"
                yield f"step {row['step']} had the learning rate {rates} over {counted(epochs, 'epoch')} ({_at(row)})"


def _evaluations(run: _Run) -> Iterator[str]:
    rows = run.rows("evaluate", "eval", "test")
    if not rows and (run.unfinished or run.last_step == run.first_step):
        raise _OpenError(f"there is none in these records: {run.unfinished or 'they have no step'}")
    yield from _misplaced(run)
    sizes: dict[bool, int] = {}
    for row in rows:
        samples, after = row["samples"], f"the evaluation after step {row['step']}"
        size = sizes.setdefault("of" in row, samples)  # `of`: at the end, beside a validation set
        if samples != size or size < 1:
            yield f"{after} has {counted(samples, 'sample')}, and the set has {size:,} ({_at(row)})"
        elif row["event"] != "evaluate" and not _is_possible(row):
            yield f"{after} cannot have had {', '.join(f'{name} {row[name]}' for name in _SCORES)} ({_at(row)})"


def _misplaced(run: _Run) -> Iterator[str]:
    """Yield evaluations at a wrong step, repeated ones, and missing ones."""
    due, evaluated = set[int](), set[int]()
    for part in run.parts:
        step, own = part.first_step, set[int]()
        between = part.start["steps_per_epoch"] * part.start.get("eval_every", _config(run).eval_every)
        for row in part.rows:
            if row["event"] == "step":
                step = row["step"]
                due |= {step} if step % between == 0 else set()
            elif row["event"] == "eval":
                if row["step"] != step or step in own:
                    again = " a second time" if step in own else ""
                    yield f"the evaluation after step {row['step']} comes after step {step}{again} ({_at(row)})"
                own.add(row["step"])
        due |= {step} if part.end is not None and part.end["exit"] == 0 else set()
        evaluated |= own
    for step in sorted(due - evaluated):
        if run.first_step < step and (run.exit == 0 or step < run.last_step):  # otherwise the last one may be missing
            yield f"the evaluation after step {step} is not in {STEPS}"


def _is_possible(row: _Row) -> bool:
    """Return whether scores are possible. Shares are integers over the sample count, to the last bit."""
    samples, shares = row["samples"], (row["top1"], row["top5"])
    is_ordered = _is_finite(row["loss"]) and 0 <= row["top1"] <= row["top5"] <= 1
    return is_ordered and all(round(share * samples) / samples == share for share in shares)


def _summary(run: _Run) -> Iterator[str]:
    end, rows = run.parts[-1].end, run.rows("eval")
    if end is None:
        raise _OpenError(f"there is none of the last start: {run.unfinished}")
    otherwise = ("event", "line", "time", "best_top1", "proof")
    # Null is a value that this start did not measure: an earlier start's value stays.
    expected = {name: held for name, held in end.items() if held is not None and name not in otherwise}
    expected["steps"] = run.last_step
    if rows and run.exit == 0:
        expected |= {name: rows[-1][name] for name in _SCORES}
        if run.first_step == 0:  # one before the first record may have been better
            expected["best_top1"] = max((row["top1"] for row in rows if _is_finite(row["top1"])), default=None)
    for name, value in expected.items():
        if run.summary.get(name) != value:
            yield f"{name} is {run.summary.get(name)}, and by {STEPS} it is {value}"


def _checkpoints(run: _Run) -> Iterator[str]:
    saved, folder = {row["step"] for row in run.rows("checkpoint")}, run.folder / "checkpoints"
    if not saved and (run.unfinished or run.is_own_loop) and not os.path.lexists(folder / "last"):
        raise _OpenError(f"none was written: {run.unfinished or 'nothing was saved'}")
    scores = {row["step"]: row["top1"] for row in run.rows("eval") if _is_finite(row["top1"])}
    # A full disk leaves out a checkpoint, and `best` then points to the best of those on the disk.
    kept = saved | {part.first_step for part in run.parts}
    best = max((top1 for step, top1 in scores.items() if step in kept), default=None)
    has_best = os.path.lexists(folder / "best") if run.is_own_loop else best is not None or run.exit == 0
    most = math.inf if run.is_own_loop else run.last_step
    least = run.last_step if run.exit == 0 and not run.is_own_loop else max(saved, default=0)
    for name in ("last", "best") if has_best else ("last",):
        try:
            meta = checkpoint.load(folder / name).meta
        except RequestError as error:
            yield _reason(error)
            continue
        step = meta["step"]
        if name == "last" and step != (due := min(max(step, least), most)):
            yield f"last: it is of step {step}, and the run of {due}"
        if run.is_own_loop:
            continue
        yield from (f"{name}: {found}" for found in _of_other_runs(run, meta))
        if name == "last" and run.exit == 0 and meta["best_top1"] != (told := run.summary.get("best_top1")):
            yield f"last: its best_top1 is {meta['best_top1']}, and {SUMMARY} has {told}"
        if name == "best" and best is not None and scores.get(step) != best:
            yield f"best: it is of step {step} with top1 {scores.get(step)}, and the best one had {best}"


def _of_other_runs(run: _Run, meta: Mapping[str, Any]) -> Iterator[str]:
    """Yield contradictions between a checkpoint and this run. Compares config and scores; clauses."""
    # An option that is newer than the checkpoint cannot have been another one.
    before, asked = meta.get("config", {}), {} if run.config is None else resume.identity(run.config)
    for key in asked:
        if before.get(key, asked[key]) != asked[key]:
            yield f"it was trained with {key} {before[key]}, and {CONFIG} has {asked[key]}"
    scores = meta["scores"] or {}
    for row in [row for row in run.rows("eval") if row["step"] == meta["evaluated"]][-1:]:
        for key in (key for key in _SCORES if scores.get(key) != row[key]):
            yield f"its {key} is {scores.get(key)}, and step {row['step']} had {row[key]} ({_at(row)})"


def _replicas(run: _Run, held: Check | None) -> Check:
    """Judge the run's own replica check: equal, also after the last step."""
    if held is None or run.exit is None:
        why = run.unfinished or f"{STEPS} has no comparison"
        return Check(name="replicas", claim="All ranks hold the same bits", outcome=Check.OPEN, found=why)
    # What is wrong with replicas ends a run; in the summary of any other, only an earlier judgement can say that.
    if held.outcome == Check.OPEN or run.exit not in _COMPLETE or held.at_step in (None, run.last_step):
        return held
    found = f"compared last after step {held.at_step}; but the run's last step is {run.last_step}"
    return dataclasses.replace(held, outcome=Check.FAILS, found=found)


def _ledger(run: _Run, held: Check | None) -> Check:
    """Judge the ledger, if one was recorded. `held` is the run's own check, and has the cost of recording."""
    path, keeping = run.folder / pages.NAME, [part for part in run.parts if part.start["chosen"].get("ledger") is True]
    found: list[Check] = []

    def problems(run: _Run) -> Iterator[str]:
        if path.exists():
            found.append(ledger.check(path, _planned(run, keeping[0].first_step if keeping else None)))
        elif not ((held is not None and held.times) or any(part.last_step > part.first_step for part in keeping)):
            raise _OpenError("not recorded; --ledger records it")
        else:
            yield f"the run kept a {pages.NAME}, and it is not there"

    judged = _judged(run, "ledger", ledger.CLAIM, "exactly", "ledger", problems)
    check = found[0] if found else judged
    return check if held is None else dataclasses.replace(check, cost_s=held.cost_s or check.cost_s)


def _planned(run: _Run, begun: int | None) -> Planned:
    """Return the plan to check a ledger against. `begun` is the step before the ledger's first."""
    batch, start = _config(run).batch, run.parts[-1].start
    own = run.is_own_loop  # the loop reports its batch at its start
    return Planned(
        global_batch=start["plan"]["global_size"] if own else batch.size,
        drop_last=start["chosen"].get("drop-last") is True if own else batch.drop_last,
        order=start["chosen"].get("order", "") if own else SHUFFLED,
        seed=_config(run).seed,
        is_own_loop=own,
        first=None if begun is None else begun + 1,
        steps=run.last_step if run.exit in _COMPLETE else None,
        evaluations=[] if begun is None else [row["step"] for row in run.rows("eval") if row["step"] > begun],
    )


_CLAIMS = (
    ("files", f"{CONFIG}, {MANIFEST}, {STEPS} and {SUMMARY} can be read to their ends", "", "start", _damage),
    ("steps", "Each optimizer step is recorded once, in order, with its samples", "exactly", "step", _steps),
    ("losses", "Each loss and gradient norm is a finite number", "", "step", _losses),
    ("rates", "Each step had the learning rate of the config's schedule", BIT_FOR_BIT, "step", _rates),
    ("evaluations", "Where an evaluation was due, the whole set was evaluated once", "exactly", "eval", _evaluations),
    ("summary", f"{SUMMARY} says what {STEPS} says", BIT_FOR_BIT, "start", _summary),
    ("checkpoints", "The checkpoints are whole and of this run", BIT_FOR_BIT, "checkpoint", _checkpoints),
)
_OF_THE_COMMAND = ("rates", "evaluations", "summary")
"""Claims that cannot be judged for a user's own loop."""

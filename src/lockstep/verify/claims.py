"""A run judged by its records alone: no model is built, no data set is read.

Each claim is judged from several files that were written at different times (the config, the manifest, the steps, the
summary, the checkpoints), and holds where they agree: a claim is a function that yields what is wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import checkpoint
from ..batching import BatchPlan
from ..checkpoint import resume
from ..checks import exactly_once, finite, pages
from ..checks.exactly_once import Planned
from ..config.schema import RunConfig
from ..data.order import OF_A_SAMPLER, SHUFFLED
from ..errors import ProofError, RequestError, counted
from ..files import understanding
from ..record.checks import BIT_FOR_BIT, Check, from_json
from ..training import optim
from . import records
from .records import CONFIG, MANIFEST, STEPS, SUMMARY, Records, is_finite

SCORES = ("top1", "top5", "loss", "samples")
"""What an evaluation gives; an `eval` event, a summary and a checkpoint have it by these names."""
_COMPLETE = (0, 75)
"""Exit codes of runs that came to an end of their own: done, and stopped on request."""
_BUT = "; but the run's last step is"
_BY_THEMSELVES = ("event", "time", "best_top1", "proof")
"""Of an end's fields, those that the summary has otherwise."""


class _OpenError(Exception):
    """Why a claim cannot be judged, as a clause."""


@dataclass(frozen=True)
class Judgement:
    """What became of each claim about a run."""

    checks: tuple[Check, ...]
    """Those judged here, then those that the run itself wrote beside them."""
    unfinished: str
    """Why the run has no end, as a clause; "" for one that is complete."""

    @property
    def failing(self) -> list[Check]:
        """The claims that are wrong, the most basic first."""
        return [check for check in self.checks if check.fails]


def judge(folder: Path) -> Judgement:
    """Return what became of each claim about the run in `folder`, from its files alone; writes nothing."""
    run = records.read(folder)
    held = _held(run)
    checks = [each.of(run) for each in (_OF_OWN_LOOPS if run.is_own_loop else _CLAIMS)]
    checks += [_replicas(run, held.get("replicas")), _ledger(run, held.get("ledger"))]
    names = {check.name for check in checks}
    return Judgement((*checks, *(check for name, check in held.items() if name not in names)), run.unfinished)


def refusal(folder: Path, judged: Judgement) -> ProofError:
    """Return the error for a run of which claims are wrong: it names the first one, and the place."""
    first, *others = judged.failing
    more = f" {counted(len(others), 'more claim')} {'fail' if others[1:] else 'fails'}." if others else ""
    return ProofError(f"{folder} is not what its records claim: {first.name} {first.outcome}: {first.found}.{more}")


def _held(run: Records) -> Mapping[str, Check]:
    """Return the checks that the run, or others beside it, have written, as far as they are whole.

    What the run itself has proved is read from its events, which nobody writes to afterwards.
    """
    found = {check.name: check for check in from_json((run.summary or {}).get("proof"))}
    for part in run.parts:
        told = next((row.fields.get("checks") for row in reversed(part.rows) if row.event == "proof"), None)
        # A start that made no step has nothing to say but what it has looked at.
        has_steps = part.last_step > part.first_step or part is run.parts[0]
        found |= {check.name: check for check in from_json(told) if has_steps or check.times}
    return found


@dataclass(frozen=True)
class _Claim:
    """What is claimed of a run, the files that it takes, what is wrong, and how often that was looked at."""

    name: str
    says: str
    tolerance: str
    needs: tuple[str, ...]
    times: Callable[[Records], int]
    problems: Callable[[Records], Iterator[str]]

    def of(self, run: Records) -> Check:
        """Judge a run; nothing in its records can raise."""
        begun_s, times, found = time.perf_counter(), 0, [""]
        lacking = {CONFIG: run.config, STEPS: run.parts or None}
        outcome = Check.OPEN
        try:
            with understanding(Path("its records")):
                if absent := [name for name in self.needs if lacking[name] is None]:
                    raise _OpenError(f"{' and '.join(absent)} cannot be read")
                found, times = [*self.problems(run)], self.times(run)
                outcome = Check.FAILS if found else Check.HOLDS if times else Check.OPEN
        except _OpenError as error:
            found = [str(error)]
        except RequestError as error:  # over what no event, config or checkpoint of ours holds
            outcome, found = Check.FAILS, [str(error).partition(";")[0].rstrip(".")]
        more = f"; and {counted(len(found) - 1, 'more finding')}" if found[1:] else ""
        return Check(
            name=self.name,
            claim=self.says,
            outcome=outcome,
            times=times,
            tolerance=self.tolerance,
            found="".join(found[:1]) + more,
            cost_s=time.perf_counter() - begun_s,
        )


def _claim(
    name: str, says: str, tolerance: str, needs: tuple[str, ...], *events: str
) -> Callable[[Callable[[Records], Iterator[str]]], _Claim]:
    """Make a claim of a function that yields what is wrong; it is looked at as often as there are such `events`."""
    return lambda problems: _Claim(name, says, tolerance, needs, lambda run: len(run.rows(*events)), problems)


_BOTH = (CONFIG, STEPS)


# ---- files and steps


@_claim("files", f"{CONFIG}, {MANIFEST}, {STEPS} and {SUMMARY} can be read to their ends", "", (), "start")
def _damage(run: Records) -> Iterator[str]:
    yield from run.damage


@_claim("steps", "Each optimizer step is recorded once, in order", "exactly", (STEPS,), "step")
def _sequence(run: Records) -> Iterator[str]:
    before = run.first_step
    for row in run.rows("start", "step"):
        step, expected = (row["first_step"], before) if row.event == "start" else (row["step"], before + 1)
        if step != expected:
            yield f"step {step} follows step {before} ({row.at})"
        before = step


@_claim(
    "steps", "Each optimizer step is recorded once, in order, with its share of the epoch", "exactly", _BOTH, "step"
)
def _steps(run: Records) -> Iterator[str]:
    config, samples = _config(run), _samples(run)
    plan = BatchPlan(**{name: run.parts[-1].start["plan"][name] for name in ("global_size", "ranks", "accumulation")})
    per_epoch = plan.steps(samples, drop_last=config.batch.drop_last)
    if per_epoch == 0:
        yield f"{counted(samples, 'sample')} make no step of {plan.global_size} ({CONFIG})"
        return
    total = min(per_epoch * config.epochs, config.max_steps or per_epoch * config.epochs)
    last = run.parts[-1].start
    for start, name, told, expected in (
        *((part.start, "batch", part.start["plan"]["global_size"], config.batch.size) for part in run.parts),
        *((part.start, "steps an epoch", part.start["steps_per_epoch"], per_epoch) for part in run.parts),
        (last, "epochs", last["epochs"], config.epochs),
        (last, "steps", last["total_steps"], total),
    ):
        if told != expected:
            yield f"{CONFIG} has {name} {expected}, and the run was started with {told} ({start.at})"
    for name, ours in {"batch_plan": "plan", "first_step": "first_step", "chosen": "chosen"}.items():
        if run.manifest is not None and run.manifest.get(name) != (told := last.fields.get(ours)):
            yield f"{MANIFEST} has {name} {run.manifest.get(name)}, and the run was last started with {told}"
    for before, part in itertools.pairwise(run.parts):
        now, then = (each.start["plan"]["accumulation"] for each in (part, before))
        if now != then and part.chosen.get("batchnorm") != "none":
            cut = f"{counted(now, 'global micro-batch')}, and were of one of {then}"
            yield f"from step {part.first_step + 1} on, batch statistics are those of one of {cut}: another model"
    yield from _sequence.problems(run)
    for row in run.rows("step"):
        epoch, within = divmod(row["step"] - 1, per_epoch)
        begin, end = plan.batch(within, samples)
        if (row["epoch"], row["samples"]) != (epoch, end - begin):
            yield (
                f"step {row['step']} has {counted(row['samples'], 'sample')} of epoch {row['epoch']}, and the batch "
                f"plan gives it {end - begin:,} of epoch {epoch} ({row.at})"
            )
    if not run.unfinished and run.last_step != total and not _gave_up(run, config.patience):
        yield f"the run is complete at step {run.last_step:,}, and {CONFIG} asks for {total:,}"


def _gave_up(run: Records, patience: int | None) -> bool:
    """Whether the last evaluations, as many as --patience allows, have brought no better top1 than those before."""
    top1 = list({row["step"]: row["top1"] for row in run.rows("eval") if is_finite(row["top1"])}.values())
    before, since = top1[: -(patience or 1)], top1[-(patience or 1) :]
    return len(since) == patience and (max(since) <= max(before) if before else run.first_step > 0)


def _samples(run: Records) -> int:
    """Return the size of the training set: a checkpoint tells it, or else what the steps of an epoch have."""
    for meta in run.metas.values():
        if type(told := meta.get("samples")) is int and told > 0:
            return told
    start = run.parts[0].start
    size, per_epoch = start["plan"]["global_size"], start["steps_per_epoch"]
    lasts = [row["samples"] for row in run.rows("step") if row["step"] % per_epoch == 0]
    return int((per_epoch - 1) * size + (lasts or [size])[0])


@_claim("losses", "Each loss and gradient norm is a finite number", "", (STEPS,), "step")
def _losses(run: Records) -> Iterator[str]:
    for part in run.parts:
        # Under fp16 the loss is scaled up until gradients overflow; the step is then skipped, the norm recorded.
        names = ("loss",) if part.chosen.get("precision") == "fp16" else ("loss", "grad_norm")
        for row in part.rows:
            for name in names if row.event == "step" else ():
                if not is_finite(row.fields.get(name, None if name == "loss" else 0)):
                    yield f"the {name} of step {row['step']} is not a finite number ({row.at})"


@_claim("rates", "Each step had the learning rate of the config's schedule", BIT_FOR_BIT, _BOTH, "step")
def _rates(run: Records) -> Iterator[str]:
    """Judge each step's learning rate, by the number of epochs that its own start had: a schedule may span them."""
    config = _config(run)
    peak = optim.peak_lr(config.optim, config.batch.size)
    for part in run.parts:
        epochs, per_epoch = part.start["epochs"], part.start["steps_per_epoch"]
        factor = optim.schedule(config.optim, steps_per_epoch=per_epoch, epochs=epochs)
        for row in part.rows:
            if row.event == "step" and row["lr"] != (expected := peak * factor(row["step"] - 1)):
                said = f"{row['lr']!r}, and {CONFIG} gives {expected!r}"
                yield f"step {row['step']} had the learning rate {said} over {counted(epochs, 'epoch')} ({row.at})"


# ---- scores


@_claim("evaluations", "Where an evaluation was due, the whole set was evaluated", "exactly", (STEPS,), "eval")
def _evaluations(run: Records) -> Iterator[str]:
    due = {part.last_step for part in run.parts if part.end is not None and part.end["exit"] == 0}
    for part in run.parts:
        every = part.start["steps_per_epoch"] * max(1, part.start.fields.get("eval_every") or 1)
        due |= {row["step"] for row in part.rows if row.event == "step" and row["step"] % every == 0}
    # At the last step of a run that did not end well, it may have been under way.
    due = due | {run.last_step} if run.exit == 0 else due - {run.last_step}
    due = {step for step in due if step > run.first_step}
    if not due and not run.rows("eval"):
        raise _OpenError(f"none is due in these records: {run.unfinished or 'they begin after the last one'}")
    for step in sorted(due - {row["step"] for row in run.rows("eval")}):
        yield f"the evaluation after step {step} is not in {STEPS}"
    sizes: dict[bool, int] = {}
    for row in run.rows("evaluate", "eval", "test"):
        samples, after = row["samples"], f"the evaluation after step {row['step']}"
        size = sizes.setdefault("of" in row.fields, samples)  # `of`: at the end, beside a validation set
        if samples != size or size < 1:
            yield f"{after} has {counted(samples, 'sample')}, and the set has {size:,} ({row.at})"
        elif row.event != "evaluate":
            top1, top5, loss = (row[name] for name in ("top1", "top5", "loss"))
            # A share of the samples is a quotient of whole numbers, to the last bit.
            is_share = all(is_finite(each) and round(each * samples) / samples == each for each in (top1, top5))
            if not (is_finite(loss) and is_share and 0 <= top1 <= top5 <= 1):
                yield f"{after} cannot have had loss {loss}, top1 {top1} and top5 {top5} ({row.at})"


@_claim("summary", f"{SUMMARY} says what {STEPS} says", BIT_FOR_BIT, (STEPS,), "finish", "failed")
def _summary(run: Records) -> Iterator[str]:
    end, told, rows = run.parts[-1].end, run.summary, run.rows("eval")
    if end is None:
        raise _OpenError(f"there is none of the last start: {run.unfinished}")
    if told is None:
        code = f"exit code {end['exit']} ({end.at})"
        yield f"{SUMMARY} is not there or is none, and {STEPS} has the run's end with {code}"
        return
    # Null is what this start did not measure: that stays as an earlier one has left it.
    expected = {name: held for name, held in end.fields.items() if held is not None and name not in _BY_THEMSELVES}
    expected["steps"] = run.last_step
    if rows and run.exit == 0:
        expected |= {name: rows[-1][name] for name in SCORES}
        best = max((row["top1"] for row in rows if is_finite(row["top1"])), default=None)
        if run.first_step == 0 or (best or 0) > (
            told.get("best_top1") or 0
        ):  # one before the first record may be better
            expected["best_top1"] = best
    for name, value in expected.items():
        if told.get(name) != value:
            yield f"{name} is {told.get(name)}, and by {STEPS} it is {value}"


# ---- checkpoints


@_claim(
    "checkpoints",
    "The checkpoints are whole, finite, of this run, and of the steps they stand for",
    BIT_FOR_BIT,
    (STEPS,),
    "checkpoint",
)
def _checkpoints(run: Records) -> Iterator[str]:
    """Judge the checkpoints `last` and `best`; reads them whole."""
    saved = {row["step"] for row in run.rows("checkpoint")}
    newest, scores = max(saved, default=0), {row["step"]: row for row in run.rows("eval")}
    folder = run.folder / "checkpoints"
    if not saved and (run.unfinished or run.is_own_loop) and not os.path.lexists(folder / "last"):
        raise _OpenError(f"none was written: {run.unfinished or 'nothing was saved'}")
    # `best` may point to what an evaluation gave that is on the disk: a full one leaves out a checkpoint.
    there = saved | {part.first_step for part in run.parts}
    best = max((row["top1"] for step, row in scores.items() if step in there and is_finite(row["top1"])), default=None)
    has_best = "best" in run.metas if run.is_own_loop else best is not None or run.exit == 0
    for name in ("last", "best") if has_best else ("last",):
        try:
            state = checkpoint.load(folder / name)
        except RequestError as error:
            yield str(error).partition(";")[0].rstrip(".")  # without what to resume from instead
            continue
        meta, step = state.meta, state.meta["step"]
        # An option that is newer than the checkpoint cannot have been another one.
        before, asked = meta.get("config", {}), {} if run.config is None else resume.identity(run.config)
        for key in asked if not run.is_own_loop else ():
            if before.get(key, asked[key]) != asked[key]:
                yield f"{name}: it was trained with {key} {before[key]}, and {CONFIG} has {asked[key]}"
        # What a model holds beside weights and statistics, such as a mask, may be infinite; an optimizer without a
        # state of its own does not tell which are weights.
        trained = {each.rpartition("/")[0] for each in state.part("optimizer")}
        held = {
            f"{group}/{each}": tensor
            for group in ("model", "ema")
            for each, tensor in state.part(group).items()
            if not trained or each in trained or each.endswith(("running_mean", "running_var"))
        }
        if bad := finite.not_finite(held):
            yield f"{name}: {', '.join(bad[: finite.NAMED])} {'is' if len(bad) == 1 else 'are'} not finite"
        most = step if run.is_own_loop else run.last_step
        if name == "last" and run.exit == 0 and step != most:
            yield f"last: it is of step {step}, and the run of {most}"
        elif name == "last" and not newest <= step <= most:
            yield f"last: it is of step {step}; the records go to {run.last_step}, and tell of one of step {newest}"
        if run.is_own_loop:
            continue
        if name == "best" and best is not None and step not in scores:
            yield f"best: it is of step {step}, of which {STEPS} has no evaluation"
        elif name == "best" and best is not None and scores[step]["top1"] != best:
            yield f"best: it is of step {step} with top1 {scores[step]['top1']}, and the best one had {best}"
        row, told = scores.get(meta.get("evaluated", 0)), meta.get("scores")
        if row is None or told is None or (name == "last" and step != run.last_step):
            continue
        for key in SCORES:
            if told.get(key) != row[key]:
                yield f"{name}: its {key} is {told.get(key)}, and step {row['step']} had {row[key]} ({row.at})"


# ---- what the run itself has looked at


def _replicas(run: Records, held: Check | None) -> Check:
    """Judge what the run itself wrote of its replicas: they must have been the same, also after the last step."""
    if held is None or run.exit is None:
        why = run.unfinished or f"{STEPS} has no comparison"
        return Check(name="replicas", claim="All ranks hold the same bits", outcome=Check.OPEN, found=why)
    # What is wrong with replicas ends a run; in the summary of any other, only an earlier judgement can say that.
    if held.outcome == Check.OPEN or run.exit not in _COMPLETE or held.at_step is None:
        return held
    found, is_last = held.found.partition(_BUT)[0], held.at_step == run.last_step
    found = found if is_last else f"{found}{_BUT} {run.last_step}"
    return dataclasses.replace(held, outcome=Check.HOLDS if is_last else Check.FAILS, found=found)


def _ledger(run: Records, held: Check | None) -> Check:
    """Judge the ledger, where one was recorded; `held` is what the run itself wrote of it, and what recording cost."""
    path, keeping = run.folder / pages.NAME, [part for part in run.parts if part.chosen.get("ledger") is True]
    check: Check | None = None

    def problems(run: Records) -> Iterator[str]:
        nonlocal check
        if path.exists():
            planned = _planned(run, keeping[0].first_step if keeping else None)
            # As no kill leaves it in a run with an end, a last page that is cut short is damage.
            check = exactly_once.check(path, planned, torn_ok=planned.steps is None)
        elif (held is not None and held.times) or any(part.last_step > part.first_step for part in keeping):
            yield f"the run kept a {pages.NAME}, and it is not there"
        else:
            raise _OpenError("not recorded; --ledger records it")

    judged = _claim("ledger", exactly_once.CLAIM, "exactly", _BOTH, "ledger")(problems).of(run)
    check = check or judged
    return dataclasses.replace(check, cost_s=held.cost_s) if held is not None and held.cost_s is not None else check


def _planned(run: Records, begun: int | None) -> Planned:
    """Return what the ledger has to hold, which was begun after this step."""
    config, last = _config(run), run.parts[-1]
    own = run.is_own_loop  # batch and order are then the loop's, which tells them at its start
    return Planned(
        global_batch=last.start["plan"]["global_size"] if own else config.batch.size,
        seed=config.seed,
        drop_last=last.chosen.get("drop-last") is True if own else config.batch.drop_last,
        order=last.chosen.get("order", OF_A_SAMPLER) if own else SHUFFLED,
        first=None if begun is None else begun + 1,
        steps=run.last_step if run.exit in _COMPLETE else None,
        evaluations=[] if begun is None else [row["step"] for row in run.rows("eval") if row["step"] > begun],
    )


def _config(run: Records) -> RunConfig:
    assert run.config is not None, "as the claim needs"
    return run.config


_CLAIMS = (_damage, _steps, _losses, _rates, _evaluations, _summary, _checkpoints)
_OF_OWN_LOOPS = (_damage, _sequence, _losses, _checkpoints)
"""Of a loop of the user's own, rates and scores are known to nobody else."""

"""Whether the recorded optimizer steps are those that the config asks for: their order, samples, losses and rates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .. import optim
from ..batching import BatchPlan
from ..config import RunConfig
from ..errors import RequestError, counted
from ..proof import BIT_FOR_BIT, Check
from .claim import Claim
from .on_disk import CONFIG, MANIFEST, STEPS, Part, Records, is_finite, whole
from .recorded_scores import ran_out_of_patience

_STEPS = Claim("steps", "Each optimizer step is recorded once, in order, with its share of the epoch", "exactly")
_SEQUENCE = Claim("steps", "Each optimizer step is recorded once, in order", "exactly")
_LOSSES = Claim("losses", "Each loss and gradient norm is a finite number")
_RATES = Claim("rates", "Each step had the learning rate of the config's schedule", BIT_FOR_BIT)


def steps(run: Records) -> Check:
    """Judge which steps there are, and the epoch and the number of samples of each."""
    if why := run.lacking(CONFIG, STEPS):
        return _STEPS.open(why)
    assert run.config is not None
    samples, is_told = _training_samples(run)
    plan, drop_last = BatchPlan(**_plan(run.parts[-1])), run.config.batch.drop_last
    per_epoch = plan.steps(samples, drop_last=drop_last)
    if per_epoch == 0:
        return _STEPS.judged([f"{counted(samples, 'sample')} make no step of {plan.global_size} ({CONFIG})"], times=0)
    problems = [*_planned(run, run.config, per_epoch), *_sequence(run), *_shares(run, plan, samples, per_epoch)]
    if not run.unfinished:
        asked = _total(run.config, per_epoch)
        if run.last_step != asked and not ran_out_of_patience(run):
            problems.append(f"the run is complete at step {run.last_step:,}, and {CONFIG} asks for {asked:,}")
    count = sum(1 for _ in run.rows("step"))
    found = f"{counted(count, 'step')}, {counted(per_epoch, 'step')} an epoch of {counted(samples, 'sample')}"
    found += "" if is_told else ", a number that only the records themselves tell"
    found += f"; the {run.first_step:,} before are in another folder" if run.first_step else ""
    return _STEPS.judged(problems, times=count, found=f"{found}; {run.unfinished}" if run.unfinished else found)


def sequence(run: Records) -> Check:
    """Judge of a loop of the user's own that its steps follow one another."""
    if why := run.lacking(STEPS):
        return _SEQUENCE.open(why)
    return _SEQUENCE.judged([*_sequence(run)], times=sum(1 for _ in run.rows("step")))


def losses(run: Records) -> Check:
    """Judge whether each step's loss, and its gradient norm where there is one, is a finite number."""
    if why := run.lacking(STEPS):
        return _LOSSES.open(why)
    problems: list[str] = []
    for part in run.parts:
        # Under fp16 the loss is scaled up until gradients overflow; the step is then skipped, the norm recorded.
        chosen = part.start.fields.get("chosen")
        may_overflow = isinstance(chosen, dict) and chosen.get("precision") == "fp16"
        names = ("loss",) if may_overflow else ("loss", "grad_norm")
        for row in part.rows:
            if row.event == "step":
                problems += [
                    f"the {name} of step {row['step']} is not a finite number ({row.at})"
                    for name in names
                    if name in row.fields and not is_finite(row[name])
                ]
    return _LOSSES.judged(problems, times=sum(1 for _ in run.rows("step")))


def rates(run: Records) -> Check:
    """Judge each step's learning rate, by the number of epochs that its own start had: a schedule may span them."""
    if why := run.lacking(CONFIG, STEPS):
        return _RATES.open(why)
    assert run.config is not None
    problems: list[str] = []
    for part in run.parts:
        try:
            problems += _wrong_rates(part, run.config)
        except (RequestError, OverflowError) as error:
            problems.append(f"{CONFIG} gives no rates: {str(error).rstrip('.')}")
    spans = list(dict.fromkeys(part.start["epochs"] for part in run.parts))
    found = f"schedules over {' and then '.join(map(str, spans))} epochs, as each start said" if len(spans) > 1 else ""
    return _RATES.judged(problems, times=sum(1 for _ in run.rows("step")), found=found)


def _wrong_rates(part: Part, config: RunConfig) -> Iterator[str]:
    peak = optim.peak_lr(config.optim, config.batch.size)
    start = part.start
    factor = optim.schedule(config.optim, steps_per_epoch=start["steps_per_epoch"], epochs=start["epochs"])
    for row in part.rows:
        if row.event == "step" and row["lr"] != (expected := peak * factor(row["step"] - 1)):
            yield (
                f"step {row['step']} had the learning rate {row['lr']!r}, and {CONFIG} gives {expected!r} ({row.at})"
            )


def _plan(part: Part) -> dict[str, int]:
    return {name: part.start["plan"][name] for name in ("global_size", "ranks", "accumulation")}


def _training_samples(run: Records) -> tuple[int, bool]:
    """Return the size of the training set, and whether a checkpoint tells it.

    Otherwise an epoch's last step, if there is one, has what the others have left over.
    """
    for meta in run.metas.values():
        if told := whole(meta.get("samples")):
            return told, True
    start = run.parts[0].start
    size, per_epoch = start["plan"]["global_size"], start["steps_per_epoch"]
    lasts = [row["samples"] for row in run.rows("step") if row["step"] % per_epoch == 0]
    last = lasts[0] if lasts and 0 < lasts[0] <= size else size
    return (per_epoch - 1) * size + last, False


def _total(config: RunConfig, per_epoch: int) -> int:
    all_of_them = per_epoch * config.epochs
    return all_of_them if config.max_steps is None else min(all_of_them, config.max_steps)


def _planned(run: Records, config: RunConfig, per_epoch: int) -> Iterator[str]:
    """Yield where config, manifest, checkpoints and the starts do not agree on what was to be done."""
    for part in run.parts:
        start, plan, at = part.start, _plan(part), part.start.at
        if plan["global_size"] != config.batch.size:
            yield f"{CONFIG} has batch {config.batch.size}, and the run was started with {plan['global_size']} ({at})"
        if start["steps_per_epoch"] != per_epoch:
            yield f"an epoch has {per_epoch:,} steps, and the run was started with {start['steps_per_epoch']:,} ({at})"
    yield from _cuts(run)
    last = run.parts[-1].start
    asked = {"epochs": config.epochs, "total_steps": _total(config, per_epoch)}
    for name, value in asked.items():
        if last[name] != value:
            words = f"{value:,} {name.replace('_', ' ')}"
            yield f"{CONFIG} asks for {words}, and the run was last started for {last[name]:,} ({last.at})"
    if run.manifest is not None:
        begun = {"batch_plan": "plan", "first_step": "first_step", "chosen": "chosen"}
        for name, decided in ((name, last.fields.get(ours)) for name, ours in begun.items()):
            if run.manifest.get(name) != decided:
                yield f"{MANIFEST} has {name} {run.manifest.get(name)}, and the run was last started with {decided}"


def _cuts(run: Records) -> Iterator[str]:
    """Yield where a batch was not cut as before or as recorded: with batch statistics that makes another model."""
    for before, part in itertools.pairwise(run.parts):
        now, then = _plan(part)["accumulation"], _plan(before)["accumulation"]
        chosen = part.start.fields.get("chosen")
        if now != then and not (isinstance(chosen, dict) and chosen.get("batchnorm") == "none"):
            yield (
                f"from step {part.first_step + 1} on, batch statistics are those of one of "
                f"{counted(now, 'global micro-batch')}, and were of one of {then}: another model ({part.start.at})"
            )
    for name, meta in run.metas.items():
        step = whole(meta.get("step")) or 0
        cuts = {_plan(part)["accumulation"] for part in run.parts if part.first_step <= step <= part.last_step}
        if cuts and meta.get("accumulation") not in cuts:
            told = " or ".join(counted(cut, "micro-batch") for cut in sorted(cuts))
            yield f"step {step} was made with {told}, and the checkpoint {name} has {meta.get('accumulation')}"


def _sequence(run: Records) -> Iterator[str]:
    """Yield where a step does not follow the one before it."""
    before = run.first_step
    for row in run.rows("start", "step"):
        if row.event == "start":
            if row["first_step"] != before:
                yield f"the run goes on after step {row['first_step']}, and the record ends at {before} ({row.at})"
            before = row["first_step"]
        else:
            if row["step"] != before + 1:
                yield f"step {row['step']} follows step {before} ({row.at})"
            before = row["step"]


def _shares(run: Records, plan: BatchPlan, samples: int, per_epoch: int) -> Iterator[str]:
    """Yield the steps that have not the epoch and the number of samples that the batch plan gives them."""
    for row in run.rows("step"):
        epoch, within = divmod(row["step"] - 1, per_epoch)
        start, stop = plan.batch(within, samples)
        if (row["epoch"], row["samples"]) != (epoch, stop - start):
            yield (
                f"step {row['step']} has {counted(row['samples'], 'sample')} of epoch {row['epoch']}, and the batch "
                f"plan gives it {stop - start:,} of epoch {epoch} ({row.at})"
            )

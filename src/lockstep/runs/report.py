"""Startup report: batch plan, resolved `auto` options, and resumed checkpoint."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..config.schema import SPANNING_SCHEDULES
from ..data.share import SharedLoader
from ..errors import counted
from ..files import shown
from .meter import COVERS

if TYPE_CHECKING:
    from .loop import Loop


def started(loop: Loop, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the `start` event. `facts` are added, their `chosen` and `lines` to the others."""
    config, prepared, source, position = loop.config, loop.prepared, loop.prepared.source, loop.position
    world = prepared.world
    chosen: dict[str, Any] = {
        **facts.get("chosen", {}),
        "launcher": config.parallel.launcher,
        "accelerator": world.device.type,
        "devices": prepared.replicas,
        "precision": prepared.precision.name,
        "collectives": "none" if world.size == 1 else "gloo" if world.memory is None else "shared-memory",
        "batchnorm": prepared.batchnorm,
        "accumulate": 1 if source is None else source.plan.accumulation,
        "ledger": config.proof.ledger,
    }
    if not prepared.is_recipe:
        optimizers = [f"{type(each).__name__} lr {each.param_groups[0]['lr']:g}" for each in prepared.optimizers]
        chosen |= {"loop": "own", "optimizer": ", ".join(optimizers)}
        if isinstance(source, SharedLoader):
            chosen |= {"order": source.order, "drop-last": source.drop_last}
    lines = [counted(world.size, "rank") if source is None else str(source.plan), _in_words(chosen)]
    if world.shared_memory_reason and world.memory is None:
        lines.append(f"gloo, since {world.shared_memory_reason}")
    if source is None and world.size > 1:
        lines.append("no loader was prepared: each rank makes its own batches, which together are the global batch")
    if prepared.batchnorm == "local" and prepared.replicas > 1:
        lines.append("batch statistics of each replica: the model depends on how many there are")
    if isinstance(source, SharedLoader) and source.workers < source.loader.num_workers:
        lines.append(f"one worker a rank reads the stream, not {source.loader.num_workers}: each would read all of it")
    lines += prepared.cautions
    if isinstance(source, SharedLoader):
        lines += source.cautions
    if prepared.kept:
        kept = "; ".join(sorted(prepared.kept))
        lines.append(f"the optimizer goes on as it was saved: {kept}; start a new run to change it")
    return facts | {
        "plan": {} if source is None else dataclasses.asdict(source.plan),
        "output": shown(loop.folder),
        "first_step": position.step,
        "epoch_s": list(position.epoch_s),
        "total_steps": loop.total_steps,
        "steps_per_epoch": loop.steps or 0,
        "epochs": loop.epochs or 0,
        "covers": COVERS,
        "lines": [*lines, *facts.get("lines", ()), *_continued(loop)],
        "chosen": chosen,
    }


def _in_words(chosen: dict[str, Any]) -> str:
    """Return the choices in words. For example: `strategy ddp, launcher spawn, 2 × cpu, precision fp32, …`."""
    first = [f"{key} {chosen[key]}" for key in ("strategy", "launcher") if key in chosen]
    rest = {key: value for key, value in chosen.items() if value not in (False, "", "none")}
    for key in ("strategy", "launcher", "devices", "accelerator"):
        rest.pop(key, None)
    told = [key if value is True else f"{key} {value}" for key, value in rest.items()]
    return ", ".join([*first, f"{chosen['devices']} × {chosen['accelerator']}", *told])


def _continued(loop: Loop) -> list[str]:
    """Return lines on the resumed checkpoint and changed settings."""
    config, step, state, total = loop.config, loop.position.step, loop.state, loop.total_steps
    if state is None or state.origin is None:
        is_missed = config.checkpoint.resume and loop.prepared.is_recipe
        return [f"nothing to resume in {shown(loop.folder)}: a new run"] if is_missed else []
    path = shown(state.origin)
    if stalled := loop.position.stalled(config.patience):
        return [f"nothing is left to train: {path} is of step {step:,}, and {stalled}"]
    if 0 < total <= step:
        return [f"nothing is left to train: {path} is complete at step {step:,} of {total:,}"]
    lines = [f"continuing at step {step:,}{f' of {total:,}' if total else ''}, from {path}"]
    was, is_now = state.meta["precision"], loop.prepared.precision.name
    if was != is_now:
        lines.append(f"computed in {is_now} from here on, and was in {was}: another model in its last digits")
    schedule, before = config.optim.schedule, state.meta["planned_epochs"]
    if before not in (None, config.epochs) and schedule in SPANNING_SCHEDULES:
        lines.append(
            f"--schedule {schedule} spans {counted(config.epochs, 'epoch')} from here on, and was begun for {before}: "
            "the steps behind had other learning rates"
        )
    source, before = loop.prepared.source, state.meta["accumulation"]
    now = 1 if source is None else source.plan.accumulation
    if before != now:
        line = f"a batch is cut into {counted(now, 'global micro-batch')} from here on, and was into {before}"
        if loop.prepared.batchnorm != "none":
            line += ": batch statistics are those of a micro-batch, so that this is another model than before"
        lines.append(line)
    return lines

"""Startup report: batch plan, resolved `auto` options, and resumed checkpoint."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from .. import hardware
from ..config.schema import SPANNING_SCHEDULES
from ..data.share import SharedLoader
from ..errors import counted
from ..files import shown
from .meter import COVERS

if TYPE_CHECKING:
    from .loop import Loop


def describe_start(loop: Loop) -> dict[str, Any]:
    """Return the fields of the `start` event, including the parts' facts, whose `chosen` and `lines` are merged."""
    facts = loop.prepared.facts
    config, prepared, source, position = loop.config, loop.prepared, loop.prepared.source, loop.position
    world = prepared.world
    chosen: dict[str, Any] = {
        **facts.get("chosen", {}),
        "launcher": config.parallel.launcher,
        "accelerator": world.device.type,
        "devices": prepared.replicas,
        "precision": prepared.precision.name,
        "exchange": "" if world.size == 1 or config.parallel.exchange == "full" else config.parallel.exchange,
        **prepared.exchange.settings,
        "collectives": "none" if world.size == 1 else "gloo" if world.memory is None else "shared-memory",
        "batchnorm": prepared.batchnorm,
        "recomputed": counted(count, "module") if (count := prepared.recomputation.count) else "",
        "accumulate": 1 if source is None else source.plan.accumulation,
        "ledger": config.proof.ledger,
        "seed": str(config.seed),
        "threads": torch.get_num_threads(),
        "compiler": "imported at its first use",  # torch's, by `_torch.spare_compiler`
        "malloc": hardware.malloc,
    }
    if not prepared.is_recipe:
        optimizers = [
            f"{type(optimizer).__name__} lr {optimizer.param_groups[0]['lr']:g}" for optimizer in prepared.optimizers
        ]
        chosen |= {"loop": "own", "optimizer": ", ".join(optimizers)}
        if prepared.exchange.divides_state:
            chosen |= {"strategy": config.parallel.strategy}
        if isinstance(source, SharedLoader):
            chosen |= {"order": source.order, "drop-last": source.drop_last}
    lines = [counted(world.size, "rank") if source is None else str(source.plan), _list_choices(chosen)]
    if world.shared_memory_reason and world.memory is None:
        lines.append(f"gloo, since {world.shared_memory_reason}")
    if config.record.remote:
        lines.append(f"the run works in {shown(loop.folder)}, which is copied to {config.record.remote}")
    if source is None and world.size > 1:
        lines.append(
            "no loader is prepared so far: without one, each rank makes its own batches, which together are the "
            "global batch"
        )
    if prepared.batchnorm == "local" and prepared.replicas > 1:
        lines.append("batch statistics per replica: the model depends on the number of replicas")
    if isinstance(source, SharedLoader) and source.workers < source.loader.num_workers:
        workers = source.loader.num_workers
        lines.append(f"one worker per rank reads the stream, not {workers}: each worker would read all of it")
    lines += prepared.cautions
    if isinstance(source, SharedLoader):
        lines += source.cautions
    if prepared.restored_settings:
        settings = "; ".join(sorted(prepared.restored_settings))
        lines.append(f"the optimizer continues as it was saved: {settings}; start a new run to change it")
    return facts | {
        "plan": {} if source is None else dataclasses.asdict(source.plan),
        "output": shown(loop.folder),
        "first_step": position.step,
        "epoch_s": list(position.epoch_s),
        "total_steps": loop.total_steps,
        "steps_per_epoch": loop.steps or 0,
        "epochs": loop.epochs or 0,
        "covers": COVERS,
        "lines": [*lines, *facts.get("lines", ()), *_describe_resume(loop)],
        "chosen": chosen,
    }


def _list_choices(chosen: dict[str, Any]) -> str:
    """Return the choices as text, such as `strategy ddp, launcher spawn, 2 × cpu, precision fp32, …`."""
    leading = [f"{key} {chosen[key]}" for key in ("strategy", "launcher") if key in chosen]
    choices = {key: value for key, value in chosen.items() if value not in (False, "", "none")}
    for key in ("strategy", "launcher", "devices", "accelerator"):
        choices.pop(key, None)
    remaining = [key if value is True else f"{key} {value}" for key, value in choices.items()]
    return ", ".join([*leading, f"{chosen['devices']} × {chosen['accelerator']}", *remaining])


def _describe_resume(loop: Loop) -> list[str]:
    """Return lines on the resumed checkpoint and changed settings."""
    config, step, state, total = loop.config, loop.position.step, loop.state, loop.total_steps
    if state is None or state.origin is None:
        is_missed = config.checkpoint.resume and loop.prepared.is_recipe
        return [f"nothing to resume in {shown(loop.folder)}: a new run"] if is_missed else []
    path = shown(state.origin)
    if stalled := loop.position.stalled(config.patience):
        return [f"nothing is left to train: {path} is at step {step:,}, and {stalled}"]
    if 0 < total <= step and not loop.goes_on(loop.epochs or 0):
        return [f"nothing is left to train: {path} is complete at step {step:,} of {total:,}"]
    cut = ["the code at the end of the epoch that max_steps has cut short is repeated"] if loop.position.is_cut else []
    lines = [*cut, f"continuing at step {step:,}{f' of {total:,}' if total > step else ''}, from {path}"]
    saved_precision, precision = state.meta["precision"], loop.prepared.precision.name
    if saved_precision != precision:
        lines.append(f"precision {precision} from here on, {saved_precision} before: the results differ by rounding")
    schedule, saved_epochs = config.optim.schedule, state.meta["planned_epochs"]
    if saved_epochs not in (None, config.epochs) and schedule in SPANNING_SCHEDULES:
        lines.append(
            f"--schedule {schedule} spans {counted(config.epochs, 'epoch')} from here on, {saved_epochs} before: "
            "earlier steps had other learning rates"
        )
    source, saved_accumulation = loop.prepared.source, state.meta["accumulation"]
    accumulation = 1 if source is None else source.plan.accumulation
    if saved_accumulation != accumulation:
        micro_batches = counted(accumulation, "global micro-batch")
        line = f"a batch has {micro_batches} from here on, {saved_accumulation} before"
        if loop.prepared.batchnorm != "none":
            line += ": batch statistics are per micro-batch, so that the model changes"
        lines.append(line)
    return lines

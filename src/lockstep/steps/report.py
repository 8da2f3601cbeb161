"""The startup report: the batch plan, what each `auto` came to, and what the run goes on from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import hardware
from ..config import registry
from ..config.schema import SPANNING_SCHEDULES, RunConfig
from ..data.share import SharedLoader
from ..errors import counted
from ..files import shown
from ..nn.sync_batchnorm import is_folded
from ..training import precision
from ..world.world import World
from .prepared import Prepared
from .progress import Progress

if TYPE_CHECKING:
    from .job import Job


def told(
    config: RunConfig,
    world: World,
    prepared: Prepared,
    arithmetic: precision.Precision,
    progress: Progress,
    total_steps: int,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Return what the record says of a run when it begins: `facts` are added, their `lines` after the batch plan."""
    source, parallel = prepared.source, config.parallel
    chosen: dict[str, Any] = {
        "launcher": parallel.launcher,
        "accelerator": world.device.type,
        "devices": prepared.replicas,
        "precision": arithmetic.name,
        "collectives": "none" if world.size == 1 else "gloo" if world.memory is None else "shared-memory",
        "batchnorm": prepared.batchnorm,
        "accumulate": 1 if source is None else source.plan.accumulation,
        "ledger": config.proof.ledger,
    }
    own: list[str] = []
    if prepared.strategy is None:
        chosen |= {"loop": "own", "optimizer": _optimizers(prepared)}
        if isinstance(source, SharedLoader):
            chosen |= {"order": source.order, "drop-last": source.drop_last}
        if prepared.batchnorm == "local" and world.size > 1:
            own.append("batch statistics are each rank's own (batchnorm local): the model depends on their number")
        if config.record.output is None:
            own.append("nothing is recorded or saved: lockstep.session(output=…), or lockstep run, has a folder for it")
        if prepared.kept:
            kept = "; ".join(prepared.kept)
            own.append(f"the optimizer goes on as it was saved: {kept}; start a new run to change it")
    plan = counted(world.size, "rank") if source is None else str(source.plan)
    lines = [plan, *facts.get("lines", ()), *own, *_continued(config, world, prepared, progress, total_steps)]
    return facts | {"lines": lines, "chosen": chosen | facts.get("chosen", {})}


def _optimizers(prepared: Prepared) -> str:
    return ", ".join(f"{type(each).__name__} lr {each.param_groups[0]['lr']:g}" for each in prepared.optimizers)


def _continued(config: RunConfig, world: World, prepared: Prepared, progress: Progress, total_steps: int) -> list[str]:
    """Return lines that say whether the run goes on from a checkpoint, if that was asked for, and as what."""
    path, step = progress.origin, progress.step
    if path is None:
        is_missed = config.checkpoint.resume and prepared.strategy is not None
        return [f"nothing to resume in {shown(config.record.output)}: a new run"] if is_missed else []
    if stalled := progress.stalled(config.patience):
        return [f"nothing is left to train: {shown(path)} is of step {step:,}, and {stalled}"]
    if 0 < total_steps <= step:
        return [f"nothing is left to train: {shown(path)} is complete at step {step:,} of {total_steps:,}"]
    of = f" of {total_steps:,}" if total_steps else ""
    lines = [progress.caution] if progress.caution else []
    lines.append(f"continuing at step {step:,}{of}, from {shown(path)}")
    schedule, before = config.optim.schedule, progress.planned_epochs
    if before not in (None, config.epochs) and schedule in SPANNING_SCHEDULES:
        lines.append(
            f"--schedule {schedule} spans {counted(config.epochs, 'epoch')} from here on, and was begun for {before}: "
            "the steps behind had other learning rates"
        )
    now, cut = 1 if prepared.source is None else prepared.source.plan.accumulation, progress.accumulation
    if cut not in (None, now):
        line = f"a batch is cut into {counted(now, 'global micro-batch')} from here on, and was into {cut}"
        if prepared.batchnorm != "none":
            line += (
                f", for --micro-batch {config.batch.micro_batch} on {counted(world.size, 'rank')}: batch statistics "
                "are those of a micro-batch, so that this is another model than before"
            )
        lines.append(line)
    return lines


def chosen(job: Job) -> dict[str, Any]:
    """Return what each `auto` came to of a job alone, by option."""
    return {
        "strategy": job.strategy.name,
        "channels-last": job.precision.channels_last,
        "batchnorm-kernels": "folded" if is_folded(job.model) else "torch's",
    }


def lines(job: Job) -> list[str]:
    """Return what was chosen for a job, in words."""
    statistics = {
        "sync": "batch statistics of the global micro-batch",
        "local": "batch statistics of each replica: the model depends on how many there are",
        "none": "no batch statistics",
    }[job.batchnorm]
    world, strategy, data, held = job.world, job.strategy, job.data, len(job.data.judged)
    images = len(data.train.shape) == 3  # what has no four dimensions has no such order
    order = f", {'channels_last' if job.precision.channels_last else 'contiguous'}" if images else ""
    found = [
        f"strategy {strategy.name}, launcher {job.config.parallel.launcher}, {job.replicas} × {world.device.type}, "
        f"precision {job.precision.name}{order}",
        *_gain(job),
        statistics,
    ]
    if data.validation is None:
        found.append(
            f"best is chosen on the test set ({counted(held, 'sample')}): there is no validation set, and --holdout "
            "makes one"
        )
    else:
        found.append(
            f"best is chosen on the validation set ({counted(held, 'sample')}; training {job.samples:,}, test "
            f"{len(data.test):,}, evaluated at the end)"
        )
    if world.size > 1 and world.device.type == "cpu":
        why = f"gloo, since {world.apart}" if world.apart else "gloo"
        found.append(f"collectives: {why if world.memory is None else 'shared memory of the host'}")
    if same := registry.plainer(strategy.name, ranks=world.size, devices=len(strategy.devices)):
        alone = "one rank" if world.size == 1 else "one device in each rank"
        local = " with --batchnorm local" if job.batchnorm == "local" and world.size > 1 else ""
        found.append(f"{alone}: here {strategy.name} computes what {same} does{local}")
    if job.samples < job.plan.global_size:
        found.append(
            f"the training set is smaller than the global batch: each step has all its {job.samples:,} samples"
        )
    if job.config.optim.name == "muon":
        digits = f"worlds agree to bfloat16's digits, not {job.precision.name}'s"
        found.append(f"Muon orthogonalises in bfloat16, so that {digits}")
    sources = (data.train, data.test) if data.validation is None else (data.train, data.validation, data.test)
    if files := list(dict.fromkeys(path for source in sources for path in source.skipped)):
        one = len(files) == 1
        what = "1 image that cannot be decoded is" if one else f"{len(files)} images that cannot be decoded are"
        found.append(f"{what} left out: {', '.join(files[:3])}")
    return found


def _gain(job: Job) -> list[str]:
    """Return a line where fp32, which is the default, leaves the hardware's bfloat16 units idle."""
    device = job.world.device
    if job.precision.name != "fp32" or precision.resolve("auto", device) != "bf16":
        return []
    what = "this GPU" if device.type == "cuda" else "this processor"
    units = "" if device.type == "cuda" else f" ({hardware.bf16_units()})"
    return [
        f"{what} has bfloat16 units{units}, which fp32 leaves idle: --precision bf16 may be faster, and is another "
        "model in its last digits"
    ]

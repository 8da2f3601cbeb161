"""What a run says of itself when it starts: the batch plan, and what each `auto` came to."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import hardware, kinds, precision, start
from .config import SPANNING_SCHEDULES
from .errors import counted
from .files import shown
from .job import Job
from .nn.sync_batchnorm import is_folded
from .progress import Progress


def told(job: Job, progress: Progress) -> dict[str, Any]:
    """Return what the record says of the job when its run begins, or the next part of it from `progress` on."""
    return {
        "lines": [str(job.plan), *_said(job), *_skipped(job), *_begun(job), *_continued(job, progress)],
        "chosen": _chosen(job),
        "eval_every": job.config.eval_every,
        "best_on": job.data.best_on,
        "shape": list(job.data.train.shape),
        "classes": job.config.model.classes or job.data.train.classes,
        **({} if job.taken is None else {"init": dataclasses.asdict(job.taken)}),
    }


def _chosen(job: Job) -> dict[str, Any]:
    """Return what each `auto` came to, by option."""
    parallel = job.config.parallel
    return {
        "strategy": job.strategy.name,
        "launcher": parallel.launcher,
        "accelerator": job.world.device.type,
        "devices": job.replicas,
        "precision": job.precision.name,
        "channels-last": job.precision.channels_last,
        "collectives": "none" if job.world.size == 1 else "gloo" if job.world.memory is None else "shared-memory",
        "batchnorm": job.batchnorm,
        "batchnorm-kernels": "folded" if is_folded(job.model) else "torch's",
        "accumulate": job.plan.accumulation,
        "ledger": job.config.proof.ledger,
    }


def _skipped(job: Job) -> list[str]:
    """Return a line for images that were left out, on request, because they cannot be decoded."""
    data = job.data
    sources = (data.train, data.test) if data.validation is None else (data.train, data.validation, data.test)
    files = list(dict.fromkeys(path for source in sources for path in source.skipped))
    what = "1 image that cannot be decoded is" if len(files) == 1 else f"{len(files)} images that cannot be decoded are"
    return [f"{what} left out: {', '.join(files[:3])}"] if files else []


def _begun(job: Job) -> list[str]:
    """Return lines for weights from elsewhere, and for parameters that are frozen or have a rate of their own."""
    return [*([] if job.taken is None else job.taken.lines()), *start.reached(job.model, job.config)]


def _continued(job: Job, progress: Progress) -> list[str]:
    """Return lines that say whether the run goes on from a checkpoint, if that was asked for, and as what."""
    path, first_step = progress.origin, progress.step
    if path is not None and (stalled := progress.stalled(job.config.patience)):
        return [f"nothing is left to train: {shown(path)} is of step {first_step:,}, and {stalled}"]
    if path is not None and first_step >= job.total_steps:
        return [f"nothing is left to train: {shown(path)} is complete at step {first_step:,} of {job.total_steps:,}"]
    if path is not None:
        continuing = f"continuing at step {first_step:,} of {job.total_steps:,}, from {shown(path)}"
        caution = [progress.caution] if progress.caution else []
        return [*caution, continuing, *_rescheduled(job, progress), *_recut(job, progress)]
    if job.config.checkpoint.resume:
        return [f"nothing to resume in {shown(job.config.record.output)}: a new run"]
    return []


def _rescheduled(job: Job, progress: Progress) -> list[str]:
    """Return a line where more or fewer epochs than before make another schedule."""
    schedule, epochs, before = job.config.optim.schedule, job.config.epochs, progress.planned_epochs
    if before == epochs or schedule not in SPANNING_SCHEDULES:
        return []
    return [
        f"--schedule {schedule} spans {counted(epochs, 'epoch')} from here on, and was begun for {before}: the steps "
        "behind had other learning rates"
    ]


def _recut(job: Job, progress: Progress) -> list[str]:
    """Return a line where a batch is cut into other micro-batches than before: with batch statistics, another model."""
    now, before = job.plan.accumulation, progress.accumulation
    if before is None or now == before:
        return []
    cut = f"a batch is cut into {counted(now, 'global micro-batch')} from here on, and was into {before}"
    if job.batchnorm == "none":
        return [cut]
    return [
        f"{cut}, for --micro-batch {job.config.batch.micro_batch} on {counted(job.world.size, 'rank')}: batch "
        "statistics are those of a micro-batch, so that this is another model than before"
    ]


def _said(job: Job) -> list[str]:
    """Return what was chosen in words, for the lines that are printed once."""
    statistics = {
        "sync": "batch statistics of the global micro-batch",
        "local": "batch statistics of each replica: the model depends on how many there are",
        "none": "no batch statistics",
    }[job.batchnorm]
    parallel, device = job.config.parallel, job.world.device.type
    images = len(job.data.train.shape) == 3  # what has no four dimensions has no such order
    order = f", {'channels_last' if job.precision.channels_last else 'contiguous'}" if images else ""
    return [
        f"strategy {job.strategy.name}, launcher {parallel.launcher}, {job.replicas} × {device}, "
        f"precision {job.precision.name}{order}",
        *_gain(job),
        statistics,
        _judged(job),
        *_exchange(job),
        *_plain(job),
        *_short(job),
        *_inexact(job),
    ]


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


def _judged(job: Job) -> str:
    """Return on what the best weights are chosen."""
    held = counted(len(job.data.judged), "sample")
    if job.data.validation is None:
        return f"best is chosen on the test set ({held}): there is no validation set, and --holdout makes one"
    test, train = len(job.data.test), job.samples
    return f"best is chosen on the validation set ({held}; training {train:,}, test {test:,}, evaluated at the end)"


def _exchange(job: Job) -> list[str]:
    """Return a line where ranks exchange CPU tensors: by what, and why not through memory."""
    world = job.world
    if world.size == 1 or world.device.type != "cpu":
        return []
    if world.memory is not None:
        return ["collectives: shared memory of the host"]
    return [f"collectives: gloo, since {world.apart}" if world.apart else "collectives: gloo"]


def _plain(job: Job) -> list[str]:
    """Return a line where a strategy of two levels has but one here."""
    name, ranks, devices = job.strategy.name, job.world.size, len(job.strategy.devices)
    same = kinds.plainer(name, ranks=ranks, devices=devices)
    if not same:
        return []
    found = "one rank" if ranks == 1 else "one device in each rank"
    local = " with --batchnorm local" if job.batchnorm == "local" and ranks > 1 else ""
    return [f"{found}: here {name} computes what {same} does{local}"]


def _short(job: Job) -> list[str]:
    """Return a line where the global batch is more than there is."""
    if job.samples >= job.plan.global_size:
        return []
    return [f"the training set is smaller than the global batch: each step has all its {job.samples:,} samples"]


def _inexact(job: Job) -> list[str]:
    """Return a line where a part of the arithmetic is coarser than the precision says."""
    if job.config.optim.name != "muon":
        return []
    return [f"Muon orthogonalises in bfloat16, so that worlds agree to bfloat16's digits, not {job.precision.name}'s"]

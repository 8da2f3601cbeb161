"""The parts and the data of `lockstep train`'s job, as a session takes them: what is saved, proved and said of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import resume
from .announce import told
from .checkpoint import find
from .errors import RequestError
from .files import own_folder, shown, understanding, write_json
from .job import Job
from .loop import Loop
from .meter import NonFiniteLossError
from .nn import sync_batchnorm
from .progress import Progress
from .state import State, load_model, model_tensors
from .verify import finite


class Trained:
    """A job's parts (see `Parts`), and its training set as a session reads it."""

    takes_sums = is_scored = True

    def __init__(self, job: Job, result: Callable[[Loop], dict[str, Any]]) -> None:
        """`result` returns what the run has come to (*collective*)."""
        self.job = job
        self.result = result
        self.plan, self.samples, self.micros = job.plan, job.samples, job.micros
        self.stands_in = False  # a share without samples is computed as one of size 0

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices that this process drives."""
        return self.job.strategy.devices

    def steps(self) -> int:
        """Return the optimizer steps of an epoch."""
        return self.job.steps_per_epoch

    def close(self) -> None:
        """Do nothing: whoever has made the job closes its data."""

    def begin(self, source: Any) -> None:
        """A job is ready."""

    def replicated(self) -> dict[str, Tensor]:
        """Return, by name, what has to be the same bits on every rank at the end of a step."""
        return self.job.replicated()

    def local_buffers(self) -> dict[str, Tensor]:
        """Return, by name, the model's buffers that each rank keeps for itself."""
        return self.job.local_buffers()

    def copies(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the weights as further devices of this process have them."""
        return self.job.strategy.copies(self.job.model)

    def state(self, progress: Progress) -> State:
        """Return all that a checkpoint holds of the job (*collective*).

        Raises `RunError`, on every rank, where weights or statistics are not finite on any of them.
        """
        job = self.job
        self._check_weights(progress.step)
        state = job.strategy.full_state(job.model, job.optimizer.each)
        average = {} if job.average is None else model_tensors(job.average.module, under="ema")
        facts = {
            "batchnorm": job.batchnorm,
            "replicas": job.replicas,
            "accumulation": job.plan.accumulation,
            "batch": job.plan.global_size,
            "samples": job.samples,
        }
        return State(dict(state.tensors) | average, state.meta | facts)

    def load(self, state: State) -> None:
        """Put a loaded state into the job. Raises `RequestError` where it is of another run, or of no step of this."""
        job, meta = self.job, state.meta
        resume.check_samples(meta, job.samples, job.config)
        resume.check_batchnorm(meta, job.batchnorm, job.replicas)
        if meta["step"] > job.total_steps:
            raise RequestError(
                f"The checkpoint is of step {meta['step']}, and this run would end at step {job.total_steps}; give "
                "more --epochs or --max-steps, or start a new run in another --output."
            )
        if not 0 <= meta["step"] - meta["epochs"] * job.steps_per_epoch <= job.steps_per_epoch:
            raise RequestError(
                f"The checkpoint is of step {meta['step']}, which cannot come after {meta['epochs']} epochs of "
                f"{job.steps_per_epoch} steps; give another one."
            )
        job.strategy.load_state(job.model, job.optimizer.each, state)
        if job.average is not None:
            load_model(job.average.module, state.part("ema"))

    def told(self, progress: Progress) -> dict[str, Any]:
        """Return what the record says of the job when its run begins."""
        return told(self.job, progress)

    def remedy(self) -> str:
        """Return what to do about numbers that are not finite, and where the run can be taken up again."""
        optim, precision = self.job.config.optim, self.job.precision
        ways = ["lower --lr"]
        ways += ["add --clip"] * (optim.clip is None) + ["add --warmup"] * (optim.warmup == 0)
        ways += ["use --precision fp32"] * (precision.name in ("bf16", "fp16", "tf32"))
        folder = self.job.config.record.output
        is_kept = folder is not None and find(folder) is not None
        kept = f"; the last checkpoint in {shown(folder)} is from before" if is_kept else ""
        text = f"{', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else ways[0]
        return f"{text[0].upper()}{text[1:]}{kept}."

    def note_bad(self, bad: NonFiniteLossError) -> str:
        """Note which samples this rank had where the loss was not finite, and return a clause that says where."""
        job = self.job
        folder, rank = job.config.record.output, job.world.rank
        if folder is None:
            return ""
        if rank in bad.ranks:
            numbers = getattr(job.data.train, "indices", None)  # of a part, those of the whole set
            indices = [(part if numbers is None else numbers[part]).tolist() for part in job.indices(bad.step - 1)]
            path = folder / "failures" / f"nonfinite_step_{bad.step}_rank_{rank}.json"
            with contextlib.suppress(OSError):  # a full disk must not hide why the run failed
                own_folder(path.parent)
                write_json(path, {"step": bad.step, "rank": rank, "indices": indices})
        return f"; the batch's sample indices are in {shown(folder / 'failures')}"

    def _check_weights(self, step: int) -> None:
        """Raise `RunError`, on every rank, where what is to be saved is not finite on any of them (*collective*).

        Of the buffers, BatchNorm's statistics alone are judged: others, such as a mask, may be infinite by intent.
        """
        job = self.job
        judged: dict[str, Tensor] = {f"model/{name}": held for name, held in job.model.named_parameters()}
        judged |= {f"model/{name}": held for name, held in sync_batchnorm.statistics(job.model).items()}
        if job.average is not None:
            judged |= {f"ema/{name}": held for name, held in job.average.module.named_parameters()}
        if names := finite.found(job.world, judged):
            raise finite.error(step, names, self.remedy())


def restore_model(job: Job, loaded: State) -> None:
    """Put a loaded state's weights into the job's model, and into the averaged one, for evaluation alone."""
    with understanding(loaded.origin or Path("the checkpoint")):
        job.strategy.load_state(job.model, (), loaded)
        if job.average is not None:
            load_model(job.average.module, loaded.part("ema"))

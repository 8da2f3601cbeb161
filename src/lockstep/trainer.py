"""Training loop of `lockstep train`. Read this file first.

The loop uses a `Session` as a user's script does. A `Task` computes the loss of a batch and scores the weights:
`jobs.classifier.Classifier`, or `jobs.own_step.OwnStep` for a user's step function. The session divides the global
batch among the ranks, sums the gradients, counts, records, saves and checks. Every rank calls *collective* functions.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from . import _torch
from .batching import BatchPlan
from .checkpoint import resume
from .checkpoint.state import State
from .config import registry
from .config.schema import RunConfig
from .errors import RequestError
from .jobs.classifier import Classifier
from .jobs.job import assemble
from .jobs.own_step import OwnStep
from .record.base import Recorder
from .record.console import Terminal
from .record.result import RunResult
from .runs.opened import OpenRun, open_run
from .sessions.hooks import NO_HOOKS, Hooks
from .sessions.session import Session
from .training.memory import OutOfMemoryError
from .training.optim import gradient_norm, set_lr
from .world.world import World


class Task(Protocol):
    """Training task: data, learning rate, loss and evaluation."""

    batches: Iterable[Any]
    """This rank's shares of an epoch, as `Session.prepare` returns them."""
    optimizers: list[Optimizer]
    lr: Callable[[int], float]
    """Learning rate at an optimizer step, counted from 0."""

    def backward(self, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Compute the loss of this rank's share, and its gradients; return (logits, labels) or None (*collective*)."""

    def evaluate(self) -> None:
        """Score the weights, and record the score (*collective*)."""


def run(config: RunConfig, world: World, hooks: Hooks = NO_HOOKS) -> RunResult:
    """Claim the run's folder, train, record a summary (*collective*). `hooks` follow the session."""
    plan: BatchPlan | None = None
    while True:
        with open_run(config, world) as run:
            try:
                return train(run.config, world, run.recorder, state=run.state, hooks=hooks, plan=plan)
            except OutOfMemoryError as error:
                if hooks is not NO_HOOKS:  # they are of one course of steps
                    raise
                run.recorder.record("warning", text=f"{error}; the run goes on from the last step with smaller ones.")
                plan = error.plan
        checkpoint = dataclasses.replace(config.checkpoint, resume="auto")
        config = dataclasses.replace(run.config, checkpoint=checkpoint)
        gc.collect()  # frees the weights before they are loaded


def train(
    config: RunConfig,
    world: World,
    recorder: Recorder,
    *,
    state: State | None = None,
    hooks: Hooks = NO_HOOKS,
    plan: BatchPlan | None = None,
) -> RunResult:
    """Train a classifier as `config` says; return its result (*collective*).

    If `config.record.output` is set, checkpoints go below it. The run continues from `state`, by default the checkpoint
    in `config.checkpoint.resume`. `plan` is that of `assemble`. Raises `RequestError` for impossible requests,
    `RunError` for a non-finite loss or unwritable checkpoints, `ProofError` for replicas that differ or samples not
    trained on exactly once, `OutOfMemoryError` under --micro-batch auto once the last step is saved, and `Stopped`
    after Ctrl-C or SIGTERM, once the run is saved.
    """
    loaded = state or resume.load(config, world)
    job = assemble(config, world, continued=loaded, plan=plan)
    try:
        run = nullcontext(OpenRun(config, recorder, loaded))
        with Session(config, world, run, prepared=job, hooks=hooks) as session:
            task = Classifier(job, session)
            try:
                learn(task, session, config)
            except Exception as error:
                if not (config.precision.compile and _torch.is_of_compiler(error)):
                    raise
                cause = str(error).partition("\n")[0]
                raise RequestError(f"--compile: torch cannot compile the model: {cause}; leave it out.") from error
        world.progress.enter("")  # not after an error, whose report names the phase
        return task.result
    finally:
        job.data.close()


def run_own_step(config: RunConfig, world: World, hooks: Hooks = NO_HOOKS) -> dict[str, float]:
    """Train by the step function in `config`; return the last scores (*collective*). Raises as `train` does."""
    if config.parallel.drives_all:
        raise RequestError(
            f"--strategy {config.parallel.strategy} drives several devices from one process, and a --step function "
            f"runs on one device; use {registry.per_device()}, or omit --strategy."
        )
    run = open_run(config, world, console=Terminal.detect())
    with Session(config, world, run, hooks=hooks) as session:
        task = OwnStep(config, session)
        learn(task, session, config)
    return task.scores


def learn(task: Task, session: Session, config: RunConfig) -> None:
    """Train for the config's epochs (*collective*)."""
    for epoch in session.epochs(config.epochs):
        for batch in task.batches:
            train_share(task, session, batch, config.optim.clip)
        if session.is_done or (epoch + 1) % config.eval_every == 0 or epoch + 1 == config.epochs:
            task.evaluate()


def train_share(task: Task, session: Session, batch: Any, clip: float | None) -> None:
    """Train on this rank's share of a micro-batch; step after a batch's last. The host never waits for the device."""
    session.world.progress.enter("forward")
    outputs = task.backward(batch)
    if not session.is_last:
        return
    set_lr(task.optimizers, task.lr(session.step))
    # A norm costs more than some tiny steps.
    norm = gradient_norm(task.optimizers, clip) if clip is not None or session.is_logging else None
    session.observe(norm, outputs)
    for optimizer in task.optimizers:
        optimizer.step()
        optimizer.zero_grad()

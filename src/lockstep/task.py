"""`lockstep train --step`: any task, by a training step of the user's own. A loop over a `Session`, as anybody's.

The step is given the model and a batch, as the data set's samples and the collate function make it, and returns the sum
of the loss over the batch. The mean over the global batch, and its gradient, are computed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from . import kinds, optim, own, start
from .config import RunConfig
from .data import users
from .data.source import hold_out
from .errors import RequestError
from .losses import SAME_SUM
from .models import table as models_table
from .models.modes import evaluating
from .options import IDENTITY
from .randomness import kept, seed_all
from .record.console import Terminal
from .scoring import best_of
from .sessions import Session
from .state import load_model
from .world import World

Step = Callable[[nn.Module, Any], Any]
"""step(model, batch) -> the sum of the loss over the batch (0-dim), or (that, the number of things it is a sum over)"""
_PROBED = 4
_WANTED = (
    'it returns the sum of the loss over the batch (reduction="sum"), one number, or that and the number of things it '
    "is a sum over"
)


def train(config: RunConfig, world: World) -> dict[str, float]:
    """Train by the step that `config` names, and return the last scores (*collective*).

    Raises `RequestError` for data that are none and a step whose loss is no sum, and what a `Session` raises.
    """
    if config.parallel.strategy != "auto" and kinds.kind(config.parallel.strategy).drives_all:
        raise RequestError(
            f"--strategy {config.parallel.strategy} drives several devices from one process, and a step of your own "
            f"runs on one; take {kinds.per_device()}, or leave it out."
        )
    step: Step = own.load("--step", config.optim.step)
    metric: Step | None = own.load("--metric", config.optim.metric) if config.optim.metric else None
    collate = own.load("--collate", config.data.collate) if config.data.collate else default_collate
    tests: list[Callable[[], dict[str, Any]]] = []
    with Session(
        config,
        world,
        has_folder=True,
        console=Terminal.detect(),
        keys=IDENTITY,
        tests=lambda: {name: value for test in tests for name, value in test().items()},
    ) as session:
        with kept():
            trained, validated, tested = _given(config)
            first = list(islice(_samples(trained), _PROBED))
        model = models_table.build_for(config.model.name, classes=config.model.classes or 1, shape=_shape(first))
        start.freeze(model, config.model.freeze)
        built = optim.build(model, config.optim)
        shuffle = not isinstance(trained, IterableDataset)
        loader = _loader(config, trained, collate, shuffle=shuffle)
        model, *_, batches = session.prepare(model, *built.each, loader)
        taken = start.load(config.model, model, world) if session.is_new else None
        shown = [] if config.record.quiet else [*(taken.lines() if taken else []), *start.reached(model, config)]
        for line in shown:
            session.print(line)
        parts = [session.moved(collate(part)) for part in (first, first[:1], first[1:]) if part]
        _probe(config.optim.step, step, model, parts)
        lr = _rate(config, batches)
        on = "test" if validated is None else "validation"
        judge = partial(_evaluate, session, step, metric, model, _loader(config, validated or tested, collate))
        if validated is not None:
            test = partial(_evaluate, session, step, metric, model, _loader(config, tested, collate))
            tests.append(lambda: _tests(session, config, model, test))
        scores: dict[str, float] = {}
        for epoch in session.epochs(config.epochs):
            for batch in batches:
                loss, weight = _asked(config.optim.step, step(model, batch))
                if weight is None:
                    session.backward(loss / max(1, session.samples))
                else:
                    session.backward(loss, weight=weight, reduction="sum")
                if config.optim.clip is not None:
                    nn.utils.clip_grad_norm_(built.parameters, config.optim.clip)
                built.set_lr(lr(session.step))
                for each in built.each:
                    each.step()
                built.zero_grad()
            if not session.loop.is_done and (epoch + 1) % config.eval_every and epoch + 1 < config.epochs:
                continue
            scores = _named(on, judge())
            session.log(**scores)
            session.score(scores.get(f"{on}_metric", -scores[f"{on}_loss"]))
            _show(session, config, f"epoch {epoch + 1}/{config.epochs}  step {session.step:,}", scores)
            why = session.loop.progress.stalled(config.patience)
            if why and epoch + 1 < config.epochs:
                _show(session, config, f"stopped: {why}", {})
    return scores


def _tests(
    session: Session, config: RunConfig, model: nn.Module, test: Callable[[], dict[str, float]]
) -> dict[str, Any]:
    """Return the scores on the test set of the last weights, and of the best where those are others (*collective*)."""
    found = _named("test", test())
    loop = session.loop
    there = dataclasses.replace(config, record=dataclasses.replace(config.record, output=loop.folder))
    if loop.progress.stale and (best := best_of(there, session.world, loop.progress)) is not None:
        load_model(model, best.part("model"))
        found |= _named("test_best", test())
    session.log(**found)
    _show(session, config, "at the end", found)
    return found


def _named(on: str, scores: dict[str, float]) -> dict[str, float]:
    return {f"{on}_{name}": value for name, value in scores.items()}


def _show(session: Session, config: RunConfig, what: str, scores: dict[str, float]) -> None:
    if not config.record.quiet:
        told = "".join(f"  {name.replace('_', ' ')} {value:.6g}" for name, value in scores.items())
        session.print(f"{what}{told}")


def _given(config: RunConfig) -> tuple[Any, Any, Any]:
    """Return training, validation (None for none) and test data: map-style data sets or streams, the user's own."""
    asked = f"--data {config.data.name}"
    if ":" not in config.data.name:
        raise RequestError(f"--step takes data of your own, as --data module:function, and found {asked}.")
    seed_all(config.seed)  # the function may draw: the same on every rank
    found = users.called(config.data)
    for split, dataset in found.items():
        if hasattr(dataset, "__len__") and not len(dataset):
            raise RequestError(f"{asked}: its {split} data have no sample; give at least one.")
    train, validation = found["train"], found.get("validation")
    if share := config.data.holdout:
        if validation is not None or isinstance(train, IterableDataset):
            why = (
                "is a stream, whose samples have no index" if validation is None else "has a validation set of its own"
            )
            raise RequestError(f"--holdout {share:g}: {asked} {why}; leave it out.")
        held = hold_out(len(train), config.seed, share)
        validation = Subset(train, np.flatnonzero(held).tolist())
        train = Subset(train, np.flatnonzero(~held).tolist())
    return train, validation, found["test"]


def _samples(dataset: Any) -> Iterator[Any]:
    return iter(dataset) if isinstance(dataset, IterableDataset) else (dataset[at] for at in range(len(dataset)))


def _shape(samples: list[Any]) -> tuple[int, ...]:
    """Return the shape of a sample's first tensor, which one of our models may ask for; () where there is none."""
    if not samples:
        raise RequestError("The training data have no sample; give at least one.")
    first = samples[0][0] if isinstance(samples[0], tuple | list) else samples[0]
    return tuple(first.shape) if isinstance(first, Tensor) else ()


def _loader(config: RunConfig, dataset: Any, collate: Any, *, shuffle: bool = False) -> DataLoader[Any]:
    workers = 0 if isinstance(dataset, TensorDataset) else config.data.workers or 0
    return DataLoader(
        *(dataset, config.batch.size),
        shuffle=shuffle,
        num_workers=workers,
        collate_fn=collate,
        drop_last=config.batch.drop_last,
    )


def _rate(config: RunConfig, batches: Any) -> Callable[[int], float]:
    peak = optim.peak_lr(config.optim, config.batch.size)
    try:
        steps = len(batches)
    except TypeError:
        if config.optim.schedule != "constant" or config.optim.warmup:
            raise RequestError(
                "The training data are a stream whose length nobody tells, and schedules count epochs; take "
                "--schedule constant, or give the data set a __len__."
            ) from None
        steps = 1
    factor = optim.schedule(config.optim, steps_per_epoch=steps, epochs=config.epochs)
    return lambda step: peak * factor(step)


def _asked(name: str, found: Any) -> tuple[Tensor, float | Tensor | None]:
    """Return the loss, and the number of things that it is a sum over where the step has told it."""
    loss, weight = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(loss, Tensor) or loss.dim():
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise RequestError(f"--step {name} returned {shown}; {_WANTED}.")
    return loss, weight


@torch.no_grad()
def _probe(name: str, step: Step, model: nn.Module, batches: list[Any]) -> None:
    """Raise `RequestError` where the loss of samples together is not the sum of their losses.

    `batches` are one of several samples, and the same samples in two. The model is in evaluation mode meanwhile.
    """
    with evaluating(model), kept():
        whole, *parts = [float(_asked(name, step(model, batch))[0]) for batch in batches]
    if len(parts) < 2:
        return
    total, largest = sum(parts), max(abs(whole), *map(abs, parts))
    if abs(whole - total) > SAME_SUM * largest:
        raise RequestError(
            f"--step {name} returned {whole:.6g} for {_PROBED} samples, and {parts[0]:.6g} and {parts[1]:.6g} for the "
            f"first of them and the rest, which sum to {total:.6g}: its loss divides by the samples that it sees, or "
            "one sample's depends on the others (such as on how far they are padded), and each rank sees but its own; "
            f"{_WANTED}."
        )


def _evaluate(
    session: Session, step: Step, metric: Step | None, model: nn.Module, loader: DataLoader[Any]
) -> dict[str, float]:
    """Return the mean loss over the loader's data, each sample once, and the mean of the metric (*collective*)."""
    sums = torch.zeros(4, dtype=torch.float64, device=session.device)
    for batch in session.evaluating(loader):
        if session.samples == 0:  # fewer samples than ranks: this one stands in
            continue
        for at, what in enumerate((step, metric)):
            if what is not None:
                found = what(model, batch)
                value, count = found if isinstance(found, tuple) else (found, None)
                sums[2 * at] += value
                sums[2 * at + 1] += session.samples if count is None else count
    loss, weight, value, count = session.sum(sums).tolist()
    if not weight:
        raise RequestError("The data to evaluate on have no sample; give at least one.")
    return {"loss": loss / weight} | ({"metric": value / count} if metric and count else {})

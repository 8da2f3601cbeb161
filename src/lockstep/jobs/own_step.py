"""`lockstep train --step`: any task, by the user's own training step.

The loop is that of `trainer`. The step takes the model and a batch, made by the data set and the collate function, and
returns the sum of the loss over the batch. The session computes the mean over the global batch, and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from .. import user_code
from ..config.schema import RunConfig
from ..data import users
from ..data.share import moved
from ..data.source import hold_out
from ..errors import RequestError
from ..models import table as models_table
from ..models.modes import evaluating
from ..sessions.session import Session
from ..training import losses, optim
from ..world.random_state import preserve_generators, seed_all
from . import initial

Step = Callable[[nn.Module, Any], Any]
"""step(model, batch) -> the sum of the loss over the batch (0-dim), or (that, the number of things it is a sum over)"""
_PROBED = 4
_WANTED = (
    'it returns the sum of the loss over the batch (reduction="sum"), one number, or that and the number of things it '
    "is a sum over"
)


class OwnStep:
    """Task of a user's own training step (see `trainer.Task`)."""

    average: optim.Average | None = None

    def __init__(self, config: RunConfig, session: Session) -> None:
        """Build data and model, and check the step (*collective*)."""
        self.scores: dict[str, float] = {}  # the last ones
        self._config, self._session, self._name = config, session, f"--step {config.optim.step}"
        self._step: Step = user_code.load("--step", config.optim.step)
        self._metric: Step | None = user_code.load("--metric", config.optim.metric) if config.optim.metric else None
        collate = user_code.load("--collate", config.data.collate) if config.data.collate else default_collate
        with preserve_generators():
            trained, validated, tested = _given(config)
            each = trained if isinstance(trained, IterableDataset) else map(trained.__getitem__, range(len(trained)))
            first = list(islice(each, _PROBED))
            if not isinstance(trained, IterableDataset):
                session.prepared.contents = {"train": users.content(config, trained, session.world)}
        model = models_table.build_for(config.model.name, classes=config.model.classes or 1, shape=_shape(first))
        initial.freeze(model, config.model.freeze)
        loader = _loader(config, trained, collate, shuffle=not isinstance(trained, IterableDataset))
        self._model, self.batches = session.prepare(model, loader)
        taken = initial.load(config.model, self._model, session.world) if session.loop.state is None else None
        self._lines = [*(taken.lines() if taken else []), *initial.reached(self._model, config)]
        self.optimizers = optim.build(self._model, config.optim)
        session.prepare(*self.optimizers)
        how = (session.device, session.precision.cast, False)
        self._probe([moved(collate(part), *how) for part in (first, first[:1], first[1:]) if part])
        steps = self.batches.shared.steps()
        if steps is None and (config.optim.schedule != "constant" or config.optim.warmup):
            raise RequestError(
                "The training data are a stream whose length nobody tells, and schedules count epochs; take --schedule "
                "constant, or give the data set a __len__."
            )
        self.lr = optim.rate(config, config.batch.size, steps or 1)
        self._on = "test" if validated is None else "validation"
        self._judged = _loader(config, validated or tested, collate)
        self._tested = None if validated is None else _loader(config, tested, collate)

    def begin(self) -> None:
        """Begin the session's run (*collective*)."""
        self._session.loop.begin(self._config.epochs, {"lines": self._lines}, self._come_to)

    def backward(self, batch: Any) -> None:
        """Compute the step's loss and its gradients (*collective*)."""
        loss, weight = self._asked(self._step(self._model, batch))
        if weight is None:
            self._session.backward(loss / max(1, self._session.samples))
        else:
            self._session.backward(loss, weight=weight, reduction="sum")

    def evaluate(self) -> None:
        """Score the weights by metric or loss; record the score (*collective*)."""
        session, config, position = self._session, self._config, self._session.loop.position
        self.scores = self._scored(self._judged, self._on)
        session.log(**self.scores)
        score = self._score()
        session.loop.judge(score)
        unscored = "  no score, since --metric counted nothing" if score is None else ""
        self._show(f"epoch {position.epochs + 1}/{config.epochs}  step {session.step:,}{unscored}", self.scores)
        if (why := position.stalled(config.patience)) and not session.loop.is_done:
            self._show(f"stopped: {why}", {})

    def _score(self) -> float | None:
        """Return the last weights' score: the metric, else the negative loss. None where the metric counted nothing."""
        return self.scores.get(f"{self._on}_metric") if self._metric else -self.scores[f"{self._on}_loss"]

    def _come_to(self) -> dict[str, Any]:
        """Return the run's summary (*collective*). A separate test set adds the last and the best weights' scores."""
        loop, found = self._session.loop, dict[str, float]()
        if self._tested is not None:
            found = self._scored(self._tested, "test")
            if (loop.position.stale or self._score() is None) and loop.load_best() is not None:
                found |= self._scored(self._tested, "test_best")
            self._session.log(**found)
            self._show("at the end", found)
        return loop.summary() | found

    def _show(self, what: str, scores: dict[str, float]) -> None:
        if not self._config.record.quiet:
            told = "".join(f"  {name.replace('_', ' ')} {value:.6g}" for name, value in scores.items())
            self._session.print(f"{what}{told}")

    def _asked(self, found: Any) -> tuple[Tensor, float | Tensor | None]:
        loss, weight = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        losses.check_number(self._name, loss, _WANTED)
        return loss, weight

    @torch.no_grad()
    def _probe(self, batches: list[Any]) -> None:
        """Raise `RequestError` unless the loss of samples adds up over two parts."""
        with evaluating(self._model), preserve_generators():
            told = [float(self._asked(self._step(self._model, batch))[0]) for batch in batches]
        if len(told) == 3:
            losses.check_sum(self._name, *told, of=f"{_PROBED} samples")

    def _scored(self, loader: DataLoader[Any], on: str) -> dict[str, float]:
        """Return the mean loss and metric over the loader's data (*collective*). Each sample counts once."""
        session = self._session
        sums = torch.zeros(4, dtype=torch.float64, device=session.device)
        for batch in session.evaluating(loader):
            if session.samples == 0:  # fewer samples than ranks: this one stands in
                continue
            for at, what in enumerate((self._step, self._metric)):
                if what is not None:
                    found = what(self._model, batch)
                    value, count = found if isinstance(found, tuple) else (found, None)
                    sums[2 * at] += value
                    sums[2 * at + 1] += session.samples if count is None else count
        loss, weight, value, count = session.sum(sums).tolist()
        if not weight:
            raise RequestError("The data to evaluate on have no sample; give at least one.")
        return {f"{on}_loss": loss / weight} | ({f"{on}_metric": value / count} if self._metric and count else {})


def _given(config: RunConfig) -> tuple[Any, Any, Any]:
    """Return the user's training, validation (or None) and test data. Map-style data sets or streams."""
    asked = f"--data {config.data.name}"
    if ":" not in config.data.name:
        raise RequestError(f"--step takes data of your own, as --data module:function, and found {asked}.")
    seed_all(config.seed)  # the function may draw: the same on every rank
    found = users.called(config.data)
    for split, dataset in found.items():
        if hasattr(dataset, "__len__") and not len(dataset):
            raise RequestError(f"{asked}: its {split} data have no sample; give at least one.")
    train, validation = found["train"], found.get("validation")
    if config.data.holdout:
        samples = None if isinstance(train, IterableDataset) else len(train)
        left, held = hold_out(config.data, config.seed, samples, has_validation=validation is not None)
        train, validation = Subset(train, left.tolist()), Subset(train, held.tolist())
    return train, validation, found["test"]


def _shape(samples: list[Any]) -> tuple[int, ...]:
    """Return the shape of a sample's first tensor; () if none."""
    if not samples:
        raise RequestError("The training data have no sample; give at least one.")
    first = samples[0][0] if isinstance(samples[0], tuple | list) else samples[0]
    return tuple(first.shape) if isinstance(first, Tensor) else ()


def _loader(config: RunConfig, dataset: Any, collate: Any, *, shuffle: bool = False) -> DataLoader[Any]:
    workers = 0 if isinstance(dataset, TensorDataset) else config.data.workers or 0
    how: dict[str, Any] = {"num_workers": workers, "collate_fn": collate, "drop_last": config.batch.drop_last}
    return DataLoader(dataset, config.batch.size, shuffle=shuffle, **how)

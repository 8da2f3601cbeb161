"""`lockstep train --step`: any task, by the user's step function.

The step takes the model and a batch of the data set and collate function, and returns the loss summed over the batch.
The session computes the mean over the global batch, and its gradient. `trainer` has the loop.
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
from ..data.source import hold_out
from ..data.transfer import moved
from ..errors import RequestError
from ..models import table as models_table
from ..models.modes import evaluating
from ..sessions.session import Session
from ..training import losses, optim
from ..world.random_state import preserve_generators, seed_all
from . import initial
from .evaluation import stoppable

Step = Callable[[nn.Module, Any], Any]
"""step(model, batch) -> the loss summed over the batch (0-dim), or (that sum, its number of terms)"""
_PROBE_SAMPLES = 4
_CONTRACT = (
    'it returns the sum of the loss over the batch (reduction="sum"), one number, or that and the number of things it '
    "is a sum over"
)


class OwnStep:
    """Training task of a user's step function (see `trainer.Task`)."""

    def __init__(self, config: RunConfig, session: Session) -> None:
        """Build data and model, and check the step (*collective*). Raises `RequestError`."""
        self.scores: dict[str, float] = {}  # of the last evaluation
        self._config, self._session, self._name = config, session, f"--step {config.optim.step}"
        self._step: Step = user_code.load("--step", config.optim.step)
        self._metric: Step | None = user_code.load("--metric", config.optim.metric) if config.optim.metric else None
        collate = user_code.load("--collate", config.data.collate) if config.data.collate else default_collate
        with preserve_generators():
            train, validation, test = _load_data(config)
            samples = train if isinstance(train, IterableDataset) else map(train.__getitem__, range(len(train)))
            first = list(islice(samples, _PROBE_SAMPLES))
            if not isinstance(train, IterableDataset):
                session.prepared.contents = {"train": users.content(config, train, session.world)}
        model = models_table.build_for(config.model.name, classes=config.model.classes or 1, shape=_sample_shape(first))
        initial.freeze(model, config.model.freeze)
        loader = _make_loader(config, train, collate, shuffle=not isinstance(train, IterableDataset))
        self._model, self.batches = session.prepare(model, loader)
        weights = None if session.is_resumed else initial.load_weights(config.model, self._model, session.world)
        lines = [*(weights.lines() if weights else []), *initial.describe_patterns(self._model, config)]
        session.prepared.facts["lines"] = lines
        session.on("end", self._score_at_end)
        self.optimizers = optim.build(self._model, config.optim)
        session.prepare(*self.optimizers)
        destination = (session.device, session.precision.cast, False)
        self._check_step([moved(collate(part), *destination) for part in (first, first[:1], first[1:]) if part])
        steps = self.batches.shared.steps()
        if steps is None and (config.optim.schedule != "constant" or config.optim.warmup):
            raise RequestError(
                "The training data are a stream of unknown length, and schedules count epochs; use --schedule "
                "constant, or give the data set a __len__."
            )
        self.lr = optim.rate(config, config.batch.size, steps or 1)
        self._split = "test" if validation is None else "validation"
        self._evaluation_loader = _make_loader(config, validation or test, collate)
        self._test_loader = None if validation is None else _make_loader(config, test, collate)

    def backward(self, batch: Any) -> None:
        """Compute the step's loss and its gradients (*collective*)."""
        loss, weight = self._checked(self._step(self._model, batch))
        if weight is None:
            self._session.backward(loss / max(1, self._session.samples))
        else:
            self._session.backward(loss, weight=weight, reduction="sum")

    def evaluate(self) -> None:
        """Score the weights by metric or loss; record the score (*collective*)."""
        session = self._session
        self.scores = self._score(self._evaluation_loader, self._split)
        session.log(**self.scores)
        score = self._last_score()
        session.score(score)
        unscored = "  no score, since --metric counted nothing" if score is None else ""
        self._show(f"epoch {session.epoch + 1}/{self._config.epochs}  step {session.step:,}{unscored}", self.scores)

    def _last_score(self) -> float | None:
        """Return the last weights' metric, else the negative loss; None for a metric of zero weight."""
        return self.scores.get(f"{self._split}_metric") if self._metric else -self.scores[f"{self._split}_loss"]

    def _score_at_end(self, summary: dict[str, Any]) -> dict[str, float]:
        """Return the last and the best weights' scores on a separate test set (*collective*)."""
        if self._test_loader is None:
            return {}
        scores = self._score(self._test_loader, "test")
        is_other = not self._session.is_best or self._last_score() is None
        if is_other and self._config.record.output is not None and self._session.load_best() is not None:
            scores |= self._score(self._test_loader, "test_best")
        self._session.log(**scores)
        self._show("at the end", scores)
        return scores

    def _show(self, label: str, scores: dict[str, float]) -> None:
        if not self._config.record.quiet:
            values = "".join(f"  {name.replace('_', ' ')} {value:.6g}" for name, value in scores.items())
            self._session.print(f"{label}{values}")

    def _checked(self, result: Any) -> tuple[Tensor, float | Tensor | None]:
        """Return a step's (loss, weight or None). Raises `RequestError` for a loss that is no number."""
        loss, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        losses.check_number(self._name, loss, _CONTRACT)
        return loss, weight

    @torch.no_grad()
    def _check_step(self, batches: list[Any]) -> None:
        """Raise `RequestError` unless the losses of two parts add up to that of the batch."""
        with evaluating(self._model), preserve_generators():
            totals = [float(self._checked(self._step(self._model, batch))[0]) for batch in batches]
        if len(totals) == 3:
            losses.check_sum(self._name, *totals, of=f"{_PROBE_SAMPLES} samples")

    def _score(self, loader: DataLoader[Any], name: str) -> dict[str, float]:
        """Return the mean loss and metric over the loader's data (*collective*). Each sample counts once."""
        session = self._session
        sums = torch.zeros(4, dtype=torch.float64, device=session.device)
        for batch in stoppable(session, loader):
            if session.samples == 0:  # fewer samples than ranks: this rank's share is empty
                continue
            for number, function in enumerate((self._step, self._metric)):
                if function is not None:
                    result = function(self._model, batch)
                    value, count = result if isinstance(result, tuple) else (result, None)
                    sums[2 * number] += value
                    sums[2 * number + 1] += session.samples if count is None else count
        loss, weight, value, count = session.sum(sums).tolist()
        if not weight:
            raise RequestError("The evaluation data have no sample; give at least one.")
        return {f"{name}_loss": loss / weight} | ({f"{name}_metric": value / count} if self._metric and count else {})


def _load_data(config: RunConfig) -> tuple[Any, Any, Any]:
    """Return the user's training, validation (or None) and test data: map-style data sets or streams."""
    option = f"--data {config.data.name}"
    if ":" not in config.data.name:
        raise RequestError(f"--step needs your data as --data module:function, and found {option}.")
    seed_all(config.seed)  # the function may draw: alike on every rank
    datasets = users.called(config.data)
    for split, dataset in datasets.items():
        if hasattr(dataset, "__len__") and not len(dataset):
            raise RequestError(f"{option}: its {split} data have no sample; give at least one.")
    train, validation = datasets["train"], datasets.get("validation")
    if config.data.holdout:
        samples = None if isinstance(train, IterableDataset) else len(train)
        train_indices, validation_indices = hold_out(
            config.data, config.seed, samples, has_validation=validation is not None
        )
        train, validation = Subset(train, train_indices.tolist()), Subset(train, validation_indices.tolist())
    return train, validation, datasets["test"]


def _sample_shape(samples: list[Any]) -> tuple[int, ...]:
    """Return the shape of a sample's first tensor; () if none."""
    if not samples:
        raise RequestError("The training data have no sample; give at least one.")
    first = samples[0][0] if isinstance(samples[0], tuple | list) else samples[0]
    return tuple(first.shape) if isinstance(first, Tensor) else ()


def _make_loader(config: RunConfig, dataset: Any, collate: Any, *, shuffle: bool = False) -> DataLoader[Any]:
    workers = 0 if isinstance(dataset, TensorDataset) else config.data.workers or 0
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": collate, "drop_last": config.batch.drop_last}
    return DataLoader(dataset, config.batch.size, shuffle=shuffle, **options)

"""Models, data sets and losses of a user's own that cannot be used: each is refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

Tables = tuple[TensorDataset, TensorDataset]
OBJECT = nn.Identity()
NUMBERS = [1, 2]

# --- models


def none() -> None:
    """Return nothing."""


def demanding(depth: int) -> nn.Module:
    """Ask for what nobody gives."""
    return nn.Identity()


def buggy(classes: int) -> nn.Module:
    """Fail in torch, two lines below."""
    return nn.Sequential(
        nn.Linear("four", classes),  # type: ignore[arg-type]
    )


class Noted(nn.Linear):
    """A layer with more than tensors in its state."""

    def get_extra_state(self) -> dict[str, Any]:
        return {}

    def set_extra_state(self, state: Any) -> None:
        pass


def narrow(classes: int) -> nn.Module:
    """Return a net for samples of another size."""
    return nn.Linear(20, classes)


def lazy(classes: int) -> nn.Module:
    """Return a net whose shapes a first batch decides."""
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def lazy_norm(classes: int) -> nn.Module:
    """Return a net whose statistics' shapes a first batch decides."""
    return nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(), nn.Linear(64, classes))


def noted(classes: int) -> nn.Module:
    """Return a net with more than tensors in its state."""
    return nn.Sequential(nn.Flatten(), Noted(64, classes))


def unnormed(classes: int) -> nn.Module:
    """Return a net with a BatchNorm that keeps no statistics."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, classes))


def sparse() -> nn.Module:
    """Return a net with sparse gradients."""
    return nn.Sequential(nn.Flatten(), nn.Embedding(9, 9, sparse=True))


# --- data sets


def _tables(labels: Tensor, more: Tensor | None = None) -> Tables:
    return TensorDataset(torch.zeros(len(labels), 2), labels), TensorDataset(
        torch.zeros(9, 2), labels if more is None else more
    )


def outside() -> Tables:
    """Return held-out labels that the training set has not."""
    return _tables(torch.arange(9) % 3, torch.arange(9))


def empty() -> Tables:
    """Return no sample."""
    return _tables(torch.zeros(0), torch.zeros(9))


def fractions() -> Tables:
    """Return labels that are no whole numbers."""
    return _tables(torch.arange(9) / 2)


def one_hot() -> Tables:
    """Return a row of labels for each sample."""
    return _tables(nn.functional.one_hot(torch.arange(9) % 3))


def vectors() -> Tables:
    """Return samples that are no images."""
    return _tables(torch.arange(9) % 3)


def one_set() -> TensorDataset:
    """Return one data set in place of two."""
    return vectors()[0]


class _Stream(IterableDataset[tuple[Tensor, int]]):
    classes = 2

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter([(torch.zeros(2), 0)] * 3)


def streams() -> tuple[_Stream, _Stream]:
    """Return data sets without an index."""
    return _Stream(), _Stream()


class _Labels(Dataset[tuple[Tensor, object]]):
    classes = 3

    def __init__(self, label: object) -> None:
        self.label = label

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, object]:
        return torch.zeros(2), self.label


def words() -> tuple[_Labels, _Labels]:
    """Return labels that are words."""
    return _Labels("3"), _Labels(0)


def halves() -> tuple[_Labels, _Labels]:
    """Return labels that are tensors of fractions."""
    return _Labels(torch.tensor(0.5)), _Labels(0)


def pairs() -> tuple[_Labels, _Labels]:
    """Return two labels for each sample."""
    return _Labels(torch.tensor([0, 1])), _Labels(0)


def broken() -> NoReturn:
    """Fail."""
    raise FileNotFoundError("my.csv")


# --- losses


def two_arguments(scores: Tensor, labels: Tensor) -> Tensor:
    """Take no reduction."""
    return scores.sum()


def by_samples(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return a number for each sample."""
    return scores.sum(1)


def plain_number(scores: Tensor, labels: Tensor, reduction: str) -> float:
    """Return no tensor."""
    return 1.0


def detached(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return a number without a gradient."""
    return scores.detach().sum()

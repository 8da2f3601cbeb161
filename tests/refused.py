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


def none() -> None: ...


def buggy(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear("four", classes),  # type: ignore[arg-type]
    )


class Noted(nn.Linear):
    """A layer with more than tensors in its state."""

    def get_extra_state(self) -> dict[str, Any]:
        return {}

    def set_extra_state(self, state: Any) -> None: ...


def narrow(classes: int) -> nn.Module:
    return nn.Linear(20, classes)


def lazy(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def noted(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), Noted(64, classes))


def unnormed(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, classes))


def sparse() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Embedding(9, 9, sparse=True))


def _tables(labels: Tensor, more: Tensor | None = None) -> Tables:
    held_out = labels if more is None else more
    return TensorDataset(torch.zeros(len(labels), 2), labels), TensorDataset(torch.zeros(9, 2), held_out)


def outside() -> Tables:
    return _tables(torch.arange(9) % 3, torch.arange(9))


def empty() -> Tables:
    return _tables(torch.zeros(0), torch.zeros(9))


def fractions() -> Tables:
    return _tables(torch.arange(9) / 2)


def vectors() -> Tables:
    return _tables(torch.arange(9) % 3)


def one_set() -> TensorDataset:
    return vectors()[0]


class _Stream(IterableDataset[tuple[Tensor, int]]):
    classes = 2

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter([(torch.zeros(2), 0)] * 3)


def streams() -> tuple[_Stream, _Stream]:
    return _Stream(), _Stream()


class _Words(Dataset[tuple[Tensor, str]]):
    classes = 3

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        return torch.zeros(2), "3"


def words() -> tuple[_Words, _Words]:
    return _Words(), _Words()


def broken() -> NoReturn:
    raise FileNotFoundError("my.csv")


def by_samples(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return scores.sum(1)


def plain_number(scores: Tensor, labels: Tensor, reduction: str) -> float:
    return 1.0


def detached(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return scores.detach().sum()

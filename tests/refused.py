"""Models, data sets and losses of a user's own that cannot be used: each is refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

Tables = tuple[TensorDataset, TensorDataset]


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


def noted(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), Noted(64, classes))


def lazy(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def unnormed(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, classes))


def _tables(train: Tensor, test: Tensor) -> Tables:
    return TensorDataset(torch.zeros(len(train), 2), train), TensorDataset(torch.zeros(len(test), 2), test)


def outside() -> Tables:
    return _tables(torch.arange(9) % 3, torch.arange(9))


def empty() -> Tables:
    return _tables(torch.zeros(0), torch.zeros(9))


def fractions() -> Tables:
    return _tables(torch.arange(9) / 2, torch.arange(9) / 2)


def vectors() -> Tables:
    return _tables(torch.arange(9) % 3, torch.arange(9) % 3)


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


def broken() -> NoReturn:
    raise FileNotFoundError("my.csv")


def averaged(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return nn.functional.cross_entropy(scores, labels)


def detached(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return nn.functional.cross_entropy(scores.detach(), labels, reduction=reduction)


def by_samples(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return scores.sum(1)

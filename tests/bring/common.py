"""Parts that loops share: data, models, the usual step, and a checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.checkpoint.shards import full_tensor

FEATURES = 5


def arrays(count: int = 23, features: int = FEATURES, targets: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs (count, features) and targets (count, targets), float64."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, features, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, targets, generator=generator, dtype=torch.float64)


def regression(count: int = 23, features: int = FEATURES, targets: int = 1) -> TensorDataset:
    return TensorDataset(*arrays(count, features, targets))


def seeded(make: Callable[[], nn.Module]) -> Any:
    """Return the model in float64, with weights of seed 0."""
    torch.manual_seed(0)
    return make().double()


def mlp(width: int = 4, targets: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, targets))


def trio(
    session: Any,
    make: Callable[[], nn.Module] = mlp,
    *,
    data: Any = None,
    batch: int = 6,
    lr: float = 0.1,
    momentum: float = 0.9,
    **options: Any,
) -> Any:
    """Return a prepared model, optimizer and loader. `options` are the DataLoader's."""
    model = seeded(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    loader = DataLoader(regression() if data is None else data, batch_size=batch, **options)
    return session.prepare(model, optimizer, loader)


def error(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def descend(session: Any, optimizer: Any, loss: Tensor, **options: Any) -> None:
    """Make a usual step."""
    session.backward(loss, **options)
    optimizer.step()
    optimizer.zero_grad()


def limited(batches: Iterable[Any], limit: int = 60) -> Iterator[Any]:
    """Yield batches without end, but no more than any right loop takes."""
    for number, batch in enumerate(batches):
        assert number < limit, "the loop has no end"
        yield batch


def train(session: Any, trained: Any, epochs: int = 2) -> list[float]:
    """Train a model, optimizer and loader; return the checksum of the weights."""
    model, optimizer, loader = trained
    for _ in session.epochs(epochs):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


def checksum(*models: nn.Module) -> float:
    """Return a sum over parameters and buffers in which each element has a weight of its own."""
    total = 0.0
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            parts = full_tensor(tensor)
            parts = torch.view_as_real(parts) if parts.is_complex() else parts
            values = parts.double().flatten()
            total += float(values @ torch.cos(torch.arange(1.0, len(values) + 1, dtype=torch.float64) + len(values)))
    return total

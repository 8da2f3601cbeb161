"""The plain twin of a session: one process of torch alone, with the session's methods."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Plain:
    """Session of one process that computes what a plain loop computes."""

    def __init__(self) -> None:
        self.rank, self.is_main, self.is_last, self.step = 0, True, True, 0
        self.world, self.device = SimpleNamespace(size=1), torch.device("cpu")
        self._models: list[nn.Module] = []
        self._counted: Optimizer | None = None

    def prepare(self, *parts: Any) -> Any:
        """Return the parts unchanged; count the steps of the first optimizer."""
        for part in parts:
            if isinstance(part, nn.Module):
                self._models.append(part)
            elif isinstance(part, Optimizer) and self._counted is None:
                self._counted = part
                part.register_step_post_hook(self._count)
        return parts if len(parts) > 1 else parts[0]

    def _count(self, *_: Any) -> None:
        self.step += 1

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs."""
        return iter(range(count))

    def backward(self, loss: Tensor, *, retain_graph: bool = False, **_: Any) -> None:
        """Compute gradients."""
        loss.backward(retain_graph=retain_graph)

    def evaluating(self, loader: Any) -> Iterator[Any]:
        """Yield batches; models are in evaluation mode, and no gradients are kept."""
        modes = [(model, model.training) for model in self._models]
        for model in self._models:
            model.eval()
        try:
            with torch.no_grad():
                yield from loader
        finally:
            torch.set_grad_enabled(True)  # two that are read together would leave it off
            for model, mode in modes:
                model.train(mode)

    def sum(self, value: Any) -> Any:
        """Return the value."""
        return value

    def max(self, value: Any) -> Any:
        """Return the value."""
        return value

    def mean(self, value: Any, **_: Any) -> Any:
        """Return the value."""
        return value

    def gather(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    def print(self, *_: Any, **__: Any) -> None:
        """Print nothing."""

    def log(self, **_: Any) -> None:
        """Record nothing."""

    def score(self, value: float) -> None:
        """Record nothing."""

    def stop_if_asked(self) -> None:
        """Do nothing."""

"""What one rank of a job is, and numbers of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data.share import Micro
from ..errors import RequestError
from ..world.world import World


class Rank:
    """One rank: `world` says which there are, `device` where this one is. Every rank calls what is *collective*."""

    _micro: Micro | None = None  # the share under way; None outside of a loader's loop

    def __init__(self, world: World) -> None:
        self.world, self.device = world, world.device

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self.world.rank

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: the one that prints and writes. Never guard a collective with it."""
        return self.world.is_main

    @property
    def is_last(self) -> bool:
        """Whether the global batch is whole with the share under way, so that optimizers and schedules act."""
        return self._micro is None or self._micro.last

    @property
    def samples(self) -> int:
        """Samples of this rank's share under way; 0 where it is empty, and a sample that does not count stands in."""
        return 0 if self._micro is None else self._micro.size

    @property
    def _counts(self) -> bool:
        return self._micro is None or self._micro.size > 0

    def sum(self, value: Any) -> Any:
        """Return the sum of a number, or of a tensor's elements each, over all ranks (*collective*)."""
        if not self._counts:
            value = torch.zeros_like(value) if isinstance(value, Tensor) else value * 0
        return self._reduced(value, self.world.sum)

    def max(self, value: Any) -> Any:
        """Return the maximum of a number, or of a tensor's elements each, over all ranks (*collective*)."""
        return self._reduced(value, self.world.max)

    def _reduced(self, value: Any, reduce: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return reduce(value.detach())
        found = reduce(torch.tensor(value, dtype=torch.float64, device=self.device)).item()
        return int(found) if isinstance(value, int) else found

    def mean(self, value: Any, *, weight: float | Tensor | None = None) -> Any:
        """Return the mean of ranks' means (*collective*), each over its share's samples or over `weight` things."""
        count = 1 if self._micro is None else self._micro.size
        own = count if weight is None or not count else float(weight)
        total = self.sum(own)
        if not total > 0:
            raise RequestError(f"session.mean was given weights that sum to {total:g} over the ranks.")
        part = value * own if own else torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
        return self.sum(part) / total

    def gather(self, value: Tensor) -> Tensor:
        """Return all ranks' tensors, (n, …) each, one after the other in their order (*collective*); n may differ."""
        return torch.cat(self.world.ragged(value if self._counts else value[:0]))

    def print(self, *words: Any, **how: Any) -> None:
        """Print on rank 0 alone, as Python's own `print` does."""
        if self.is_main:
            print(*words, **how)

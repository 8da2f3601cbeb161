"""A world that counts the bytes which its rank gives to collectives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from torch import Tensor

from ..world.world import World


@dataclasses.dataclass
class Count:
    """Bytes so far."""

    size_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class CountedWorld(World):
    """The ranks of another world. All collectives go through the three methods below, or, of gradients, none."""

    count: Count = dataclasses.field(default_factory=Count, compare=False)

    @classmethod
    def of(cls, world: World, **changes: Any) -> CountedWorld:
        """Return the ranks of `world`, with `changes` of its fields."""
        return cls(**{field.name: getattr(world, field.name) for field in dataclasses.fields(World)} | changes)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Count and sum (*collective*)."""
        self.count.size_bytes += tensor.nbytes
        return super().sum_(tensor)

    def stack(self, tensor: Tensor) -> Tensor:
        """Count and stack (*collective*)."""
        self.count.size_bytes += tensor.nbytes
        return super().stack(tensor)

    def gather_array(self, *parts: np.ndarray) -> np.ndarray:
        """Count as float64, and stack (*collective*)."""
        before = self.count.size_bytes
        rows = super().gather_array(*parts)  # may be stacked as a tensor
        self.count.size_bytes = before + 8 * sum(map(len, parts))
        return rows

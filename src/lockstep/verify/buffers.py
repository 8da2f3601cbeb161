"""Buffers that each rank keeps for itself by intent, such as local BatchNorm's statistics: how far they lie apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from ..errors import counted
from ..proof import Check
from ..world import World
from .difference import STATISTICS, kind_of
from .digest import spread


class LocalBuffers:
    """How far buffers lie apart that each rank keeps for itself by intent: an evaluation uses rank 0's."""

    def __init__(self, world: World, tensors: Callable[[], Mapping[str, Tensor]], replicas: int = 1) -> None:
        """`tensors` returns those buffers by name; `replicas` is how many of the model this process has."""
        self._world = world
        self._tensors = tensors
        self._replicas = replicas
        self.cost_s = 0.0
        self._measured_at: int | None = None
        self._times = 0
        self._gaps: dict[str, float] = {}
        """Of those that ever differed, the largest |difference| from rank 0's."""

    def due(self, step: int) -> bool:
        """Whether there are any, and they were not measured after `step` yet."""
        return self._world.size > 1 and self._measured_at != step and len(self._tensors()) > 0

    def measure(self, step: int) -> None:
        """Measure them after `step` (*collective*)."""
        begun_s = time.perf_counter()
        found = spread(self._world, dict(sorted(self._tensors().items())))
        self._gaps |= {name: max(gap, self._gaps.get(name, 0.0)) for name, gap in found.items()}
        self._measured_at = step
        self._times += 1
        self.cost_s += time.perf_counter() - begun_s

    def proof(self) -> list[Check]:
        """Return what was measured; nothing where no rank or replica has a buffer of its own.

        Of one process's replicas, all but the first are gone when a step ends.
        """
        held = self._tensors() if self._world.size > 1 or self._replicas > 1 else {}
        if not held:
            return []
        statistics = sum(kind_of(name, each, ()) == STATISTICS for name, each in held.items())
        kinds = ((statistics, "BatchNorm statistic"), (len(held) - statistics, "other buffer"))
        told = " and ".join(counted(number, noun) for number, noun in kinds if number)
        whose = "rank" if self._world.size > 1 else "replica"
        told += f" {'is' if len(held) == 1 else 'are'} each {whose}'s own (local)"
        if self._gaps:
            name, gap = max(self._gaps.items(), key=lambda each: each[1])
            told += f", and {'differs' if len(held) == 1 else 'differ'} by up to {gap:.3g} ({name})"
        elif self._times:
            told += ", and the same on all"
        return [
            Check(
                name="buffers",
                claim=f"How far buffers lie apart that each {whose} keeps for itself",
                outcome=Check.MEASURED if self._times else Check.OPEN,
                times=self._times,
                at_step=self._measured_at,
                tolerance="none: measured, not judged",
                cost_s=self.cost_s,
                found=f"{told}; an evaluation uses {'rank 0' if self._world.size > 1 else 'the first one'}'s",
            )
        ]

"""Whether the ranks' replicas are the same bits, asked while they train.

Every rank digests its tensors where they lie, and one exchange of a few bytes tells whether all have the same digest.
Only where they have not are the tensors digested one by one, to name those that differ. How often that is done is given
(`--verify-every`) or follows from what it costs: at most `SHARE` of the time of training.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ProofError, counted
from ..world import World
from .digest import digest, digests

SHARE = 0.004
"""Of the time of training that the checks may take, by default: below half a percent."""
_MEASURED = 3
"""Tensors of which the size of the difference is looked for, where many differ."""


class Found(NamedTuple):
    """A tensor that is not the same bits on all ranks."""

    name: str
    ranks: tuple[int, ...]
    """Those that are unlike most; all of them where no more than half agree."""
    gap: float | None
    """Largest |difference| from rank 0's; NaN where a value is none, None where it was not looked for."""


class ReplicaCheck:
    """Compares the replicas of `world`'s ranks every so many steps."""

    def __init__(
        self,
        world: World,
        tensors: Callable[[], Mapping[str, Tensor]],
        every: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tensors` returns what has to be the same on every rank, by name, in any order.

        `every` is the number of steps between two checks: None for what `SHARE` allows, 0 for no check at all.
        `clock` tells the time in seconds.
        """
        self.checks = 0
        self.cost_s = 0.0
        self.agreed_at: int | None = None
        """The last step after which all replicas were the same."""
        self._world = world
        self._tensors = tensors
        self._every = every
        self._clock = clock
        self._next = math.inf if every == 0 or world.size == 1 else every or 1
        self._last_cost_s = 0.0
        self._begun_at: int | None = None

    def due(self, step: int) -> bool:
        """Whether the replicas are to be compared after `step`: the same on every rank."""
        return step >= self._next

    def check(self, step: int, step_s: float) -> None:
        """Compare the replicas after `step`; `step_s` is how long a step takes now (*collective*).

        Raises `ProofError`, on every rank, where they are not the same bits.
        """
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()  # steps still queued are no cost of the check
        begin_s = self._clock()
        tensors = dict(sorted(self._tensors().items()))  # a file gives an optimizer's state in any order
        own = [int(digest(list(group.values()))) for group in _by_device(tensors)]
        told = torch.tensor([*own, self._proposal(step, step_s)], device=self._world.device)
        by_rank = self._world.stack(told).tolist()
        if any(theirs[:-1] != by_rank[0][:-1] for theirs in by_rank):
            raise self._error(step, tensors)
        self._next = step + by_rank[0][-1]
        self.agreed_at = step
        self.checks += 1
        self._last_cost_s = self._clock() - begin_s
        self.cost_s += self._last_cost_s

    def confirm(self, step: int, step_s: float) -> None:
        """Compare the replicas after `step`, unless that was done: what is saved is what all hold (*collective*)."""
        if math.isfinite(self._next) and self.agreed_at != step:
            self.check(step, step_s)

    def summary(self) -> dict[str, int | float] | None:
        """Return how often the replicas were compared, when last, and the seconds that took; None for never."""
        if not self.checks:
            return None
        return {"checks": self.checks, "last_step": self.agreed_at or 0, "cost_s": self.cost_s}

    def _proposal(self, step: int, step_s: float) -> int:
        """Return the number of steps after which all checks so far and one more are worth `SHARE` of the time."""
        if self._every:
            return self._every
        self._begun_at = step if self._begun_at is None else self._begun_at
        if not step_s:
            return 1
        paid_at = self._begun_at + (self.cost_s + self._last_cost_s) / (SHARE * step_s)
        return max(1, math.ceil(paid_at) - step)

    def _error(self, step: int, tensors: Mapping[str, Tensor]) -> ProofError:
        first, *others = compare(self._world, tensors)
        who = " and ".join(f"rank {rank}" for rank in first.ranks)
        differ = "differs from the others" if len(first.ranks) == 1 else "differ"
        gap = ""
        if first.gap is not None:
            gap = f" by up to {first.gap:.3g}" if math.isfinite(first.gap) else " by a value that is not finite"
        more = f", and in {counted(len(others), 'more tensor')}" if others else ""
        before = "never compared" if self.agreed_at is None else f"the same after step {self.agreed_at}"
        return ProofError(
            f"The replicas are not the same bits after step {step}: {who} {differ} in {first.name}{gap}{more}; before, "
            f"they were {before}. Memory that flips bits does this, or code that treats ranks differently; continue "
            "from a checkpoint of before."
        )


def compare(world: World, tensors: Mapping[str, Tensor]) -> list[Found]:
    """Return the tensors that are not the same bits on all ranks (*collective*)."""
    groups = _by_device(tensors)
    own = {
        name: value
        for group in groups
        for name, value in zip(group, digests(list(group.values())).tolist(), strict=True)
    }
    by_rank = world.gather(own)
    found: list[Found] = []
    for name in own:
        values = [theirs[name] for theirs in by_rank]
        if len(set(values)) > 1:
            gap = _gap(world, tensors[name]) if len(found) < _MEASURED else None
            found.append(Found(name, _unlike_most(values), gap))
    return found


def _by_device(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of each device, in the order in which devices come: the same on every rank."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.device.type, {})[name] = tensor
    return list(groups.values())


def _unlike_most(values: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose value is not that of the majority; all ranks where there is none."""
    (value, count), *_ = Counter(values).most_common(1)
    if 2 * count <= len(values):
        return tuple(range(len(values)))
    return tuple(rank for rank, theirs in enumerate(values) if theirs != value)


def _gap(world: World, tensor: Tensor) -> float:
    """Return the largest |difference| of any rank's `tensor` from rank 0's (*collective*)."""
    own = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    reference = own.contiguous().clone()
    world.broadcast([reference])
    gap = float((own.double() - reference.double()).abs().max()) if own.numel() else 0.0
    gaps: list[float] = world.gather(gap)
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)

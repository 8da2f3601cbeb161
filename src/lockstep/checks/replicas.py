"""Whether the ranks' replicas are the same bits, compared while they train.

Every rank digests its tensors where they lie, and one exchange of a few bytes tells whether all have the same digest,
and whether any may be not finite. Only where something is wrong are tensors compared one by one, to name them. How
often that is done is given (`--verify-every`) or follows from its cost: at most `SHARE` of the time of training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import LockstepError, ProofError, counted, ranks_named
from ..record.checks import BIT_FOR_BIT, Check
from ..world.world import World
from . import finite
from .digest import compare, device_groups, differing, digest, largest_gap

SHARE = 0.004
"""Of the time of training that the checks may take, by default: below half a percent."""
_CLAIM = (
    "All ranks hold the same bits, of finite numbers: weights, optimizer state, synchronised statistics, averaged "
    "weights"
)
_UNSTEADY = "nothing when they are read a second time: a device gives other bits each time, so have its memory tested"


class ReplicaCheck:
    """Compares the replicas of `world`'s ranks, and of the devices that a rank drives, every so many steps."""

    def __init__(
        self,
        world: World,
        tensors: Callable[[], Mapping[str, Tensor]],
        every: int | None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        copies: Callable[[], Sequence[Mapping[str, Tensor]]] = list,
        remedy: Callable[[], str] = str,
        begun: int = 0,
    ) -> None:
        """`tensors` returns what has to be the same on every rank, by name, in any order.

        `every` is the number of steps between two checks: None for what `SHARE` allows, 0 for no check at all.
        `clock` tells the time in seconds. `copies` returns the tensors of each further device of this process, named
        as in `tensors`. `remedy` returns a sentence that says what to do about numbers that are not finite, or raises
        a better error (*collective*). `begun` is the step that the run goes on from.
        """
        self.checks = 0
        self.cost_s = 0.0
        self.agreed_at: int | None = None
        """The last step after which all replicas were the same."""
        self._world, self._tensors, self._every, self._clock = world, tensors, every, clock
        self._copies, self._remedy, self._begun = copies, remedy, begun
        self._on = every != 0 and (world.size > 1 or len(copies()) > 0)
        self._next = (every or 1) if self._on else math.inf
        self._last_cost_s = 0.0
        self._first_at: int | None = None
        self._failure: LockstepError | None = None
        self._unknown_from: int | None = None
        """The step whose loss was not finite, where replicas had not been compared right before."""

    def due(self, step: int) -> bool:
        """Whether the replicas are to be compared after `step`: the same on every rank."""
        return step >= self._next

    def check(self, step: int, step_s: float) -> None:
        """Compare the replicas after `step`; `step_s` is how long a step takes now (*collective*).

        Raises, on every rank, `ProofError` where they are not the same bits, and `RunError` where all are not finite.
        """
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()  # steps still queued are no cost of the check
        begin_s = self._clock()
        tensors, copies = self._sorted(), self._copies()
        differ = any(differing(tensors, copy) for copy in copies)
        self._first_at = self._first_at or step
        # Filled, since the host would wait for a copy of its numbers.
        device, numbers = self._world.device, (differ, self._wait(step, step_s))
        filled = [torch.full((1,), each, dtype=torch.int64, device=device) for each in numbers]
        by_rank: list[list[int]] = self._world.stack(torch.cat([facts(tensors, device), *filled])).tolist()
        self._failure = self._fault(step, tensors, copies, by_rank)
        if self._failure is not None:
            raise self._failure
        self._next = step + by_rank[0][-1]
        self.agreed_at = step
        self.checks += 1
        self._last_cost_s = self._clock() - begin_s
        self.cost_s += self._last_cost_s

    def confirm(self, step: int, step_s: float) -> None:
        """Compare the replicas after `step`, unless that was done: what is saved is what all hold (*collective*)."""
        if self._on and self.agreed_at != step:
            self.check(step, step_s)

    def explain_loss(self, step: int, bad_step: int) -> str:
        """Compare the replicas after `step`, since the loss of `bad_step` was not finite (*collective*).

        Returns a sentence where a replica may have been ruined between two checks and spoilt the others; else "".
        Raises `ProofError` where they are not the same bits.
        """
        if not self._on or not (doubt := self._doubt(bad_step - 1)):
            return ""
        if unlike := self._unlike(self._sorted(), ()):
            self._failure = self._apart(step, unlike)
            raise self._failure
        self._unknown_from = bad_step
        return doubt

    def proof(self) -> Check:
        """Return what was checked and what came of it."""
        is_open = not self.checks or self._unknown_from is not None
        return Check(
            name="replicas",
            claim=_CLAIM,
            outcome=Check.FAILS if self._failure else Check.OPEN if is_open else Check.HOLDS,
            times=self.checks + (self._failure is not None),
            tolerance=BIT_FOR_BIT,
            found=self._found(),
            at_step=self.agreed_at,
            cost_s=self.cost_s if self._on else None,
        )

    def _found(self) -> str:
        if self._failure:
            return str(self._failure).removesuffix(".")
        if not self._on:
            return "switched off by --verify-every 0" if self._every == 0 else "one process, one set of weights"
        if self._unknown_from is not None:
            return f"{self._before()}, and not compared since; the loss of step {self._unknown_from} was not finite"
        if self.agreed_at is None:
            return "no step was compared"
        return f"compared first after step {self._first_at} and last after step {self.agreed_at}"

    def _sorted(self) -> dict[str, Tensor]:
        return dict(sorted(self._tensors().items()))  # a file gives an optimizer's state in any order

    def _wait(self, step: int, step_s: float) -> int:
        """Return after how many steps all checks so far and one more are worth `SHARE` of the time."""
        if self._every or not step_s:
            return self._every or 1
        paid_at = (self._first_at or step) + (self.cost_s + self._last_cost_s) / (SHARE * step_s)
        return max(1, math.ceil(paid_at) - step)

    def _fault(
        self, step: int, tensors: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]], by_rank: list[list[int]]
    ) -> LockstepError | None:
        """Return what is wrong, the same on every rank, by its facts, whether copies differ, and its wait."""
        # Before all else: a rank that is not finite soon spoils the others, and not all alike.
        if any(theirs[:-3] != by_rank[0][:-3] for theirs in by_rank) or any(differ for *_, differ, _ in by_rank):
            return self._apart(step, self._unlike(tensors, copies))
        if any(suspected for *_, suspected, _, _ in by_rank):
            bad: list[list[str]] = self._world.gather(finite.not_finite(tensors))
            if any(theirs != bad[0] for theirs in bad):
                return self._apart(step, self._unlike(tensors, copies))  # in what a digest does not see
            if bad[0]:
                return finite.error(step, bad[0], f"{self._remedy()} {self._doubt(step - 1)}".strip())
        return None

    def _unlike(self, tensors: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]]) -> list[str]:
        """Return in clauses which ranks and which copies differ, and in what tensors (*collective*)."""
        found: dict[str, list[tuple[str, float | None]]] = {}
        for each in compare(self._world, tensors):
            whose = f"{ranks_named(each.ranks)} {'differs from the others' if len(each.ranks) == 1 else 'differ'}"
            found.setdefault(whose, []).append((each.name, each.gap))
        own: dict[str, list[tuple[str, float]]] = {}
        for copy in copies:
            for name in differing(tensors, copy):
                whose = f"rank {self._world.rank}'s copy on {copy[name].device} differs from its own weights"
                gap = largest_gap(tensors[name].cpu(), copy[name].cpu())
                own.setdefault(whose, []).append((name, gap))
        for theirs in self._world.gather(own):
            found |= theirs
        return [f"{whose} in {_listed(named)}" for whose, named in found.items()]

    def _apart(self, step: int, unlike: Sequence[str]) -> ProofError:
        return ProofError(
            f"The replicas are not the same bits after step {step}: {'; '.join(unlike) or _UNSTEADY}; before, they "
            f"were {self._before()}. Memory that flips bits does this, a copy from one GPU to another that goes wrong, "
            "or code that treats ranks differently; continue from a checkpoint of before."
        )

    def _doubt(self, step: int) -> str:
        """Return a sentence on why numbers may be not finite; "" if replicas were compared after `step`."""
        if self._world.size == 1 or step <= (self._begun if self.agreed_at is None else self.agreed_at):
            return ""
        return (
            f"The replicas were {self._before()}; --verify-every 1, from a checkpoint of before, tells whether one of "
            "them was ruined since, and spoilt the others."
        )

    def _before(self) -> str:
        return "never compared" if self.agreed_at is None else f"the same after step {self.agreed_at}"


def facts(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return the digest of the tensors on each kind of device, and whether any may be not finite; waits for nothing.

    (kinds of device + 1,) int64 on `device`.
    """
    groups = [list(group.values()) for group in device_groups(tensors)]
    suspected = torch.stack([finite.suspect(group).to(device) for group in groups]).any()
    return torch.stack([*(digest(group).to(device) for group in groups), suspected.long()])


def _listed(named: Sequence[tuple[str, float | None]]) -> str:
    """Return in words the first of the tensors `named`, each with the size of its difference, and how many are left."""
    words = []
    for name, gap in named[: finite.NAMED]:
        size = "" if gap is None else f" by up to {gap:.3g}" if math.isfinite(gap) else " by a value that is not finite"
        words.append(f"{name}{size}")
    left = len(named) - len(words)
    return f"{', '.join(words)}, and in {counted(left, 'more tensor')}" if left else " and ".join(words)

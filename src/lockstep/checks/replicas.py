"""Compare the ranks' replicas bit for bit during training.

Every rank digests its tensors on their device, and one exchange of a few bytes shows whether all digests are equal, and
whether any tensor may be non-finite. Only after a mismatch are tensors compared one by one, to name them.
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
from .difference import distance
from .digest import compare, differing, digest

SHARE = 0.004
"""Of the time of training that the checks may take, by default: below half a percent."""
_UNSTEADY = "nothing when they are read a second time: a device gives other bits each time, so have its memory tested"


class ReplicaCheck:
    """Compares replicas every so many steps. Those of `world`'s ranks, and of each rank's devices."""

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
        """`tensors` returns the tensors to compare, by name, in any order.

        `every` is the number of steps between two checks: None for the most that `SHARE` allows, 0 for no check at all.
        `copies` returns the tensors of each further device of this process, named as in `tensors`. `remedy` returns a
        sentence on what to do about numbers that are not finite, or raises a better error (*collective*). `begun` is
        the step from which the run continues.
        """
        self.checks = 0
        self.cost_s = 0.0
        self.agreed_at: int | None = None
        """The last step after which all replicas were the same."""
        self._world, self._tensors, self._every, self._clock = world, tensors, every, clock
        self._copies, self._remedy, self._begun = copies, remedy, begun
        self._off = ""  # why nothing is compared
        if every == 0:
            self._off = "switched off by --verify-every 0"
        elif world.size == 1 and not copies():
            self._off = "one process, one set of weights"
        elif not tensors():
            self._off = "no model was prepared"
        self._on = not self._off
        self._next = (every or 1) if self._on else math.inf
        self._last_cost_s, self._first_at = 0.0, 0
        self._failure: LockstepError | None = None
        self._lost_at: int | None = None  # a step whose loss was not finite, some time after the last check

    def due(self, step: int) -> bool:
        """Return whether to compare after `step`. The same on every rank."""
        return step >= self._next

    def check(self, step: int, step_s: float) -> None:
        """Compare the replicas after `step` (*collective*). `step_s` is the current duration of a step.

        Raises, on every rank, `ProofError` where bits differ, and `RunError` where all are equal but non-finite.
        """
        device = self._world.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # steps still queued are no cost of the check
        begin_s = self._clock()
        tensors = dict(sorted(self._tensors().items()))  # a file gives an optimizer's state in any order
        copies = self._copies()
        differ = any(differing(tensors, copy) for copy in copies)
        self._first_at = self._first_at or step
        own = facts(tensors, device, differ, self._wait(step, step_s))
        by_rank: list[list[int]] = self._world.stack(own).tolist()
        self._judge(step, tensors, copies, by_rank)
        self._next = step + by_rank[0][-1]
        self.agreed_at = step
        self.checks += 1
        self._last_cost_s = self._clock() - begin_s
        self.cost_s += self._last_cost_s

    def confirm(self, step: int, step_s: float) -> None:
        """Compare the replicas after `step` before a save, unless done (*collective*)."""
        if self._on and self.agreed_at != step:
            self.check(step, step_s)

    def explain_loss(self, step: int, bad_step: int) -> str:
        """Return how replicas may explain the non-finite loss of `bad_step`. "" for not at all.

        Compares them where in doubt (*collective*); raises `ProofError` where bits differ.
        """
        doubt = self._doubt(bad_step - 1) if self._on else ""
        if doubt:
            tensors = dict(sorted(self._tensors().items()))
            told = self._world.stack(facts(tensors, self._world.device)).tolist()
            # By digests alone: that numbers are not finite is known.
            self._judge(step, tensors, [], [[*digests, 0, 0, 0] for *digests, _ in told])
            self._lost_at = bad_step
        return doubt

    def proof(self) -> Check:
        """Return the check's outcome so far."""
        found = f"compared first after step {self._first_at} and last after step {self.agreed_at}"
        if self._failure:
            found = str(self._failure).removesuffix(".")
        elif not self._on:
            found = self._off
        elif self._lost_at is not None:
            lost = f"the loss of step {self._lost_at} was not finite, and what became of them in between is not known"
            found = f"{self._before()}; {lost}"
        elif self.agreed_at is None:
            found = "no step was compared"
        holds = self.checks > 0 and self._lost_at is None
        return Check(
            name="replicas",
            claim="All ranks hold the same bits, of finite numbers: weights, optimizer state, synchronised statistics, "
            "averaged weights",
            outcome=Check.FAILS if self._failure else Check.HOLDS if holds else Check.OPEN,
            times=self.checks + (self._failure is not None),
            tolerance=BIT_FOR_BIT,
            found=found,
            at_step=self.agreed_at,
            cost_s=self.cost_s if self._on else None,
        )

    def _wait(self, step: int, step_s: float) -> int:
        """Return the steps until the next check. All checks, that one included, then cost `SHARE` of the time."""
        if self._every or not step_s:
            return self._every or 1
        paid_at = self._first_at + (self.cost_s + self._last_cost_s) / (SHARE * step_s)
        return max(1, math.ceil(paid_at) - step)

    def _judge(
        self, step: int, tensors: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]], by_rank: list[list[int]]
    ) -> None:
        """Raise the error that the ranks' facts show (*collective*). Each row ends with: copies differ, wait."""
        # Before all else: a rank that is not finite soon spoils the others, and not all alike.
        is_apart = any(theirs[:-3] != by_rank[0][:-3] for theirs in by_rank)
        is_apart |= any(differ for *_, differ, _ in by_rank)
        self._failure = None
        if not is_apart and any(suspected for *_, suspected, _, _ in by_rank):
            bad: list[list[str]] = self._world.gather(finite.not_finite(tensors))
            is_apart = any(theirs != bad[0] for theirs in bad)  # in what a digest does not see
            if bad[0] and not is_apart:
                self._failure = finite.error(step, bad[0], f"{self._remedy()} {self._doubt(step - 1)}".strip())
        if is_apart:
            self._failure = ProofError(
                f"The replicas are not the same bits after step {step}: {self._unlike(tensors, copies) or _UNSTEADY}; "
                f"before, they were {self._before()}. Code that treats ranks differently does this, such as weights "
                "drawn anew on each rank, whose random numbers differ (reset_parameters), or changed in forward by its "
                "own share of the samples; so do faulty memory and faulty copies between GPUs; continue from a "
                "checkpoint of before."
            )
        if self._failure is not None:
            raise self._failure

    def _unlike(self, tensors: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]]) -> str:
        """Return the differing ranks and copies, and their tensors (*collective*)."""
        found: dict[str, list[tuple[str, float | None]]] = {}
        for name, ranks, gap in compare(self._world, tensors):
            whose = f"{ranks_named(ranks)} {'differs from the others' if len(ranks) == 1 else 'differ'}"
            found.setdefault(whose, []).append((name, gap))
        own: dict[str, list[tuple[str, float]]] = {}
        for copy in copies:
            for name in differing(tensors, copy):
                whose = f"rank {self._world.rank}'s copy on {copy[name].device} differs from its own weights"
                own.setdefault(whose, []).append((name, distance(tensors[name].cpu(), copy[name].cpu())))
        for theirs in self._world.gather(own):
            found |= theirs
        return "; ".join(f"{whose} in {_listed(named)}" for whose, named in found.items())

    def _doubt(self, step: int) -> str:
        """Return a sentence on non-finite numbers; "" if compared after `step`."""
        if self._world.size == 1 or step <= (self._begun if self.agreed_at is None else self.agreed_at):
            return ""
        return (
            f"The replicas were {self._before()}; --verify-every 1, from a checkpoint of before, tells whether one of "
            "them was ruined since, and spoilt the others."
        )

    def _before(self) -> str:
        return "never compared" if self.agreed_at is None else f"the same after step {self.agreed_at}"


def facts(tensors: Mapping[str, Tensor], device: torch.device, *more: int) -> Tensor:
    """Return each device kind's digest, and a non-finite flag. Does not synchronize.

    After them come the numbers `more`: (kinds of device + 1 + more,) int64 on `device`.
    """
    groups: dict[str, list[Tensor]] = {}  # in the order in which they come: the same on every rank
    for tensor in tensors.values():
        groups.setdefault(tensor.device.type, []).append(tensor)
    suspected = torch.stack([finite.suspect(group).to(device) for group in groups.values()]).any()
    # Filled, since the host would wait for a copy of its numbers.
    numbers = [torch.full((), each, dtype=torch.int64, device=device) for each in more]
    return torch.stack([*(digest(group).to(device) for group in groups.values()), suspected.long(), *numbers])


def _listed(named: Sequence[tuple[str, float | None]]) -> str:
    words = []
    for name, gap in named[: finite.NAMED]:
        size = "" if gap is None else f" by up to {gap:.3g}" if math.isfinite(gap) else " by a value that is not finite"
        words.append(f"{name}{size}")
    left = len(named) - len(words)
    return f"{', '.join(words)}, and in {counted(left, 'more tensor')}" if left else " and ".join(words)

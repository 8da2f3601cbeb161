"""Whether the ranks' replicas are the same bits, asked while they train.

Every rank digests its tensors where they lie, and one exchange of a few bytes tells whether all have the same digest,
and whether any holds a number that is not finite. Only where something is wrong are the tensors looked at one by one,
to name those that are. How often that is done is given (`--verify-every`) or follows from what it costs: at most
`SHARE` of the time of training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..config.registry import per_device
from ..errors import LockstepError, ProofError, counted, ranks_named
from ..record.checks import BIT_FOR_BIT, Check
from ..world.world import World
from . import finite
from .digest import compare, device_groups, differing, digest, largest_gap

SHARE = 0.004
"""Of the time of training that the checks may take, by default: below half a percent."""


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
        `clock` tells the time in seconds. `copies` returns tensors as each further device of this process has them,
        named as in `tensors`. `remedy` returns a sentence that says what to do about numbers that are not finite. It is
        called on every rank, and raises where it knows a better error than theirs (*collective*). `begun` is the step
        that the run goes on from: what is loaded or made anew is the same on every rank.
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

        Raises, on every rank, `ProofError` where they are not the same bits, and `RunError` where none of them is of
        finite numbers.
        """
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()  # steps still queued are no cost of the check
        begin_s = self._clock()
        tensors = dict(sorted(self._tensors().items()))  # a file gives an optimizer's state in any order
        copies = self._copies()
        torn = any(differing(tensors, copy) for copy in copies)
        by_rank = self._told(tensors, torn, self._proposal(step, step_s))
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

        Returns a sentence for where a replica may have been ruined between two checks and taken the others with it; ""
        where the loss cannot come of that. Raises `ProofError` where they are not the same bits.
        """
        if not self._on or not (doubt := self._doubt(bad_step - 1)):
            return ""
        tensors = dict(sorted(self._tensors().items()))
        by_rank = self._told(tensors)
        if any(theirs[:-1] != by_rank[0][:-1] for theirs in by_rank):
            self._failure = self._apart(step, tensors)
            raise self._failure
        self._unknown_from = bad_step
        return doubt

    def proof(self) -> Check:
        """Return what was checked and what came of it."""
        is_open = not self.checks or self._unknown_from is not None
        return Check(
            name="replicas",
            claim="All ranks hold the same bits, of finite numbers: weights, optimizer state, synchronised statistics, "
            "averaged weights",
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
            return (
                f"{self._before()}; the loss at step {self._unknown_from} was not finite, and what became of them in "
                "between is not known"
            )
        if self.agreed_at is None:
            return "no step was compared"
        return f"compared first after step {self._first_at} and last after step {self.agreed_at}"

    def _told(self, tensors: Mapping[str, Tensor], *numbers: int) -> list[list[int]]:
        """Return of each rank its `facts`, and the `numbers` that it tells beside them (*collective*)."""
        # Filled, since the host would wait for a copy of its numbers.
        filled = [torch.full((1,), number, dtype=torch.int64, device=self._world.device) for number in numbers]
        told: list[list[int]] = self._world.stack(torch.cat([facts(tensors, self._world.device), *filled])).tolist()
        return told

    def _proposal(self, step: int, step_s: float) -> int:
        """Return the number of steps after which all checks so far and one more are worth `SHARE` of the time."""
        self._first_at = step if self._first_at is None else self._first_at
        if self._every or not step_s:
            return self._every or 1
        paid_at = self._first_at + (self.cost_s + self._last_cost_s) / (SHARE * step_s)
        return max(1, math.ceil(paid_at) - step)

    def _fault(
        self, step: int, tensors: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]], by_rank: list[list[int]]
    ) -> LockstepError | None:
        """Return what is wrong, the same on every rank, by what each of them told (*collective*)."""
        # Before all else: a rank whose numbers are none soon has the others' be none, and not the same ones.
        if any(theirs[:-3] != by_rank[0][:-3] for theirs in by_rank):
            return self._apart(step, tensors)
        if any(suspected for *_, suspected, _, _ in by_rank):
            bad: list[list[str]] = self._world.gather(finite.not_finite(tensors))
            if any(theirs != bad[0] for theirs in bad):
                return self._apart(step, tensors)  # in what a digest does not see
            if bad[0]:
                return finite.error(step, bad[0], f"{self._remedy()} {self._doubt(step - 1)}".strip())
        if any(torn for *_, torn, _ in by_rank):
            return self._torn(step, tensors, copies)
        return None

    def _apart(self, step: int, tensors: Mapping[str, Tensor]) -> ProofError:
        by_ranks: dict[tuple[int, ...], list[tuple[str, float | None]]] = {}
        for each in compare(self._world, tensors):
            by_ranks.setdefault(each.ranks, []).append((each.name, each.gap))
        clauses = [
            f"{ranks_named(ranks)} {'differs from the others' if len(ranks) == 1 else 'differ'} in {_listed(theirs)}"
            for ranks, theirs in by_ranks.items()
        ]
        return ProofError(
            f"The replicas are not the same bits after step {step}: {'; '.join(clauses) or _UNSTEADY}; "
            f"before, they were {self._before()}. Memory that flips bits does this, or code that treats ranks "
            "differently; continue from a checkpoint of before."
        )

    def _torn(self, step: int, tensors: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]]) -> ProofError:
        own = [
            (str(copy[name].device), name, largest_gap(tensors[name].cpu(), copy[name].cpu()))
            for copy in copies
            for name in differing(tensors, copy)
        ]
        told = self._world.gather(own)
        rank, found = next(((rank, theirs) for rank, theirs in enumerate(told) if theirs), (0, []))
        where = found[0][0] if found else "another device"
        named = [(name, gap) for device, name, gap in found if device == where]
        return ProofError(
            f"The copies of rank {rank}'s weights on {where} are not the same bits as its own after step {step}: they "
            f"differ in {_listed(named) if named else _UNSTEADY}; before, they were {self._before()}. Copies from one "
            "GPU to another that go wrong do this, or memory that flips bits; continue from a checkpoint of before "
            f"with --strategy {per_device()}."
        )

    def _doubt(self, step: int) -> str:
        """Return a sentence on what numbers that are none may come of; "" if replicas were compared after `step`."""
        if self._world.size == 1 or step <= (self._begun if self.agreed_at is None else self.agreed_at):
            return ""
        return (
            f"The replicas were {self._before()}; whether one of them was ruined since, and the others by it, "
            "--verify-every 1 tells, from a checkpoint of before."
        )

    def _before(self) -> str:
        return "never compared" if self.agreed_at is None else f"the same after step {self.agreed_at}"


_UNSTEADY = "nothing when they are read a second time: a device gives other bits each time, so have its memory tested"


def facts(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return what a rank tells of its tensors, (kinds of device + 1,) int64 on `device`; nothing is waited for.

    That is the digest of those on each kind of device, and whether any may hold a number that is not finite.
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

"""Compare the ranks' replicas bit for bit during training.

Every rank digests its tensors on their device. One exchange of a few bytes shows whether all digests are equal, and
whether any tensor may be non-finite. Only after a mismatch, tensors are compared one by one, to name them.
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
from .digest import compare, digest, find_differing

SHARE = 0.004
"""Largest share of training time that the checks take by default."""
_UNSTEADY = "nothing when they are read a second time: a device gives other bits each time, so have its memory tested"


class ReplicaCheck:
    """Compares the replicas of all ranks, and of each rank's devices, at intervals."""

    def __init__(
        self,
        world: World,
        tensors: Callable[[], Mapping[str, Tensor]],
        every: int | None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        copies: Callable[[], Sequence[Mapping[str, Tensor]]] = list,
        compared: str = "weights",
        remedy: Callable[[], str] = str,
        begun: int = 0,
    ) -> None:
        """`tensors` returns the tensors to compare, by name, in any order.

        `every` is the number of steps between two checks: None for as many checks as `SHARE` allows, 0 for none.
        `copies` returns the tensors of each further device of this process, named as in `tensors`. `compared` lists
        the tensors in words. `remedy` returns advice on non-finite numbers, or raises a more specific error
        (*collective*). `begun` is the step from which the run continues.
        """
        self.checks = 0
        self.cost_s = 0.0
        self.agreed_at: int | None = None
        """The last step after which all replicas were the same."""
        self._world, self._tensors, self._every, self._clock = world, tensors, every, clock
        self._copies, self._compared, self._remedy, self._begun = copies, compared, remedy, begun
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
        self._lost_at: int | None = None  # a step after the last check whose loss was not finite

    def due(self, step: int) -> bool:
        """Return whether a check is due after `step`. Every rank returns the same."""
        return step >= self._next

    def check(self, step: int, step_s: float) -> None:
        """Compare the replicas after `step` (*collective*). `step_s` is the current duration of a step.

        Raises, on every rank, `ProofError` if bits differ, and `RunError` if all are equal but non-finite.
        """
        device = self._world.device
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()  # do not count queued steps as the check's cost
        begin_s = self._clock()
        tensors = dict(sorted(self._tensors().items()))  # a loaded optimizer's state may be in another order
        copies = self._copies()
        differ = any(find_differing(tensors, copy) for copy in copies)
        self._first_at = self._first_at or step
        local_facts = facts(tensors, device, differ, self._wait(step, step_s))
        by_rank: list[list[int]] = self._world.stack(local_facts).tolist()
        self._judge(step, tensors, copies, by_rank)
        self._next = step + by_rank[0][-1]
        self.agreed_at = step
        self.checks += 1
        self._last_cost_s = self._clock() - begin_s
        self.cost_s += self._last_cost_s

    def confirm(self, step: int, step_s: float) -> None:
        """Compare the replicas after `step` before a save, unless already compared (*collective*)."""
        if self._on and self.agreed_at != step:
            self.check(step, step_s)

    def explain_loss(self, step: int, bad_step: int) -> str:
        """Return how diverged replicas may explain the non-finite loss of `bad_step`, or "".

        Compares replicas that were not yet compared (*collective*); raises `ProofError` if bits differ.
        """
        doubt = self._doubt(bad_step - 1) if self._on else ""
        if doubt:
            tensors = dict(sorted(self._tensors().items()))
            by_rank = self._world.stack(facts(tensors, self._world.device)).tolist()
            # By digests alone: the numbers are known to be non-finite.
            self._judge(step, tensors, [], [[*digests, 0, 0, 0] for *digests, _ in by_rank])
            self._lost_at = bad_step
        return doubt

    def proof(self) -> Check:
        """Return the check's outcome so far."""
        summary = f"compared first after step {self._first_at} and last after step {self.agreed_at}"
        if self._failure:
            summary = str(self._failure).removesuffix(".")
        elif not self._on:
            summary = self._off
        elif self._lost_at is not None:
            lost = f"the loss of step {self._lost_at} was not finite, and they were not compared in between"
            summary = f"{self._history()}; {lost}"
        elif self.agreed_at is None:
            summary = "no step was compared"
        holds = self.checks > 0 and self._lost_at is None
        return Check(
            name="replicas",
            claim=f"All ranks have the same bits, and all values are finite: {self._compared}",
            outcome=Check.FAILS if self._failure else Check.HOLDS if holds else Check.OPEN,
            times=self.checks + (self._failure is not None),
            tolerance=BIT_FOR_BIT,
            found=summary,
            at_step=self.agreed_at,
            cost_s=self.cost_s if self._on else None,
        )

    def _wait(self, step: int, step_s: float) -> int:
        """Return the steps until the next check, after which all checks have cost `SHARE` of the time."""
        if self._every or not step_s:
            return self._every or 1
        paid_at = self._first_at + (self.cost_s + self._last_cost_s) / (SHARE * step_s)
        return max(1, math.ceil(paid_at) - step)

    def _judge(
        self, step: int, tensors: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]], by_rank: list[list[int]]
    ) -> None:
        """Raise the error that the ranks' facts show (*collective*). Rows end with: suspected, copies differ, wait."""
        # Compared first: a non-finite rank soon changes the other ranks, each in a different way.
        has_diverged = any(row[:-3] != by_rank[0][:-3] for row in by_rank)
        has_diverged |= any(differ for *_, differ, _ in by_rank)
        self._failure = None
        if not has_diverged and any(suspected for *_, suspected, _, _ in by_rank):
            bad_names: list[list[str]] = self._world.gather(finite.not_finite(tensors))
            has_diverged = any(names != bad_names[0] for names in bad_names)  # a difference that the digests missed
            if bad_names[0] and not has_diverged:
                self._failure = finite.error(step, bad_names[0], f"{self._remedy()} {self._doubt(step - 1)}".strip())
        if has_diverged:
            self._failure = ProofError(
                f"The replicas are not the same bits after step {step}: "
                f"{self._describe(tensors, copies) or _UNSTEADY}; before, they were {self._history()}. "
                "Code that treats ranks differently does this, such as weights drawn anew on each rank, whose random "
                "numbers differ (reset_parameters), or changed in forward by its own share of the samples; so do "
                "faulty memory and faulty copies between GPUs; continue from an earlier checkpoint."
            )
        if self._failure is not None:
            raise self._failure

    def _describe(self, tensors: Mapping[str, Tensor], copies: Sequence[Mapping[str, Tensor]]) -> str:
        """Return a clause on differing ranks and copies, and their tensors (*collective*)."""
        differences: dict[str, list[tuple[str, float | None]]] = {}
        for name, ranks, gap in compare(self._world, tensors):
            subject = f"{ranks_named(ranks)} {'differs from the others' if len(ranks) == 1 else 'differ'}"
            differences.setdefault(subject, []).append((name, gap))
        local: dict[str, list[tuple[str, float]]] = {}
        for copy in copies:
            for name in find_differing(tensors, copy):
                subject = f"rank {self._world.rank}'s copy on {copy[name].device} differs from its own weights"
                local.setdefault(subject, []).append((name, distance(tensors[name].cpu(), copy[name].cpu())))
        for copy_differences in self._world.gather(local):
            differences |= copy_differences
        return "; ".join(f"{subject} in {_list_gaps(gaps)}" for subject, gaps in differences.items())

    def _doubt(self, step: int) -> str:
        """Return a sentence on a possible divergence; "" if compared after `step`."""
        if self._world.size == 1 or step <= (self._begun if self.agreed_at is None else self.agreed_at):
            return ""
        return (
            f"The replicas were {self._history()}; --verify-every 1, from an earlier checkpoint, shows whether one of "
            "them diverged since, and changed the others."
        )

    def _history(self) -> str:
        return "never compared" if self.agreed_at is None else f"the same after step {self.agreed_at}"


def facts(tensors: Mapping[str, Tensor], device: torch.device, *values: int) -> Tensor:
    """Return each device kind's digest, a non-finite flag, and `values`. Does not synchronize.

    The result is (kinds of device + 1 + values,) int64 on `device`.
    """
    groups: dict[str, list[Tensor]] = {}  # in order of appearance: the same on every rank
    for tensor in tensors.values():
        groups.setdefault(tensor.device.type, []).append(tensor)
    suspected = torch.stack([finite.suspect(group).to(device) for group in groups.values()]).any()
    # Filled on the device: the host would wait for a copy.
    numbers = [torch.full((), value, dtype=torch.int64, device=device) for value in values]
    return torch.stack([*(digest(group).to(device) for group in groups.values()), suspected.long(), *numbers])


def _list_gaps(gaps: Sequence[tuple[str, float | None]]) -> str:
    clauses = []
    for name, gap in gaps[: finite.MOST_NAMES]:
        size = "" if gap is None else f" by up to {gap:.3g}" if math.isfinite(gap) else " by a value that is not finite"
        clauses.append(f"{name}{size}")
    omitted = len(gaps) - len(clauses)
    return f"{', '.join(clauses)}, and in {counted(omitted, 'more tensor')}" if omitted else " and ".join(clauses)

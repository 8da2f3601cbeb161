"""A claim about a run's records, and the check that judging it comes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import counted
from ..proof import Check


@dataclass(frozen=True)
class Claim:
    """What is claimed, whatever becomes of it; the fields are those of `Check`."""

    name: str
    says: str
    tolerance: str = ""

    def judged(self, problems: Iterable[str], *, times: int, found: str = "") -> Check:
        """Return the check: it fails with the first of the `problems`, clauses that name the place, if there is any."""
        first, *others = [*problems, ""]
        outcome = Check.FAILS if first else Check.HOLDS if times else Check.OPEN
        if first:
            more = len(others) - 1
            found = f"{first}; and {counted(more, 'more finding')}" if more > 0 else first
        return Check(
            name=self.name, claim=self.says, outcome=outcome, times=times, tolerance=self.tolerance, found=found
        )

    def open(self, why: str) -> Check:
        """Return the check of what could not be judged."""
        return Check(name=self.name, claim=self.says, outcome=Check.OPEN, tolerance=self.tolerance, found=why)

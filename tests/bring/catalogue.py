"""The catalogue of loops: what each is expected to do.

    @loop("two", "three", accumulated=Outcome.REFUSED)
    def passes(session: Any, how: str) -> Numbers: ...

A loop runs on a session and on its plain twin. It returns numbers that do not depend on the ranks. The first one is a
checksum of the weights, which a resumed run reproduces bit for bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any

Numbers = list[float]
Function = Callable[[Any, str], Numbers]
LAW = 1e-9
MODULES = ("passes", "gradients", "optimizing", "modules", "losses", "evaluation", "loaders")


class Outcome(Flag):
    """Outcome of a run, or the set of outcomes that are allowed."""

    RIGHT = auto()
    """The numbers of the reference."""
    TOLD = auto()
    """Other numbers, and a warning."""
    REFUSED = auto()
    """An error of lockstep's own, in one sentence."""
    DIFFERENT = auto()
    """Other numbers, and no warning."""
    FAILED = auto()
    """A traceback of any other error."""
    HUNG = auto()
    """No end within the limit."""
    SKIPPED = auto()
    """Not run: the loop counts micro-batches, ends too early to be resumed, or has no state."""

    def __str__(self) -> str:
        return "|".join(member.name or "" for member in self).lower()


RIGHT, TOLD, REFUSED, SKIPPED = Outcome.RIGHT, Outcome.TOLD, Outcome.REFUSED, Outcome.SKIPPED


@dataclass(frozen=True)
class Case:
    """A loop in one variant, with the allowed outcomes."""

    module: str
    name: str
    how: str
    outcome: Outcome
    """On several ranks."""
    alone: Outcome
    """On one rank."""
    accumulated: Outcome
    """With two micro-batches, on any number of ranks."""
    resumed: Outcome
    """Killed and resumed on the same world."""
    has_plain: bool
    """Whether the plain twin is the reference; else one rank is."""
    has_accumulated_plain: bool
    """Whether it is also the reference under accumulation."""
    quick: bool
    """Whether `make test` runs it, on two ranks."""
    needs_processes: bool = False
    """Whether ranks of a pool cannot run it: it starts data workers."""
    saves_by_epoch: bool = False
    """Whether checkpoints are those of epochs' ends: the loop counts its batches itself, from 0 after a resume."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.name}-{self.how}" if self.how else self.name

    def allowed(self, size: int, accumulate: int) -> Outcome:
        """Return the allowed outcomes on `size` ranks."""
        plainly = self.alone if size == 1 else self.outcome
        if accumulate == 1:
            return plainly
        return self.accumulated if self.accumulated else plainly

    def function(self) -> Function:
        """Return the loop."""
        function: Function = getattr(importlib.import_module(f"tests.bring.{self.module}"), self.name)
        return function


CASES: dict[str, Case] = {}


def loop(
    *hows: str,
    outcome: Outcome = RIGHT,
    alone: Outcome | None = None,
    accumulated: Outcome | None = None,
    resumed: Outcome | None = None,
    has_plain: bool = True,
    has_accumulated_plain: bool = True,
    quick: bool = False,
    needs_processes: bool = False,
    saves_by_epoch: bool = False,
    **options: Any,
) -> Callable[[Function], Function]:
    """Register variants of a loop. `alone` and `accumulated` default to `outcome`; `options` are the session's.

    A loop that is right on any world resumes exactly, unless `resumed` is given; others are not resumed.
    """

    def register(function: Function) -> Function:
        module = function.__module__.rpartition(".")[2]
        for how in hows or ("",):
            case = Case(
                *(module, function.__name__, how, outcome),
                alone=outcome if alone is None else alone,
                accumulated=accumulated or Outcome(0),
                resumed=(RIGHT if outcome == RIGHT else SKIPPED) if resumed is None else resumed,
                has_plain=has_plain,
                has_accumulated_plain=has_plain and has_accumulated_plain,
                quick=quick,
                needs_processes=needs_processes,
                saves_by_epoch=saves_by_epoch,
                options=options,
            )
            assert str(case) not in CASES, case
            CASES[str(case)] = case
        return function

    return register


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    for module in MODULES:
        importlib.import_module(f"tests.bring.{module}")
    return CASES

"""A finding: what was looked at, what was found, and what to do about it. All of it fits into JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..failures import one_line

GREEN, YELLOW, RED, UNCHECKED = STATES = ("green", "yellow", "red", "unchecked")
"""Fine; a job runs, but slowly or at a risk; no job can run; not looked at, for a reason that is told."""

GROUPS = ("host", "devices", "network", "collectives", "disk")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    group: str
    name: str
    state: str
    words: str
    """What was found."""
    fix: str = ""
    """What to do about it, where the state is yellow or red."""
    value: float | None = None
    unit: str = ""
    """Of the value: bytes, s, bytes/s."""
    ranks: tuple[int, ...] = ()
    """Ranks that it concerns; empty where it is about all of them together."""

    def __post_init__(self) -> None:
        assert self.group in GROUPS, self.group
        assert self.state in STATES, self.state
        assert bool(self.fix) == (self.state in (YELLOW, RED)), self

    def to_json(self) -> dict[str, Any]:
        """Return the finding as `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Finding:
        """Return the finding that `to_json` wrote."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})


@dataclass(frozen=True)
class Subject:
    """What is looked at, from which a finding comes."""

    group: str
    name: str
    value: float | None = None
    unit: str = ""
    ranks: tuple[int, ...] = ()

    def found(self, state: str, words: str, fix: str = "") -> Finding:
        """Return what was found."""
        return Finding(**vars(self), state=state, words=words, fix=fix)

    def green(self, words: str) -> Finding:
        """Return that it is fine."""
        return self.found(GREEN, words)

    def yellow(self, words: str, fix: str) -> Finding:
        """Return that a job runs, but slowly or at a risk."""
        return self.found(YELLOW, words, fix)

    def red(self, words: str, fix: str) -> Finding:
        """Return that no job can run."""
        return self.found(RED, words, fix)

    def unchecked(self, why: str) -> Finding:
        """Return that it was not looked at."""
        return self.found(UNCHECKED, why)


def failed(about: Subject, error: BaseException) -> Finding:
    """Return the finding for something that could not be looked at, because looking raised `error`."""
    return about.yellow(
        f"it could not be looked at: {one_line(error)}",
        "look at this by hand; whether it keeps a job from running is not known",
    )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in the order of their groups, with those of several ranks that are alike as one."""
    ranks: dict[Finding, list[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), []).extend(finding.ranks)
    alike = [replace(finding, ranks=tuple(sorted(set(who)))) for finding, who in ranks.items()]
    order: dict[tuple[str, str], int] = {}
    for finding in alike:
        order.setdefault((finding.group, finding.name), len(order))
    return sorted(alike, key=lambda each: (GROUPS.index(each.group), order[each.group, each.name], each.ranks))


def verdict(findings: Sequence[Finding]) -> str:
    """Return the worst state there is: red where no job can run."""
    return next((state for state in (RED, YELLOW) if any(each.state == state for each in findings)), GREEN)

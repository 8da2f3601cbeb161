"""How `lockstep doctor` shows its findings: a line each, by group, and what they amount to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ..errors import counted
from ..screen import Screen

if TYPE_CHECKING:
    from ..doctor.finding import Finding

_STYLES = {"green": "green", "yellow": "bold yellow", "red": "bold red", "unchecked": "dim"}
_MEANINGS = {
    "red": "no job can run here",
    "yellow": "a job can run; what is yellow costs speed or is a risk",
    "green": "a job can run",
}
_ALIKE = 3  # green lines of one name that are shown, where many hosts give as many


def show(findings: Sequence[Finding], hosts: Sequence[str], accelerator: str, took_s: float) -> None:
    """Print the findings by group, and what they amount to."""
    screen, several = Screen(), len(set(hosts)) > 1
    where = counted(len(set(hosts)), "host") if several else hosts[0]
    screen.say((f"{counted(len(hosts), 'rank')} on {where}, {accelerator}", "dim"))
    shown: Counter[str] = Counter()
    for group, members in groupby(findings, key=lambda each: each.group):
        screen.say((group, "bold"))
        for each in members:
            shown[each.name] += each.state == "green"
            if each.state == "green" and shown[each.name] > _ALIKE:
                continue
            on = list(dict.fromkeys(hosts[rank] for rank in each.ranks)) if several else []
            at = f" (on {', '.join(on[:3])}{' …' * bool(on[3:])})" if on else ""
            state = (f"  {each.state:<9}", _STYLES[each.state])
            screen.say(state, f" {each.name:<18} {each.words}", (at, "dim"))
            if each.fix:
                screen.say(" " * 31, ("fix: ", "bold"), each.fix)
    count, worst = Counter(each.state for each in findings), verdict(findings)
    counts = ", ".join(f"{count[state]} {state}" for state in _STYLES if count[state])
    screen.say((worst, _STYLES[worst]), f": {_MEANINGS[worst]} ({counts}; {took_s:.1f} s)")


def verdict(findings: Sequence[Finding]) -> str:
    """Return the worst state there is: red where no job can run."""
    states = {each.state for each in findings}
    return next(state for state in _MEANINGS if state in states or state == "green")

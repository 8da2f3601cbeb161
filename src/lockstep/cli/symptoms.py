"""How `lockstep doctor` shows its findings: as wide as a terminal is, and elsewhere a line each, for who searches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..errors import counted
from ..screen import Screen, line

if TYPE_CHECKING:
    from ..doctor.finding import Finding

_STYLES = {"green": "green", "yellow": "bold yellow", "red": "bold red", "unchecked": "dim"}
_MEANINGS = {
    "red": "no job can run here",
    "yellow": "a job can run; what is yellow costs speed or is a risk",
    "green": "a job can run",
}
_STATE_WIDE, _NAME_WIDE = 11, 18
_ALIKE = 3  # green lines of one name that are shown, where many hosts give as many


def show(findings: Sequence[Finding], hosts: Sequence[str], accelerator: str, took_s: float) -> None:
    """Print the findings by group, and what they amount to."""
    screen = Screen()
    where = hosts[0] if len(set(hosts)) == 1 else counted(len(set(hosts)), "host")
    screen.say((f"{counted(len(hosts), 'rank')} on {where}, {accelerator}", "dim"))
    for group, members in groupby(findings, key=lambda each: each.group):
        screen.say((group, "bold"))
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(width=_STATE_WIDE, no_wrap=True)
        table.add_column(width=_NAME_WIDE, overflow="fold")
        table.add_column(overflow="fold", ratio=1)
        for state, name, told in _rows(members, hosts):
            table.add_row(state, name, told)
            if not screen.is_terminal:
                screen.say(f"{state.plain:<{_STATE_WIDE}} {name:<{_NAME_WIDE}} {told.plain}")
        if screen.is_terminal:
            screen.print(table)
    count, worst = Counter(each.state for each in findings), verdict(findings)
    counts = ", ".join(f"{count[state]} {state}" for state in _STYLES if count[state])
    screen.say((worst, _STYLES[worst]), f": {_MEANINGS[worst]} ({counts}; {took_s:.1f} s)")


def verdict(findings: Sequence[Finding]) -> str:
    """Return the worst state there is: red where no job can run."""
    states = {each.state for each in findings}
    return next(state for state in _MEANINGS if state in states or state == "green")


def _rows(findings: Iterator[Finding], hosts: Sequence[str]) -> Iterator[tuple[Text, str, Text]]:
    """Yield (state, name, what is told) of findings, and of their fixes; of green ones that are alike the first."""
    shown: Counter[str] = Counter()
    for each in findings:
        shown[each.name] += each.state == "green"
        if each.state == "green" and shown[each.name] > _ALIKE:
            continue
        on = list(dict.fromkeys(hosts[rank] for rank in each.ranks))
        where = f" (on {', '.join(on[:3])}{' …' if on[3:] else ''})" if on and len(set(hosts)) > 1 else ""
        yield Text(f"  {each.state}", _STYLES[each.state]), each.name, line(each.words, (where, "dim"))
        if each.fix:
            yield Text(), "", line(("fix: ", "bold"), each.fix)

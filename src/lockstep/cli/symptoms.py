"""How `lockstep doctor` shows its findings: as wide as a terminal is, and elsewhere a line each, for who searches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import counted

if TYPE_CHECKING:
    from ..doctor.finding import Finding

_STYLES = {"green": "green", "yellow": "bold yellow", "red": "bold red", "unchecked": "dim"}
_STATE_WIDE, _NAME_WIDE = 9, 18
_ALIKE = 3
"""Green lines of one name that are shown, where many hosts give as many."""


def show(findings: Sequence[Finding], hosts: Sequence[str], accelerator: str, took_s: float) -> None:
    """Print the findings by group, and what they amount to."""
    console = Console(highlight=False)
    where = f"on {hosts[0]}" if len(set(hosts)) == 1 else f"on {counted(len(set(hosts)), 'host')}"
    _line(console, Text(f"{counted(len(hosts), 'rank')} {where}, {accelerator}", "dim"))
    for group, members in groupby(findings, key=lambda each: each.group):
        _line(console, Text(group, "bold"))
        rows = [row for each in _fewer(list(members)) for row in _rows(each, hosts)]
        if console.is_terminal:
            console.print(_table(rows))
        else:
            for state, name, said in rows:
                _line(console, Text(f"  {state.plain:<{_STATE_WIDE}} {name:<{_NAME_WIDE}} {said.plain}"))
    console.print(_verdict(findings, took_s), soft_wrap=not console.is_terminal)


def _line(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)


def _fewer(members: list[Finding]) -> list[Finding]:
    """Return the findings of a group without green ones of which several of the same name are there already."""
    shown: list[Finding] = []
    for each in members:
        alike = sum(other.name == each.name and other.state == "green" for other in shown)
        if each.state != "green" or alike < _ALIKE:
            shown.append(each)
    return shown


def _rows(each: Finding, hosts: Sequence[str]) -> list[tuple[Text, str, Text]]:
    """Return (state, name, what is said) of a finding, and of its fix."""
    said = Text(each.words)
    if who := _who(each, hosts):
        said.append(f" ({who})", "dim")
    rows = [(Text(each.state, _STYLES[each.state]), each.name, said)]
    if each.fix:
        rows.append((Text(""), "", Text.assemble(("fix: ", "bold"), each.fix)))
    return rows


def _who(each: Finding, hosts: Sequence[str]) -> str:
    """Return the ranks that a finding is about, with their hosts where there are several; "" where that is nothing new.

    That is: about the only rank, about all of them and good news, or about none in particular.
    """
    ranks = each.ranks
    everybody = len(ranks) == len(hosts)
    if len(hosts) == 1 or not ranks or (everybody and each.state in ("green", "unchecked")):
        return ""
    if everybody:
        return "both ranks" if len(hosts) == 2 else f"all {len(hosts)} ranks"
    named = f"rank{'s' * (len(ranks) > 1)} {_spans(ranks)}"
    on = list(dict.fromkeys(hosts[rank] for rank in ranks))
    if len(set(hosts)) == 1:
        return named
    return f"{named} on {', '.join(on[:3])}{' …' if len(on) > 3 else ''}"


def _spans(ranks: Sequence[int]) -> str:
    """Return ranks with neighbours drawn together: 0–3, 6."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("–".join(map(str, span)) for span in spans)


def _table(rows: Sequence[tuple[Text, str, Text]]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column(width=_STATE_WIDE, no_wrap=True)
    table.add_column(width=_NAME_WIDE, overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for state, name, said in rows:
        table.add_row("", state, Text(name), said)
    return table


def _verdict(findings: Sequence[Finding], took_s: float) -> Text:
    count = {state: sum(each.state == state for each in findings) for state in _STYLES}
    told = ", ".join(f"{number} {state}" for state, number in count.items() if number)
    if count["red"]:
        state, words = "red", "no job can run here"
    elif count["yellow"]:
        state, words = "yellow", "a job can run; what is yellow costs speed or is a risk"
    else:
        state, words = "green", "a job can run"
    return Text.assemble((state, _STYLES[state]), f": {words} ({told}; {took_s:.1f} s)")

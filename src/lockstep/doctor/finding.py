"""A finding: its subject, its result, its remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..monitor.bounded import Late, within
from ..monitor.failures import one_line

GREEN, YELLOW, RED, UNCHECKED = "green", "yellow", "red", "unchecked"
"""Fine; a job runs, but slowly or at a risk; no job can run; not examined, with the reason in words."""
GROUPS = ("host", "devices", "network", "collectives", "disk")

KIB, MIB, GIB = 2**10, 2**20, 2**30
_UNITS: dict[str, dict[str, float]] = {
    "bytes": {"GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1},
    "bytes/s": {"GB/s": 1e9, "MB/s": 1e6, "KB/s": 1e3},  # as links are sold: 1.25 GB/s is 10 Gbit/s
    "s": {"s": 1, "ms": 1e-3, "µs": 1e-6},
}


@dataclass(frozen=True)
class Finding:
    """The result of one probe; `value` is in `unit`.

    `ranks` have this result: one per host for a finding on hosts, none for a joint finding.
    """

    group: str
    name: str
    state: str
    words: str
    fix: str = ""
    value: float | None = None
    unit: str = ""
    ranks: tuple[int, ...] = ()


Probe = Callable[[], Iterable[Finding]]


def conclude(
    group: str, name: str, words: str, fix: str = "", *, bad: str = YELLOW, value: float | None = None, unit: str = ""
) -> Finding:
    """Return a finding: green without a `fix`, else `bad`."""
    return Finding(group, name, bad if fix else GREEN, words, fix, value, unit)


def look(group: str, name: str, probe: Probe, limit_s: float, hung: str = YELLOW) -> list[Finding]:
    """Return the findings of `probe`, or one of state `hung` if it hangs, as on a network disk without a server."""
    try:
        return within(limit_s, lambda: list(probe()), f"doctor {name}")
    except Late:
        fix = "find out what hangs: a network disk, a name server, a driver, an import"
        return [conclude(group, name, f"the system gave no answer within {limit_s:g} s", fix, bad=hung)]
    except Exception as error:
        fix = "check it by hand: it may keep a job from running"
        return [conclude(group, name, f"the check failed: {one_line(error)}", fix)]


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by group and name; merge equal ones of several ranks."""
    ranks: dict[Finding, set[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, ranks=()), set()).update(finding.ranks)
    names = list(dict.fromkeys(finding.name for finding in ranks))
    alike = [replace(finding, ranks=tuple(sorted(found_by))) for finding, found_by in ranks.items()]
    return sorted(alike, key=lambda finding: (GROUPS.index(finding.group), names.index(finding.name), finding.ranks))


def shown(number: float, unit: str) -> str:
    """Format bytes, bytes/s or s: 64 MiB, 1.25 GB/s, 0.15 ms."""
    units = _UNITS[unit]
    name = next((name for name, factor in units.items() if number >= factor), [*units][-1])
    scaled = number / units[name]
    return f"{scaled:,.0f} {name}" if scaled >= 100 else f"{scaled:.3g} {name}"

"""Looking at things that may hang: a network disk whose server has gone, a name server that does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..bounded import Late, within
from .finding import YELLOW, Finding, Subject, failed

Probe = Callable[[], Iterable[Finding]]


def look(about: Subject, probe: Probe, limit_s: float, hung: str = YELLOW) -> list[Finding]:
    """Return what `probe` finds; a finding too where it raises, or does not come back within `limit_s` seconds.

    It runs in a thread of its own, which is left behind where it hangs; `hung` is the state that this means.
    """
    found: list[Finding] = []
    try:
        within(limit_s, lambda: found.extend(probe()), f"doctor {about.name}")
    except Late:
        words = f"the system gave no answer within {limit_s:g} s"
        return [about.found(hung, words, "find out what hangs: a network disk, a name server, a driver, an import")]
    except BaseException as error:
        return [*found, failed(about, error)]
    return found

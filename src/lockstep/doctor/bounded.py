"""Looking at things that may hang: a network disk whose server has gone, a name server that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from .finding import Finding, Subject, failed


def look(group: str, name: str, probe: Callable[[], Iterable[Finding]], limit_s: float) -> list[Finding]:
    """Return what `probe` finds; a finding too where it raises, or does not come back within `limit_s` seconds.

    It runs in a thread of its own, which is left behind where it hangs.
    """
    found: list[Finding] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.extend(probe())
        except BaseException as error:
            raised.append(error)

    looking = threading.Thread(target=run, daemon=True, name=f"doctor {name}")
    looking.start()
    looking.join(limit_s)
    if looking.is_alive():
        words = f"the system gave no answer within {limit_s:g} s"
        fix = "find out what hangs: a network disk, a name server or a driver that does not answer"
        return [Subject(group, name).red(words, fix)]
    return [failed(group, name, raised[0])] if raised else list(found)

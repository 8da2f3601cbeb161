"""Audit a command: record its ranks, replay them in one process, judge."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import RequestError, RunError
from ..printable import visible
from . import REFUSED, start

if TYPE_CHECKING:
    from .judge import Verdict


class Audited(NamedTuple):
    """A command to audit, the processes of its ranks, and its limits."""

    about: str
    processes: Callable[[int], list[start.Process]]
    """Returns the processes of so many ranks."""
    ranks: int
    steps: int = 3
    float64: bool = False
    limit_s: float = 300.0
    hint: str = ""
    """For a script that fails."""

    def run(self, mode: str, folder: Path, ranks: int, **options: object) -> int | None:
        """Record or replay; return the exit code, None if the command was ended."""
        return start.run(mode, self.processes(ranks), folder, limit_s=self.limit_s, float64=self.float64, **options)


def measure(audited: Audited, folder: Path) -> Verdict:
    """Record and replay in `folder`, which is empty; return the verdict.

    Raises `RequestError` for a script whose steps cannot be judged, `RunError` for one that fails.
    """

    def refuse(reason: str) -> RequestError:
        return RequestError(f"{audited.about} cannot be judged: {reason}.")

    code = audited.run("record", folder, audited.ranks, steps=audited.steps)
    ranks = [*folder.glob("rank*")]
    if code and not (ranks and all((rank / "final.pt").exists() for rank in ranks)):
        _print_output(folder / "record.txt")
        raise RunError(f"{audited.about} failed: its own message is above{audited.hint}.")
    start.remove_new_files(folder)  # a script may continue from files that it finds
    stepping = len([*folder.glob("rank*/window0.pt")])
    if (folder / REFUSED).exists():
        raise refuse((folder / REFUSED).read_text())
    if not stepping:
        limit = f" within {audited.limit_s:g} s (--timeout)" if code is None else ""
        raise refuse(f"no optimizer has stepped after a model's call{limit}")
    if stepping < len(ranks):
        raise refuse(f"an optimizer steps on {stepping} of {len(ranks)} ranks alone")
    if stepping < 2:
        raise refuse("it has one rank; start several, as by --devices 2")
    from . import judge  # late: it imports torch
    from .recording import TOGETHER, TURNS, Recording

    record, recorded = Recording(folder), code
    passes, missed = [TOGETHER], list[str]()
    while passes:
        code = audited.run("replay", folder, 1, passes=passes)
        start.remove_new_files(folder)
        complete = [name for name in passes if record.read_replay(record.steps - 1, name) is not None]
        if code and not complete and not (folder / REFUSED).exists():
            _print_output(folder / "replay.txt")
        if not complete or (folder / REFUSED).exists():
            missed = [name for name in passes if name not in (*complete, TOGETHER, TURNS)]
            break
        if passes == [TOGETHER] and judge.takes_turns(record):
            passes = [TURNS]
        elif passes in ([TOGETHER], [TURNS]):
            passes = judge.list_passes(record)
        else:
            passes = [name for name in passes if name not in complete]
    verdict = judge.judge(record)
    if missed:
        verdict.refuse(f"it failed in the replays that show causes ({', '.join(missed)})")
    if recorded != 0:
        ending = "did not end in time" if recorded is None else f"failed with exit code {recorded}"
        verdict.unseen.append(f"what follows the {verdict.steps} steps, since the script {ending} there")
    return verdict


def _print_output(path: Path) -> None:
    """Print the output of the command."""
    sys.stderr.write(visible(path.read_text(errors="replace")))

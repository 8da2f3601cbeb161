"""One trial of a variant: a command of its own, in a folder of its own, and what became of it."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LockstepError, RequestError, Stopped
from ..files import own_folder, parse_json, read, understanding, write_json
from ..runs import folders
from ..verify import commands
from . import measured
from .grid import Words

_RESULT = "trial.json"
RUN = "run"
"""The run's folder, in that of its trial."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one command has measured; or why it has not."""

    told: dict[str, Any]
    """What `measured.Probe`, or the records of a whole training, tell; empty where it failed."""
    seconds: float
    """From its start to its end."""
    to_first_step_s: float | None = None
    failed: str = ""

    @property
    def step_s(self) -> list[float]:
        """Seconds of each timed step."""
        return [float(each) for each in self.told["step_s"]]


def done(folder: Path) -> Trial | None:
    """Return the trial that was run in that folder before; None where none came to its end."""
    path = folder / _RESULT
    if not path.exists():
        return None
    with understanding(path):
        return Trial(**parse_json(read(path)))


def run(
    name: str,
    folder: Path,
    watched: Words,
    *,
    limit_s: float = math.inf,
    told: Callable[[], dict[str, Any]] | None = None,
    enough: Callable[[], bool] | None = None,
) -> Trial:
    """Run a variant's command, `watched` by a verb of lockstep's; note in `folder` what became of it.

    What fails is a trial too. `told` returns what it has measured, by default what a probe has left; as soon as
    `enough` says so, the command is stopped, which is no failure.

    Raises KeyboardInterrupt, `Stopped` where somebody else stops the command, and OSError where the folder cannot be
    written.
    """
    own_folder(folder)
    begun_s, begun_time = time.monotonic(), time.time()
    words = (sys.executable, "-P", "-m", "lockstep", *watched)
    failed, found = "", {}
    try:
        commands.run(name, [words], [folder / "log"], limit_s=limit_s, enough=enough)
        found = _probed(folder) if told is None else told()
    except Stopped:
        raise
    except LockstepError as error:
        failed = str(error).removeprefix(f"The variant {name} failed: ")
        if isinstance(error, RequestError):
            failed = f"refused: {failed}"
    first = found.get("first_step_time")
    trial = Trial(
        told=found,
        seconds=time.monotonic() - begun_s,
        to_first_step_s=None if first is None else first - begun_time,
        failed=failed,
    )
    write_json(folder / _RESULT, vars(trial))
    return trial


def once(name: str, folder: Path, watched: Words, *, limit_s: float) -> Trial:
    """Return the trial that was run in `folder` before; where none was, or it failed, run it as `run` does."""
    before = done(folder)
    if before is not None and not before.failed:
        return before
    make_anew(folder)
    return run(name, folder, watched, limit_s=limit_s)


def _probed(folder: Path) -> dict[str, Any]:
    path = folder / RUN / measured.FILE
    with understanding(path):
        told: dict[str, Any] = parse_json(read(path))
        return told


def make_anew(folder: Path) -> None:
    """Make an empty folder: what was begun there and came to no end has left runs, which are not continued."""
    if (run_folder := folder / RUN).is_dir():
        folders.check_free(run_folder)  # a comparison that was killed may have left one that trains on
    if folder.exists():
        shutil.rmtree(folder)
    own_folder(folder)

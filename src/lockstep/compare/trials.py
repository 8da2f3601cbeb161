"""Run a variant's command in its own folder; keep the result."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LockstepError, RequestError, Stopped
from ..files import own_folder, understanding, write_json
from ..runs import folders
from ..verify import commands
from . import measured
from .grid import Words
from .records import FILE, json_of, record

RUN = "run"  # the run's folder, in that of its trial
_RESULT = "trial.json"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one command, or why it failed."""

    results: dict[str, Any]  # of `measured`, or of a whole training; empty if it failed
    seconds: float
    to_first_step_s: float | None = None
    failed: str = ""


def done(folder: Path) -> Trial | None:
    """Return the trial in a folder; None if it failed or is missing."""
    fields = json_of(folder / _RESULT)
    with understanding(folder / _RESULT):
        return Trial(**fields) if fields and not fields["failed"] else None


def measure(name: str, folder: Path, words: Words, *, limit_s: float) -> Trial:
    """Return the trial of a variant whose first losses are compared; `words` follow the internal verb.

    If the trial fails before those losses, such as when ranks cannot draw as one device does, measures the variant
    again with its own draws; "undrawn" in the result is the reason. Raises as `once` does.
    """
    begun_s = time.monotonic()
    trial = once(name, folder, ("compare", "measured", *words), limit_s=limit_s)
    left_s, run = limit_s - (time.monotonic() - begun_s), folder / RUN
    steps = len(record(run).losses) if (run / FILE).exists() else 0  # a refused run leaves no folder
    if not trial.failed or left_s <= 0 or steps >= measured.COMPARED:
        return trial

    def result() -> dict[str, Any]:
        costs = json_of(run / measured.FILE)
        return costs and costs | {"undrawn": trial.failed.removeprefix("refused: ")}

    return once(name, folder, ("compare", "measured-as-is", *words), limit_s=limit_s, result=result)


def once(
    name: str,
    folder: Path,
    words: Words,
    *,
    limit_s: float = math.inf,
    result: Callable[[], dict[str, Any]] | None = None,
    is_enough: Callable[[], bool] | None = None,
    goes_on: bool = False,
) -> Trial:
    """Return the trial in `folder`, or run lockstep with `words` for it.

    A failure is a trial too. `result` returns the measurements, by default those of `measured`. Stops the command,
    without failure, as soon as `is_enough` returns True. Deletes the files of an interrupted trial, unless the command
    `goes_on` with them. Raises KeyboardInterrupt, `Stopped` if another process stops the command, OSError if the folder
    cannot be written, and `RequestError` if an earlier command still uses it.
    """
    if trial := done(folder):
        return trial
    make_free(folder, keeps=goes_on)
    begun_s, begun_time = time.monotonic(), time.time()
    failed, costs = "", {}
    try:
        commands.run(name, [commands.python("lockstep", *words)], [folder / "log"], limit_s=limit_s, enough=is_enough)
        costs = result() if result else json_of(folder / RUN / measured.FILE)
        failed = "" if costs else "it has left no measurements; its log may say why."
    except Stopped:
        raise
    except LockstepError as error:
        failed = "refused: " * isinstance(error, RequestError) + reason(name, error)
    first_time = costs.get("first_step_time")
    to_first_step_s = None if first_time is None else first_time - begun_time
    trial = Trial(results=costs, seconds=time.monotonic() - begun_s, to_first_step_s=to_first_step_s, failed=failed)
    write_json(folder / _RESULT, vars(trial))
    return trial


def reason(name: str, error: LockstepError) -> str:
    """Return the reason of a variant's failure, without its name."""
    return str(error).removeprefix(f"The variant {name} failed: ")


def make_free(folder: Path, *, keeps: bool = False) -> None:
    """Make a folder that no run uses, empty unless it `keeps` its files."""
    folders.check_free(folder / RUN)  # a killed comparison may have left a command that still trains
    if folder.exists() and not keeps:
        shutil.rmtree(folder)
    own_folder(folder)

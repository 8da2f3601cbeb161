"""The runs of a folder, as a table: when, where, what differs in them, what they came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import locks
from ..errors import RequestError
from ..files import parse_json, read, understanding
from ..options import read_named

_BORING = ("output", "resume", "quiet", "init-method", "launcher", "data-dir")
_STATES = {0: "done", 1: "failed", 2: "refused", 3: "proof failed", 75: "stopped"}


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A run; what its records do not tell is None or empty."""

    name: str
    folder: Path
    date: str
    host: str
    options: dict[str, Any]
    state: str
    accuracy: float | None
    samples_per_s: float | None
    trouble: str = ""
    """Why its records cannot be read."""


def runs(folder: Path) -> list[Listed]:
    """Return the runs below `folder`, at most two levels deep, the newest last."""
    found = sorted({path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/manifest.json")})
    return sorted((_listed(each, folder) for each in found), key=lambda run: run.date)


def differing(found: Sequence[Listed]) -> list[dict[str, Any]]:
    """Return, for each run, the options that are not the same in all."""
    keys = {key for run in found for key in run.options if key not in _BORING}
    vary = sorted(key for key in keys if len({repr(run.options.get(key)) for run in found}) > 1)
    return [{key: run.options[key] for key in vary if key in run.options} for run in found]


def _listed(folder: Path, above: Path) -> Listed:
    name = str(folder.relative_to(above))
    try:
        manifest, summary = (_json(folder / file) for file in ("manifest.json", "summary.json"))
        options = read_named(folder / "config.toml")
        rate = summary.get("samples_per_s") or summary.get("images_per_s")
        return Listed(
            name=name,
            folder=folder,
            date=str(manifest.get("date", "")),
            host=str(manifest.get("host", "")),
            options=options,
            state=_state(folder, summary),
            accuracy=summary.get("top1"),
            samples_per_s=rate,
        )
    except RequestError as error:
        nothing: dict[str, Any] = {"date": "", "host": "", "options": {}, "accuracy": None, "samples_per_s": None}
        return Listed(name=name, folder=folder, state="?", trouble=str(error), **nothing)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with understanding(path):
        found: dict[str, Any] = dict(parse_json(read(path)))
        return found


def _state(folder: Path, summary: dict[str, Any]) -> str:
    """Return how a run stands: a summary without an exit code is that of one that runs, or was killed."""
    code = summary.get("exit")
    if code is not None:
        return _STATES.get(code, f"exit {code}")
    try:
        locks.check_free(folder)
    except RequestError:
        return "running"
    except OSError:  # of somebody else's
        return "unfinished"
    return "killed"

"""What a rank leaves where an agent has started it: why it failed, where torch's looks for it, or what it came to."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from ..failures import Failure
from ..files import write_whole

_OURS = "lockstep"
_VALUE = "value.pickle"


def leave(failure: Failure, path: Path | None) -> None:
    """Write the failure as torch's `record` decorator would, with all that we know of it, where there is a path."""
    if path is None:
        return
    about = {"timestamp": str(int(failure.time)), _OURS: asdict(failure)}
    if trace := getattr(failure.error(), "trace", ""):  # without one, torchrun shows the sentence
        about["py_callstack"] = trace
    told = json.dumps({"message": {"message": failure.sentence, "extraInfo": about}})
    with contextlib.suppress(OSError):  # a full disk must not hide why the rank failed
        write_whole(path, told.encode())


def leave_value(value: bytes, path: Path | None) -> None:
    """Write what the rank came to, beside the file that would have its failure."""
    if path is not None:
        write_whole(path.with_name(_VALUE), value)


def value(path: Path) -> bytes | None:
    """Return what the rank came to whose failure would be at `path`; None while it is not done."""
    with contextlib.suppress(FileNotFoundError):
        return path.with_name(_VALUE).read_bytes()
    return None


def clear(folder: Path) -> None:
    """Remove the failures that lie anywhere in the folder."""
    for path in folder.rglob("*.json"):
        path.unlink()


def find(folder: Path) -> list[Failure]:
    """Return the failures of ours that lie anywhere in the folder."""
    found = []
    for path in folder.rglob("*.json"):
        about = json.loads(path.read_text(encoding="utf-8"))["message"]
        if isinstance(about, dict) and _OURS in about.get("extraInfo", {}):
            found.append(Failure(**about["extraInfo"][_OURS]))
    return found

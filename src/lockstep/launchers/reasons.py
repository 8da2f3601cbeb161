"""Why a rank failed, in the file where torch's elastic agent, torchrun's or ours, looks for the reason."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ..failures import Failure

_OURS = "lockstep"


def leave(failure: Failure, path: Path | None) -> None:
    """Write the failure as torch's `record` decorator would, with all that we know of it, where there is a path."""
    if path is None:
        return
    about = {"timestamp": str(int(failure.time)), _OURS: asdict(failure)}
    if trace := getattr(failure.error(), "trace", ""):  # without one, torchrun shows the sentence
        about["py_callstack"] = trace
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"message": {"message": failure.sentence, "extraInfo": about}}), encoding="utf-8")
    part.replace(path)


def find(folder: Path) -> list[Failure]:
    """Return the failures of ours that lie anywhere in the folder."""
    found = []
    for path in folder.rglob("*.json"):
        about = json.loads(path.read_text(encoding="utf-8"))["message"]
        if isinstance(about, dict) and _OURS in about.get("extraInfo", {}):
            found.append(Failure(**about["extraInfo"][_OURS]))
    return found

"""Where the parts of a checkpoint lie and what they are called."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import stat
from pathlib import Path
from typing import Any

FORMAT = "lockstep checkpoint"
VERSION = 1
STATE = "state.json"
SUMS = "checksums.json"

_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def digest(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def render(value: Any) -> bytes:
    """Return `value` as JSON, byte for byte as it is written, so that a file can be compared as a whole."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def parse(data: bytes) -> Any:
    """Return what JSON `data` holds; ValueError where it is none, or none that anybody could have meant."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def content(path: Path) -> bytes:
    """Return what a file holds; OSError where there is none, or what is there, such as a pipe, may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no file")
    return path.read_bytes()


def free_name(folder: Path, step: int) -> Path:
    """Return the folder for `step`: a resumed run may come again to a step whose older checkpoint is still in use."""
    path, count = folder / f"step-{step:08d}", 1
    while path.exists():
        count += 1
        path = folder / f"step-{step:08d}.{count}"
    return path


def steps(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """Return the checkpoints in `folder` by their numbers, oldest step first."""
    found = [(number, path) for path in folder.iterdir() if (number := numbered(path)) and path.is_dir()]
    return sorted(found)


def numbered(path: Path) -> tuple[int, int] | None:
    """Return the step in a checkpoint's name, and the how-manieth of that step it is; None for other names."""
    match = _FOLDER.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 1)) if match else None

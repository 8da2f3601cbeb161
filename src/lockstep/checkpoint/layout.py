"""File layout and names of a checkpoint."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ..files import foreign

FORMAT, VERSION = "lockstep checkpoint", 1
STATE, SUMS = "state.json", "checksums.json"
LINKS = ("last", "best")
COMPLEX = "complex128"
"""In a tensor file's metadata: the names, a line each, of tensors kept as pairs of real numbers."""

_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def digest(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with open(path, "rb", opener=foreign) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def render(value: Any) -> bytes:
    """Return `value` as JSON, exactly as written. A file can so be compared as a whole."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def linked(link: Path) -> Path:
    """Return the target of `last` or `best`; other paths unchanged.

    Raises OSError for a link that leads elsewhere: in another user's folder it would choose the file to read.
    """
    if link.name not in LINKS or not link.is_symlink():
        return link
    target = link.parent / link.readlink()
    if target.parent != link.parent or numbered(target) is None or target.is_symlink():
        raise OSError(errno.ELOOP, f"it leads to {link.readlink()}, and not to a checkpoint beside it", str(link))
    return target


def free_name(folder: Path, step: int) -> Path:
    """Return an unused folder for `step`. A resumed run may repeat a step whose checkpoint is in use."""
    path, count = folder / f"step-{step:08d}", 1
    while path.exists():
        count += 1
        path = folder / f"step-{step:08d}.{count}"
    return path


def numbered(path: Path) -> tuple[int, int] | None:
    """Return a checkpoint's step, and its number within that step. By name; None for other names."""
    match = _FOLDER.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def steps(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """Return the checkpoints in `folder` with their numbers, oldest step first."""
    found = ((numbered(path), path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted((number, path) for number, path in found if number is not None)

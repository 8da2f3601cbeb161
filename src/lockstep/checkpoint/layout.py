"""File layout and names of a checkpoint."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from ..files import unlinked

FORMAT, VERSION = "lockstep checkpoint", 1
STATE, SUMS = "state.json", "checksums.json"
LINKS = ("last", "best")
COMPLEX = "complex128"
"""Key in a tensor file's metadata: names, one per line, of tensors stored as pairs of real numbers."""

_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def digest(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with open(path, "rb", opener=unlinked) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def render(value: Any) -> bytes:
    """Return the exact bytes of the JSON file for `value`."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def resolve_link(link: Path) -> Path:
    """Return the target of `last` or `best`; return other paths unchanged.

    Raises OSError for a link to another folder: in another user's folder, it would choose the file to read.
    """
    if link.name not in LINKS or not link.is_symlink():
        return link
    target = link.parent / link.readlink()
    if target.parent != link.parent or parse_name(target) is None or target.is_symlink():
        raise OSError(errno.ELOOP, f"it leads to {link.readlink()}, not to a checkpoint in the same folder", str(link))
    return target


def free_name(folder: Path, step: int) -> Path:
    """Return an unused folder name for `step`. A resumed run may repeat a step whose checkpoint still exists."""
    path, count = folder / f"step-{step:08d}", 1
    while path.exists():
        count += 1
        path = folder / f"step-{step:08d}.{count}"
    return path


def parse_name(path: Path) -> tuple[int, int] | None:
    """Return the step in a checkpoint's name, and its number within that step; None for other names."""
    match = _FOLDER.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def list_checkpoints(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """Return the checkpoints in `folder` with their numbers, oldest step first."""
    entries = ((parse_name(path), path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted((number, path) for number, path in entries if number is not None)

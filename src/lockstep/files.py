"""Writing small files so that a reader never finds half of one, whatever kills the writer."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO


def shown(path: Path | None) -> str:
    """Return a path as people write it: below the working folder, from there; "" for none."""
    if path is None:
        return ""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def sync_folder(folder: Path) -> None:
    """Return once the folder's entries (names, not contents) are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path`, atomically: the old file or the new one is there, whole, at any moment.

    Raises OSError where the disk does not take it; the old file is then untouched.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_whole(file: BinaryIO, data: bytes) -> None:
    """Append `data` to an unbuffered file that was opened to append; what a full disk takes of it is taken back.

    Raises OSError where the disk does not take all of it; the file is then as it was.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        # A nearly full disk takes a part without an error, and refuses the rest at the next try.
        sent = 0
        while sent < len(data):
            sent += file.write(data[sent:])
    except OSError:
        file.truncate(size)
        raise


def legal(value: Any) -> Any:
    """Return `value` with each number that JSON lacks replaced by None, at any depth.

    JSON has no NaN and no infinities. The rule here is one for all files: such a number is written as `null`, and
    directly in an object its text is kept beside it: `{"loss": NaN}` becomes `{"loss": null, "loss_repr": "nan"}`.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        clean: dict[str, Any] = {}
        for name, item in value.items():
            clean[name] = legal(item)
            if isinstance(item, float) and not math.isfinite(item):
                clean[f"{name}_repr"] = repr(item)
        return clean
    if isinstance(value, list | tuple):
        return [legal(item) for item in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically; numbers that JSON lacks follow the rule of `legal`."""
    text = json.dumps(legal(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    # A file name that is not UTF-8 comes as lone surrogates, which are escaped as JSON does it.
    write_whole(path, (text + "\n").encode(errors="backslashreplace"))

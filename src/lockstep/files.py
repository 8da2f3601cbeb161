"""Files: written whole and through no link, read at a bounded cost.

A run's folder may come from somebody else, or be shared. So lockstep opens its output files with `opener=unlinked`, in
folders made by `own_folder`, since a link would lead to a file of somebody else's choice. It reads files by `read` and
`lines_of`, within `understanding`, which makes one error of every defect.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import LockstepError, RequestError
from .printable import visible_json

MOST_BYTES = 64 << 20  # of JSON or TOML: an honest run of thousands of ranks writes a tenth of it
LOCK = ".lock"
"""In a run's folder: rank 0's process locks its first byte, and supervisors of restarted ranks share the second."""
_DIGITS = 40  # of a whole number in JSON; floats have no room for 309
DEFECTS = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, struct.error)
"""Errors that a damaged or hostile file's contents raise in a reader."""
REFUSED = {
    errno.ELOOP: "it is a link, and none is followed here",
    errno.ENXIO: "it is a pipe or a device, no regular file",
}
"""Why a file or folder is not opened, by the OSError's errno; its `filename` is the path."""


def named(path: str, flags: int) -> int:
    """Open a regular file, as `opener` of `open`. Follows links: the user has named the path."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)  # a pipe does not block
    except OSError as error:
        raise OSError(error.errno, REFUSED.get(error.errno or 0, error.strerror), path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, REFUSED[errno.ENXIO], path)
    return descriptor


def unlinked(path: str, flags: int) -> int:
    """Open a regular file, as `opener` of `open`; refuse a link, which would lead elsewhere."""
    return named(path, flags | os.O_NOFOLLOW)


def check_own(path: Path) -> None:
    """Raise OSError for a link, pipe or other special file at `path`."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, REFUSED[errno.ELOOP], str(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.ENXIO, REFUSED[errno.ENXIO], str(path))


def own_folder(path: Path) -> None:
    """Make the folder `path` and its parents; raise OSError for a link."""
    check_own(path)
    path.mkdir(parents=True, exist_ok=True)


def private_folder() -> Path:
    """Return this user's folder among the temporary files. Made if new; raises OSError where others can use it."""
    path = Path(tempfile.gettempdir()) / f"lockstep-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(errno.EPERM, "it is not a folder of this user alone (mode 0700)", str(path))
    return path


def read(path: Path, *, most_bytes: int = MOST_BYTES, through_links: bool = False) -> bytes:
    """Return the bytes of a file of unknown origin. `through_links` is for a path that the user named.

    Raises OSError, too, for a link, a pipe, and more than `most_bytes`.
    """
    with open(path, "rb", opener=named if through_links else unlinked) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most_bytes:,} are read", str(path))
        return file.read(size)  # not to an end that another process may put off


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a foreign file with their ends. Raises as `read`, and for a line of 64 MiB."""
    with open(path, "rb", opener=unlinked) as file:
        while line := file.readline(MOST_BYTES):
            if len(line) == MOST_BYTES:
                raise OSError(errno.EFBIG, f"a line has more than {MOST_BYTES:,} bytes", str(path))
            yield line


def parse_json(data: bytes | str) -> Any:
    """Return the value of JSON text. Raises ValueError for damage, deep nesting and very long numbers."""
    try:
        return json.loads(data, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def reason(error: BaseException) -> str:
    """Return in one line why reading a file failed."""
    told = (error.strerror if isinstance(error, OSError) else "") or f"{type(error).__name__}: {error}"
    return " ".join(told.split())[:160]


@contextlib.contextmanager
def understanding(path: Path, advice: str = "give another copy of it") -> Iterator[None]:
    """Turn `DEFECTS` in the block into a `RequestError` that names the file."""
    try:
        yield
    except LockstepError:
        raise
    except DEFECTS as error:
        raise RequestError(f"{path} cannot be read ({reason(error)}); {advice}.") from error


def shown(path: Path | None) -> str:
    """Return a path for display. Relative below the working folder; "" for none."""
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


def write_whole(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write `data` to `path` atomically. Raises OSError and keeps the old file where the disk fails.

    A `private` file is readable by this user alone.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # of a process with the same number, which was killed
        with open(part, "xb", opener=unlinked) as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


class Appended:
    """A file of ours to which data are appended. What a full disk does not take waits in memory."""

    def __init__(self, path: Path) -> None:
        # Unbuffered: written data is in the kernel, and survives the end of this process.
        self._file = open(path, "ab", buffering=0, opener=unlinked)
        self.waiting: list[bytes] = []

    def write(self, *data: bytes) -> None:
        """Append what waits and then `data`, each whole. Raises OSError for what has to wait."""
        self.waiting += data
        while self.waiting:
            size, left = os.fstat(self._file.fileno()).st_size, self.waiting[0]
            try:
                while left:  # a nearly full disk takes a part without an error, and refuses the rest at the next try
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(size)
                raise
            self.waiting.pop(0)

    def close(self) -> None:
        """Append what waits, and sync the file. Raises OSError for what is lost."""
        with self._file:
            try:
                self.write()
            finally:
                os.fsync(self._file.fileno())


def legal(value: Any) -> Any:
    """Return `value` without NaN and infinities. `{"loss": NaN}` becomes `{"loss": None, "loss_repr": "nan"}`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [legal(item) for item in value]
    if not isinstance(value, dict):
        return value
    clean: dict[str, Any] = {}
    for name, item in value.items():
        clean[name] = legal(item)
        if isinstance(item, float) and not math.isfinite(item):
            clean[f"{name}_repr"] = repr(item)
    return clean


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, atomically. Numbers are as in `legal`."""
    text = visible_json(json.dumps(legal(value), indent=2, ensure_ascii=False, allow_nan=False, default=str))
    # A file name that is not UTF-8 comes as lone surrogates, which are escaped as JSON does it.
    write_whole(path, (text + "\n").encode(errors="backslashreplace"))

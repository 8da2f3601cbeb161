"""Files: written whole and through no link, read at a bounded cost.

A run's folder may come from another user, or be shared. So lockstep opens its output files with `opener=unlinked`, in
folders made by `own_folder`: a link could lead to any file. It reads files by `read` and `lines_of`, within
`understanding`, which turns every defect into one error.
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

MOST_BYTES = 64 << 20  # of JSON or TOML: a run of thousands of ranks writes a tenth of it
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


def open_regular(path: str, flags: int) -> int:
    """Open a regular file, as `opener` of `open`. Follow links: the user chose the path."""
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
    return open_regular(path, flags | os.O_NOFOLLOW)


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
    """Return this user's folder among the temporary files; make a new one. Raises OSError if others can use it."""
    path = Path(tempfile.gettempdir()) / f"lockstep-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "it is not a folder of this user alone (mode 0700)", str(path))
    return path


def read(path: Path, *, most_bytes: int = MOST_BYTES, through_links: bool = False) -> bytes:
    """Return the bytes of a file of unknown origin. `through_links` is for a path that the user named.

    Raises OSError, too, for a link, a pipe, and more than `most_bytes`.
    """
    with open(path, "rb", opener=open_regular if through_links else unlinked) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most_bytes:,} are read", str(path))
        return file.read(size)  # not to the end, which another process may move


def read_span(path: Path, offset: int, size: int) -> bytes:
    """Return `size` bytes at `offset` of a regular file that the user named. Raises OSError if it is shorter."""
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        data = os.pread(file.fileno(), size, offset)
    if len(data) < size:
        raise OSError(errno.EIO, "it is cut short", str(path))
    return data


def read_end(path: Path, start: int, most_bytes: int) -> bytes:
    """Return the bytes from `start` on, of which only the last `most_bytes`. Raises OSError for a link or a pipe."""
    with open(path, "rb", opener=unlinked) as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - most_bytes))
        return file.read(most_bytes)


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
        return json.loads(data, parse_int=_short_int)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _short_int(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def reason(error: BaseException) -> str:
    """Return the reason of a failed read, in one line."""
    text = (error.strerror if isinstance(error, OSError) else "") or f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:160]


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
    """Return a path for display, relative if below the working folder; "" for None."""
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
    """Write `data` to `path` atomically. If the disk fails, raise OSError and keep the old file.

    A `private` file is readable by this user alone.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # of a killed process with the same id
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
    """An output file to append to. On a full disk, data waits in memory."""

    def __init__(self, path: Path) -> None:
        # Unbuffered: written data is in the kernel, and survives the end of this process.
        self._file = open(path, "ab", buffering=0, opener=unlinked)
        self.waiting: list[bytes] = []

    def write(self, *data: bytes) -> None:
        """Append waiting data and then `data`, each as a whole. Raises OSError if data has to wait."""
        self.waiting += data
        while self.waiting:
            size, remainder = os.fstat(self._file.fileno()).st_size, self.waiting[0]
            try:
                while remainder:  # a nearly full disk accepts a part without an error, and refuses the next write
                    remainder = remainder[self._file.write(remainder) :]
            except OSError:
                self._file.truncate(size)
                raise
            self.waiting.pop(0)

    def close(self) -> None:
        """Append waiting data, and sync the file. Raises OSError if data is lost."""
        with self._file:
            try:
                self.write()
            finally:
                os.fsync(self._file.fileno())


def legal(value: Any) -> Any:
    """Return `value` without NaN and infinities: `{"loss": NaN}` becomes `{"loss": None, "loss_repr": "nan"}`."""
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
    """Write `value`, made `legal`, to `path` as indented JSON, atomically."""
    text = visible_json(json.dumps(legal(value), indent=2, ensure_ascii=False, allow_nan=False, default=str))
    # File names that are not UTF-8 hold lone surrogates; escape them as JSON does.
    write_whole(path, (text + "\n").encode(errors="backslashreplace"))

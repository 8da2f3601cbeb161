"""Files: written whole and through no link; read at a cost that does not depend on what somebody put there.

A run's folder may come from somebody else, or be shared with others. So whatever lockstep writes in one is opened with
`opener=ours`, and the folders in it are made by `own_folder`: a link there leads to a file that somebody else has
chosen. And whatever lockstep reads of a foreign file comes through `read`, which takes regular files of a bounded size,
and is understood within `understanding`, which makes one error of every defect.
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
from typing import Any, BinaryIO

from .errors import LockstepError, RequestError
from .printable import visible_json

MOST_BYTES = 64 << 20
"""Of a file of JSON or TOML: the largest that an honest run of thousands of ranks writes is a tenth of it."""
_FILLED = 16
"""Times its size on the disk that a file may have, since some file systems compress; weights hardly can be."""
_DEEPEST, _DIGITS = 32, 100
"""Levels of nesting in JSON, and digits of its whole numbers."""
DEFECTS = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RecursionError),
    *(TypeError, ValueError, struct.error),
)


def ours(path: str, flags: int) -> int:
    """Open a file that lockstep writes, as `opener` of `open`. Raises OSError for what is no file of its own there.

    That is a link, a pipe or a device, and a file with a second name (a hard link, as backups make them: the copy would
    be changed too).
    """
    try:
        # Not truncated before it is known to be ours; a pipe does not block.
        descriptor = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise OSError(error.errno, REFUSED.get(error.errno or 0, error.strerror), path) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.ENXIO, REFUSED[errno.ENXIO], path)
        if found.st_nlink > 1:
            raise OSError(errno.EMLINK, REFUSED[errno.EMLINK], path)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


REFUSED = {
    errno.ELOOP: "it is a link, and nothing is written through a link",
    errno.EMLINK: "the file has another name, under which it would change too (hard link)",
    errno.ENXIO: "it is a pipe or a device, not a file",
}
"""What `ours` and `own_folder` say of what lies there, by the OSError's errno; its `filename` is the path."""


def check_own(path: Path) -> None:
    """Raise OSError where something else than a file or a folder lies at `path`: a link, a pipe."""
    if os.path.lexists(path) and not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISDIR(mode):
        number = errno.ELOOP if stat.S_ISLNK(mode) else errno.ENXIO
        raise OSError(number, REFUSED[number], str(path))


def own_folder(path: Path) -> None:
    """Make the folder `path` for what lockstep writes, and those above it. Raises OSError, too, where it is a link."""
    check_own(path)
    path.mkdir(parents=True, exist_ok=True)


def private_folder() -> Path:
    """Return this user's folder among the temporary files, made if it is new: nobody else can look into it.

    Raises OSError where something else has that name, or others may write there.
    """
    path = Path(tempfile.gettempdir()) / f"lockstep-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(errno.EPERM, "it is not a folder of this user alone (mode 0700)", str(path))
    return path


def read(path: Path, *, most_bytes: int = MOST_BYTES, through_links: bool = False) -> bytes:
    """Return what a file holds that somebody else may have written.

    `through_links` is for paths that the user has named. Raises OSError, too, for a link, for what is no regular file,
    such as a pipe, which may never end, and for one of more than `most_bytes`.
    """
    with open(path, "rb", opener=named if through_links else foreign) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most_bytes:,} are read", str(path))
        check_filled(file.fileno())
        return file.read(size)  # and not to an end that another process may put off


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a foreign file with their ends, each of a bounded size; raises what `read` does."""
    with open(path, "rb", opener=foreign) as file:
        while line := file.readline(MOST_BYTES):
            if len(line) == MOST_BYTES:
                raise OSError(errno.EFBIG, f"a line has more than {MOST_BYTES:,} bytes", str(path))
            yield line


def check_filled(descriptor: int) -> None:
    """Raise OSError for a large file that is nearly all holes, which cost nothing to send, and memory to read."""
    found = os.fstat(descriptor)
    held = found.st_blocks * 512  # 0 where a file system does not tell
    if found.st_size > MOST_BYTES and 0 < held < found.st_size / _FILLED:
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, of which the disk holds {held:,}")


def foreign(path: str, flags: int) -> int:
    """Open a file that somebody else may have written, to read it, as `opener` of `open`; raises as `read` does."""
    try:
        return named(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link, and none is followed there", path) from error


def named(path: str, flags: int) -> int:
    """Open a file that the user has named, be it by a link, as `foreign` does."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor


def parse_json(data: bytes | str) -> Any:
    """Return what JSON holds; ValueError for what is none, and for nesting and numbers that nobody can mean."""
    try:
        value = _DECODE(data if isinstance(data, str) else data.decode())
    except RecursionError:
        value = None
    else:
        if not _is_deep(value, _DEEPEST):
            return value
    raise ValueError("it is nested too deeply")


def _is_deep(value: Any, levels: int) -> bool:
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not levels or any(_is_deep(each, levels - 1) for each in held if isinstance(each, dict | list))


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:  # no float holds a product of two such numbers
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


_DECODE = json.JSONDecoder(parse_int=_whole).decode


@contextlib.contextmanager
def understanding(path: Path, advice: str = "give another copy of it") -> Iterator[None]:
    """Make one `RequestError`, which names the file, of whatever the block raises over what is in it."""
    try:
        yield
    except LockstepError:
        raise
    except DEFECTS as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or f"{type(error).__name__}: {error}"
        raise RequestError(f"{path} cannot be read ({' '.join(reason.split())[:160]}); {advice}.") from error


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
        part.unlink(missing_ok=True)  # of a process with the same number, which was killed
        with open(part, "xb", opener=ours) as file:
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
    text = visible_json(json.dumps(legal(value), indent=2, ensure_ascii=False, allow_nan=False, default=str))
    # A file name that is not UTF-8 comes as lone surrogates, which are escaped as JSON does it.
    write_whole(path, (text + "\n").encode(errors="backslashreplace"))

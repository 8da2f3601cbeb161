"""The file at which ranks meet, looked at before torch's store opens it.

The store is a log: each entry is a key and a value, each of them its length in four bytes and its text. torch waits
for ever, without a word, at a file whose last entry is cut short, as a rank leaves it that is killed while it writes
(seen). Writers hold the file's lock, so that whoever holds it sees whole entries, unless one has died.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import BinaryIO

from ..errors import RequestError
from ..files import ours

_LENGTH = struct.Struct("=I")
_FIRST_KEY = b"refcount/"  # in every file of torch's FileStore


def check(path: Path, *, clears: bool = False) -> None:
    """Raise `RequestError` where ranks cannot meet at the file, which is made if it does not exist.

    With `clears`, an entry that is cut short is taken away instead.
    """
    where = f"file://{path}"
    try:
        with open(path, "a+b", opener=ours) as file:
            if os.fstat(file.fileno()).st_uid not in (os.geteuid(), path.parent.stat().st_uid):
                raise OSError(errno.EPERM, "the file is another user's")
            fcntl.flock(file, fcntl.LOCK_EX if clears else fcntl.LOCK_SH)
            content = _content(file)
            whole = _whole(content)
            if not content or _is_log(content):
                # For this user alone: torch's store knows no passwords, and believes whoever writes there.
                os.fchmod(file.fileno(), 0o600)
            if clears and whole < len(content):
                file.truncate(whole)
                whole = len(content)
            fcntl.flock(file, fcntl.LOCK_UN)
    except OSError as error:
        raise RequestError(
            f"{where} cannot be opened for writing and locking ({error.strerror}); "
            "give the path of a file that does not exist yet, in a folder that every rank can write to."
        ) from error
    if content and not _is_log(content):
        raise RequestError(f"{where} exists and is not a meeting place of ranks; give a path that does not exist yet.")
    if whole < len(content):
        raise RequestError(
            f"{where} is left over from another run, of which a rank was killed while it wrote there; remove {path} or "
            "give every rank --clear-meeting, and start again."
        )


def _content(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


def _is_log(content: bytes) -> bool:
    """Whether the content begins as torch's log does, however little of it there is."""
    beginning = _LENGTH.pack(len(_FIRST_KEY)) + _FIRST_KEY
    return content.startswith(beginning) or _FIRST_KEY in content[:32] or beginning.startswith(content)


def _whole(content: bytes) -> int:
    """Return how many of the bytes are whole entries; all of them where the log is of a torch that writes another."""
    if not (_LENGTH.pack(len(_FIRST_KEY)) + _FIRST_KEY).startswith(content[: _LENGTH.size + len(_FIRST_KEY)]):
        return len(content)
    end = whole = 0
    while True:
        for _ in ("key", "value"):
            if end + _LENGTH.size > len(content):
                return whole
            end += _LENGTH.size + int(_LENGTH.unpack_from(content, end)[0])
            if end > len(content):
                return whole
        whole = end

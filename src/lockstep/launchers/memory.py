"""Files in memory, in which processes of one user on one host meet and leave notes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NOTES_BYTES = 1 << 13


@contextlib.contextmanager
def file() -> Iterator[Path]:
    """Hold a new, empty file in memory while the block runs; give the path at which this user's processes open it.

    No other user can, no disk can be too full for it, and nobody has to remove it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("lockstep-meeting")
        try:
            yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
            (Path(folder) / "meeting").touch()
            yield Path(folder) / "meeting"


class MemoryNotes:
    """Notes in such a file, which outlives the ranks (see `notes`)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> str:
        """Return the text, "" where there is none."""
        return str(json.loads(self._path.read_bytes() or b"{}").get(name, ""))

    def write(self, name: str, text: str) -> None:
        """Keep the text under this name, in the place of an earlier one."""
        held = json.loads(self._path.read_bytes() or b"{}") | {name: text}
        descriptor = os.open(self._path, os.O_WRONLY)
        os.write(descriptor, json.dumps(held).encode().ljust(_NOTES_BYTES))  # at once: a rank may be killed meanwhile
        os.close(descriptor)

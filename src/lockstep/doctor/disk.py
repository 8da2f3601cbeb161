"""The folders of a job: whether the output can be written, how fast, who sees it; whether the data can be read."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from ..files import ours
from .board import Board
from .finding import GIB, MIB, RED, Finding, found, look, shown

_CHECKPOINT_BYTES = 25_557_032 * 2 * 4  # a ResNet-50 in float32 with the momentum of each weight
_ROOMY_BYTES = 10 * GIB
_SLOW_BYTES_PER_S = 20e6  # below this, such a checkpoint takes more than ten seconds
_CHUNK_BYTES, _MOST_BYTES = 4 * MIB, 64 * MIB
_WRITE_S = 1.0
_APPEARS_S = 2.0  # for a file to be seen on another host; network disks remember for a while what was not there


def look_at(folder: Path, board: Board, limit_s: float) -> list[Finding]:
    """Return what rank 0 finds in the output folder, and whether the others see it (*collective*)."""
    left: list[Path] = []
    try:
        findings = look("disk", "output", lambda: output(folder, left), limit_s, RED) if board.rank == 0 else []
        is_red = any(each.state == RED for each in findings)
        written = board.all("output", None if is_red or not left else str(left[0]))[0]
        if written is None or board.size == 1:
            return findings
        return findings + board.findings("shared", look("disk", "shared", lambda: shared(Path(written)), limit_s))
    finally:
        with contextlib.suppress(OSError):
            for path in left:
                path.unlink()


def output(folder: Path, left: list[Path]) -> Iterator[Finding]:
    """Yield what writing into `folder`, or where it would be made, is like; the path of the file is added to `left`."""
    base = next(each for each in (folder, *folder.parents) if each.exists())
    left.append(base / f".lockstep-doctor-{secrets.token_hex(8)}")
    try:
        about = os.statvfs(base)
        free_bytes = about.f_bavail * about.f_frsize
        bytes_per_s = _written(left[-1], min(_MOST_BYTES, free_bytes // 2))
    except OSError as error:
        fix = "give another folder as --output, or make it writable, with room in it"
        yield found("disk", "output", f"{base} cannot be written: {error.strerror}", fix, bad=RED)
    else:
        yield from judge(base, free_bytes, bytes_per_s)


def _written(path: Path, most_bytes: int) -> float:
    """Return the bytes/s at which a new file could be written; it is then empty."""
    chunk = secrets.token_bytes(_CHUNK_BYTES)  # not zeros: some disks store those as nothing
    since_s, count = time.perf_counter(), 0
    with open(path, "xb", buffering=0, opener=ours) as file:
        while count == 0 or (count < most_bytes and time.perf_counter() - since_s < _WRITE_S):
            count += file.write(chunk[: max(1, most_bytes - count)])
            os.fsync(file.fileno())  # else the whole file may wait in memory until the end
        took_s = time.perf_counter() - since_s
        file.truncate(0)
    return count / took_s


def judge(base: Path, free_bytes: int, bytes_per_s: float) -> Iterator[Finding]:
    """Yield whether checkpoints find room, and how long one takes."""
    words, fix = f"{shown(free_bytes, 'bytes')} free in {base}", ""
    if free_bytes < _ROOMY_BYTES:
        need = shown(3 * _CHECKPOINT_BYTES, "bytes")
        words += f": three checkpoints of a ResNet-50 (last, best, the next one) take {need}, larger models more"
        fix = "make room, or give an --output elsewhere"
    yield found("disk", "free space", words, fix, value=free_bytes, unit="bytes")
    words, fix = f"{shown(bytes_per_s, 'bytes/s')} to {base}, fsync included", ""
    if bytes_per_s < _SLOW_BYTES_PER_S:
        words += f": a ResNet-50's checkpoint takes {_CHECKPOINT_BYTES / bytes_per_s:.0f} s"
        fix = "give an --output on a faster disk, or save more rarely"
    yield found("disk", "write speed", words, fix, value=bytes_per_s, unit="bytes/s")


def shared(path: Path, wait_s: float = _APPEARS_S) -> Iterator[Finding]:
    """Yield whether a file of rank 0's is seen here, within a moment."""
    words, fix = f"all ranks see the same {path.parent}", ""
    deadline = time.monotonic() + wait_s
    while not (is_seen := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not is_seen:
        words = f"{path.parent} is another folder here than on rank 0, which alone writes checkpoints: no resuming here"
        fix = "give an --output on a disk that all nodes mount; --init-method file:// needs one as well"
    yield found("disk", "shared", words, fix)


def data(folder: Path) -> Iterator[Finding]:
    """Yield whether the data folder that was asked for can be read."""
    words, fix = f"{folder} can be read", ""
    try:
        os.scandir(folder).close()
    except OSError as error:
        words, fix = f"{folder} cannot be read: {error.strerror}", "give one that this user can read here as --data-dir"
    yield found("disk", "data", words, fix)

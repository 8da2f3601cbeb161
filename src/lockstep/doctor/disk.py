"""The folders of a job: whether the output can be written, locked and renamed there, how fast, and who sees it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .finding import RED, Finding, Subject
from .units import GIB, MIB, rate, size

CHECKPOINT_BYTES = 25_557_032 * 2 * 4
"""A ResNet-50 in float32 with the momentum of each weight."""
_NEED_BYTES = 3 * CHECKPOINT_BYTES
"""The last checkpoint, the best, and the next one before it takes the place of the last."""
_ROOMY_BYTES = 10 * GIB
_SLOW_BYTES_PER_S = 20e6
"""Below this, such a checkpoint takes more than ten seconds."""
_CHUNK_BYTES = 4 * MIB
_MOST_BYTES = 64 * MIB
_WRITE_S = 1.0
_APPEARS_S = 2.0  # for a file to be seen on another host; network disks remember for a while what was not there


@dataclass(frozen=True)
class Mark:
    """A file that rank 0 leaves for the others to look for."""

    path: str
    nonce: str


def nearest(folder: Path) -> Path:
    """Return `folder`, absolute, or the nearest folder above it that exists."""
    found = folder.absolute()
    while not found.exists() and found != found.parent:
        found = found.parent
    return found


def output(folder: Path) -> Iterator[Finding]:
    """Yield what writing into `folder`, or where it would be made, is like."""
    base = nearest(folder)
    if not base.is_dir():
        words, fix = f"{base} is a file", "give a folder as --output"
        yield Subject("disk", "output").red(words, fix)
        return
    found = os.statvfs(base)
    free_bytes = found.f_bavail * found.f_frsize
    room = judge_room(base, free_bytes, inodes=found.f_favail if found.f_files else None)
    path = base / f".lockstep-doctor-{secrets.token_hex(4)}"
    try:
        bytes_per_s = _written(path, min(_MOST_BYTES, free_bytes // 2))
        trouble = _locked_and_renamed(path)
    except OSError as error:
        remedy = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
        words, fix = f"{base} cannot be written: {error.strerror}", f"give another --output, or {remedy}"
        yield room if room.state == RED else Subject("disk", "output").red(words, fix)
        return
    finally:
        for each in (path, _renamed(path)):
            with contextlib.suppress(OSError):
                each.unlink()
    yield room
    yield judge_speed(base, bytes_per_s)
    yield from _judge_trouble(base, trouble)


def judge_room(base: Path, free_bytes: int, inodes: int | None) -> Finding:
    """Return whether checkpoints find room; `inodes` is how many more files there can be, None where that is open."""
    about = Subject("disk", "free space", value=float(free_bytes), unit="bytes")
    if inodes == 0:
        words = f"no file more can be made in {base}: the disk's inodes, or your quota of them, are used up"
        return about.red(words, "remove files there, or give another --output")
    words = f"{size(free_bytes)} free in {base}"
    if free_bytes >= _ROOMY_BYTES:
        return about.green(words)
    need = f"three checkpoints of a ResNet-50 (last, best, the next one) take {size(_NEED_BYTES)}"
    return about.yellow(f"{words}: {need}, those of larger models more", "make room, or give an --output elsewhere")


def judge_speed(base: Path, bytes_per_s: float) -> Finding:
    """Return what a write speed means."""
    about = Subject("disk", "write speed", value=bytes_per_s, unit="bytes/s")
    words = f"{rate(bytes_per_s)} to {base}, fsync included"
    if bytes_per_s >= _SLOW_BYTES_PER_S:
        return about.green(words)
    words += f": a ResNet-50's checkpoint of {size(CHECKPOINT_BYTES)} takes {CHECKPOINT_BYTES / bytes_per_s:.0f} s"
    return about.yellow(words, "give an --output on a faster disk, or save more rarely")


def _written(path: Path, most_bytes: int) -> float:
    """Return the bytes a second at which a new file could be written, within about a second."""
    # Not zeros: some disks store those as nothing.
    chunk = secrets.token_bytes(_CHUNK_BYTES)
    since_s, count = time.perf_counter(), 0
    with path.open("xb", buffering=0) as file:
        while count == 0 or (count < most_bytes and time.perf_counter() - since_s < _WRITE_S):
            count += file.write(chunk[: max(1, most_bytes - count)])
            os.fdatasync(file.fileno())  # else the whole file may wait in memory until the end
        os.fsync(file.fileno())
    return count / (time.perf_counter() - since_s)


def _locked_and_renamed(path: Path) -> dict[str, str]:
    """Return what of a run's dealings with files fails there, and why: locks (two kinds), and putting in place."""
    trouble = {}
    with path.open("r+b") as file:
        for name, lock in (("lockf", fcntl.lockf), ("flock", fcntl.flock)):
            try:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock(file, fcntl.LOCK_UN)
            except OSError as error:
                trouble[name] = error.strerror or str(error)
    try:
        _renamed(path).write_bytes(b"")
        path.replace(_renamed(path))
    except OSError as error:
        trouble["rename"] = error.strerror or str(error)
    return trouble


def _renamed(path: Path) -> Path:
    return path.with_name(f"{path.name}.renamed")


def _judge_trouble(base: Path, trouble: Mapping[str, str]) -> Iterator[Finding]:
    if why := trouble.get("rename"):
        words = f"a file in {base} cannot take another's place ({why}): no checkpoint can be put there whole"
        fix = "give an --output on another disk"
        yield Subject("disk", "rename").red(words, fix)
    for name, lost in (
        ("lockf", "two runs in one folder do not notice each other"),
        ("flock", "--init-method file:// does not work there"),
    ):
        if why := trouble.get(name):
            words = f"files in {base} cannot be locked by {name} ({why}): {lost}"
            fix = "mount it with locks (NFS: without nolock, with lockd), or give an --output on another disk"
            yield Subject("disk", "locks").yellow(words, fix)


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[list[Mark]]:
    """Leave a mark where `folder` is, or would be made, for as long as the block lasts; none where that fails."""
    path = nearest(folder) / f".lockstep-doctor-{secrets.token_hex(4)}"
    nonce = secrets.token_hex(16)
    try:
        path.write_text(nonce, encoding="ascii")
    except OSError:
        yield []
        return
    try:
        yield [Mark(str(path), nonce)]
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def sees(mark: Mark, wait_s: float = _APPEARS_S) -> bool:
    """Return whether the mark is seen here, within a moment."""
    deadline = time.monotonic() + wait_s
    while True:
        with contextlib.suppress(OSError, ValueError):
            if Path(mark.path).read_text(encoding="ascii") == mark.nonce:
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)


def judge_shared(mark: Mark | None, seen: Mapping[int, bool], *, hosts: int) -> Finding:
    """Return what it means who has seen the mark: {rank: whether}, rank 0 left out."""
    about = Subject("disk", "shared")
    if mark is None or not seen:
        words = "one rank: nobody to share with" if not seen else "nothing could be written for others to see"
        return about.unchecked(words)
    base = Path(mark.path).parent
    blind = tuple(rank for rank, whether in seen.items() if not whether)
    if not blind:
        on = "all hosts" if hosts > 1 else "all ranks"
        return about.green(f"{on} see the same {base}")
    words = f"{base} is another folder there than on rank 0: rank 0 alone writes checkpoints, the others cannot resume"
    fix = "give an --output on a disk that all nodes mount; --init-method file:// needs one as well"
    return replace(about, ranks=blind).yellow(words, fix)


def data(folder: Path) -> Iterator[Finding]:
    """Yield whether the data folder that was asked for is there, and can be read."""
    about = Subject("disk", "data")
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "is not there"
        words, fix = f"{folder} {found}", "give the folder of the data as --data-dir, on a disk that this host mounts"
        yield about.yellow(words, fix)
    elif not os.access(folder, os.R_OK | os.X_OK):
        words, fix = f"{folder} cannot be read", f"chmod or chown {folder} so that this user can"
        yield about.red(words, fix)
    else:
        yield about.green(f"{folder} can be read")

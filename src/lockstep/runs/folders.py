"""The folder of a run: which one it is, and that it is this run's alone for as long as the run lasts.

`.lock` in it is locked by rank 0's process. The system gives a lock back however its process ends: a killed run never
blocks the next one. Locks are a process's: of two runs in one process neither is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import fnmatch
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..config.schema import RunConfig
from ..errors import RequestError, Stopped
from ..files import REFUSED, check_own, lines_of, ours, shown

RUNS = Path("runs")
LOCK = ".lock"
_WRITTEN = (
    *("config.toml", "manifest.json", "steps.jsonl", "ledger.bin", "summary.json", "proof.md"),
    *("events.out.tfevents.*", LOCK),
)
"""What a run may have written before its first step."""
_FOLDERS = ("checkpoints", "failures", "output")
_BEGUN = "manifest.json"
"""Written when a run starts."""
_STEP = b'"event": "step"'
"""In steps.jsonl from the first step on: a run that was refused before that does not keep its folder."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, held."""

    path: Path
    is_new: bool
    """Whether it was made for this run."""
    was_free: bool
    """Whether nothing that a run writes was in it."""
    lock: IO[bytes]

    def release(self) -> None:
        """Let others have the folder; what is in it stays."""
        self.lock.close()

    def withdraw(self) -> None:
        """Let go of the folder; where no step was made, what this run wrote goes, and so does a folder made for it.

        So the same command can be given again, once what was refused is put right.
        """
        if self.was_free and not self._has_steps():
            with contextlib.suppress(OSError):  # what else somebody has put there stays
                for pattern in _WRITTEN:
                    for path in self.path.glob(pattern):
                        path.unlink()
                for written in ("failures", "output"):
                    shutil.rmtree(self.path / written, ignore_errors=True)
                if (self.path / "checkpoints").exists():
                    (self.path / "checkpoints").rmdir()
                if self.is_new:
                    self.path.rmdir()
        self.release()

    def _has_steps(self) -> bool:
        steps = self.path / "steps.jsonl"
        try:
            return any(_STEP in line for line in lines_of(steps))
        except OSError:
            return os.path.lexists(steps)


def claim(config: RunConfig, *, before: Path | None = None) -> RunFolder:
    """Return the folder of the run that `config` asks for, made if it is new, and hold it.

    `before` is the folder of an earlier start of this very run, which may lie in it. Raises `RequestError` where the
    folder holds another run, is in use by one, cannot be made, or is not here, though an earlier start has made it.
    """
    path = _asked(config)
    if path is None:
        path = fresh(default_name(config))
        return RunFolder(path, True, True, _hold(path))
    if path == before and not (path / LOCK).exists():
        # Ranks of other nodes than rank 0's have written what they said to a folder of that name at most.
        raise RequestError(
            f"{shown(path)} on {platform.node()} is not the folder in which this run was begun, on another node: what "
            "it has done would be lost; put --output where all nodes see it."
        )
    is_new, was_free = not path.exists(), not _holds_anything_of_ours(path)
    _make(path)
    _check_own(path)
    claimed = RunFolder(path, is_new, was_free, _hold(path))
    try:
        if path != before:
            _check_no_other_run(path, config.checkpoint.resume)
    except RequestError:
        claimed.release()
        raise
    return claimed


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--output {path} cannot be made: {error.strerror}; give another folder.") from error


def _hold(folder: Path) -> IO[bytes]:
    """Return what `_locked` does, with this process's name in it; raise `RequestError` where it cannot be written."""
    try:
        lock = _locked(folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    with contextlib.suppress(OSError):  # a full disk is told of by what has to be written next
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}".encode())
    return lock


def _locked(folder: Path) -> IO[bytes]:
    """Return the lock file, locked; closing it gives it back. Raises `RequestError` where another run has it."""
    lock = open(folder / LOCK, "a+b", buffering=0, opener=ours)
    try:
        # lockf, not flock: data workers that are forked do not inherit it, nor keep it when this process is killed.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        holder = lock.read(200).decode(errors="replace") or "another process"
        lock.close()
        raise RequestError(
            f"{folder} is in use by another run ({holder}): wait until it has ended, or give another --output."
        ) from None
    except OSError:
        pass  # a file system without locks, as on some clusters: runs go on there without this guard
    return lock


def check_free(folder: Path) -> None:
    """Raise `RequestError` where another run has the folder, OSError where its lock file cannot be written."""
    if os.path.lexists(folder / LOCK):
        _locked(folder).close()


def _holds_anything_of_ours(path: Path) -> bool:
    """Whether a file lies there that a run writes: one without a manifest may be a person's copy of a run."""
    return any(next(path.glob(pattern), None) for pattern in (*_WRITTEN, *_FOLDERS) if pattern != LOCK)


def check(config: RunConfig) -> None:
    """Raise `RequestError` where the folder that `config` names cannot be a run's; makes nothing.

    Where the ranks are started from here, it is known in a moment what they would find out seconds later.
    """
    path = _asked(config)
    if path is None:
        return
    if not path.exists():
        if path.is_symlink():
            raise RequestError(f"--output {path} is a link to {path.readlink()}, which is not there; give another one.")
        return
    if not path.is_dir():
        raise RequestError(f"--output {path} is a file; give a folder.")
    _check_own(path)
    try:
        check_free(path)
    except OSError as error:
        raise unwritable(path, error) from error
    _check_no_other_run(path, config.checkpoint.resume)


def check_meant(config: RunConfig, file: Path) -> None:
    """Raise `RequestError` where --resume auto continues another run than that whose config.toml is `file`."""
    own = file.absolute().parent
    if config.checkpoint.resume != "auto" or config.record.output is not None or run_of(own) != own:
        return
    found = _latest(config)
    if found is None or found.resolve() != own.resolve():
        would = f"begin a new run in {RUNS}" if found is None else f"continue {found}"
        raise RequestError(
            f"--config {file} is of the run in {file.parent}, and --resume auto without --output would {would}; "
            f"continue that one with --resume {file.parent}, or name another by --output."
        )


def _check_own(path: Path) -> None:
    """Raise `RequestError` where a name that a run writes is a link, or a pipe, that somebody has put there."""
    names = (*_WRITTEN, *_FOLDERS, "slurm-*.out")
    try:
        for each in path.iterdir():
            if any(fnmatch.fnmatch(each.name, name) for name in names):
                check_own(each)
                for held in each.iterdir() if each.name in ("failures", "output") and each.is_dir() else ():
                    check_own(held)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path | None, error: OSError) -> RequestError:
    """Return the error for a folder that does not take what a run has to write before it can begin."""
    if error.errno in REFUSED:
        path = Path(error.filename)
    way = "make room there, or give" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give"
    return RequestError(f"{shown(path)} cannot be written: {error.strerror}; {way} another --output.")


def reserve(config: RunConfig, *, make: bool) -> tuple[Path, bool]:
    """Return the absolute folder of a run that starts later, elsewhere, and whether it is made for it now.

    Raises `RequestError` where it cannot be that run's. `make=False` only says which one it would be.
    """
    check(config)
    path = _asked(config)
    if path is None:
        return (fresh(default_name(config)) if make else _next(default_name(config))).absolute(), make
    is_new = make and not path.exists()
    if make:
        _make(path)
    return path.absolute(), is_new


@contextlib.contextmanager
def begun(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the config with the folder of the run that begins in the block; a new default one is made now.

    Rank 0 claims it only once all ranks have met. If one is lost before that, --resume auto finds this folder, and
    not that of an earlier run, which it would go on with. A run that is refused or stopped leaves no empty one.
    """
    if _asked(config) is not None:
        yield config
        return
    is_first = not RUNS.exists()
    path = fresh(default_name(config))
    try:
        yield dataclasses.replace(config, record=dataclasses.replace(config.record, output=path))
    except (RequestError, Stopped):
        with contextlib.suppress(OSError):  # what lies there stays
            path.rmdir()
            if is_first:
                RUNS.rmdir()
        raise


def _asked(config: RunConfig) -> Path | None:
    """Return the folder that the config names, or that holds the run to continue; None for a new default one."""
    asked, output = config.checkpoint.resume, config.record.output
    if output is None and asked:
        return _latest(config) if asked == "auto" else run_of(Path(asked))
    return output


def _check_no_other_run(path: Path, resume: str) -> None:
    """Raise `RequestError` where the folder holds a run that `resume` does not name."""
    if not (path / _BEGUN).exists():
        if not resume and _holds_anything_of_ours(path):
            raise RequestError(
                f"--output {path} holds files that a run would overwrite, and is no run's folder; give another one, or "
                "--resume auto where a run was killed there before it began."
            )
        return
    if not resume:
        raise RequestError(
            f"--output {path} holds a run already: continue it with --resume auto, or give another folder."
        )
    holder = run_of(Path(resume))
    if resume != "auto" and (holder is None or holder.resolve() != path.resolve()):
        raise RequestError(
            f"--output {path} holds another run than the one to continue, {resume}; leave --output out to continue "
            "that one in its own folder, or give a new one."
        )


def default_name(config: RunConfig) -> str:
    """Return the name of the config's default folder."""
    named = [name for name in (config.data.name, config.model.name) if name]
    return "-".join(named).replace(":", ".").replace("/", ".")


def fresh(name: str) -> Path:
    """Make and return a new folder: runs/NAME, or runs/NAME-2 where that exists, and so on.

    Raises `RequestError` where it cannot be made.
    """
    while True:
        folder = _next(name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RequestError(f"{folder} cannot be made: {error.strerror}; give --output FOLDER.") from error
        return folder


def _next(name: str) -> Path:
    """Return the first default folder of this name that comes after all there are."""
    number = max(_numbered(name), default=0) + 1
    return RUNS / (name if number == 1 else f"{name}-{number}")


def _numbered(name: str) -> dict[int, Path]:
    """Return the default folders of this name that there are: 1 is runs/NAME, 2 runs/NAME-2, …"""
    there = {}
    for path in RUNS.iterdir() if RUNS.is_dir() else ():
        rest = path.name.removeprefix(f"{name}-")
        if path.name == name:
            there[1] = path
        elif rest != path.name and rest.isdecimal():
            there[int(rest)] = path
    return there


def _latest(config: RunConfig) -> Path | None:
    """Return the newest default folder of this config that exists."""
    # A link there, as in a checked-out repository, would choose what is written to.
    there = {number: path for number, path in _numbered(default_name(config)).items() if not path.is_symlink()}
    return there[max(there)] if there else None


def run_of(path: Path) -> Path | None:
    """Return the run's folder that a checkpoint lies in, or the path itself if it is one."""
    for folder in (path, *list(path.absolute().parents)[:2]):  # RUN/checkpoints/last
        if (folder / "steps.jsonl").exists() or (folder / "checkpoints").is_dir():
            return folder
    return None

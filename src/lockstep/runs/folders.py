"""A run's folder: its choice, and its lock against other runs.

Rank 0's process locks `.lock` in the folder. The system releases a lock however its process ends, so that a killed run
never blocks the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import platform
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from filelock import FileLock, Timeout

from ..config.options import RUNS as RUNS
from ..config.schema import RunConfig
from ..config.validity import is_url
from ..errors import RequestError, RunError, Stopped
from ..files import LOCK, REFUSED, check_own, lines_of, read, shown, unlinked

RECORDS = (
    *("config.toml", "manifest.json", "steps.jsonl", "summary.json", "proof.md", "events.out.tfevents.*"),
    *("steps.csv", "evals.csv"),
)
WRITTEN = (*RECORDS, "checkpoints", "failures", "output", "profile", "trackers")
"""Names of a run's files. A run writes its manifest at the start."""
_PATIENCE_S = 120.0  # for the end of an earlier start's rank 0: NFS keeps a lost node's lock for 90 s
_STEP = b'"event": "step"'  # in steps.jsonl from the first step on


@contextlib.contextmanager
def claim(config: RunConfig, *, earlier: Path | None = None) -> Iterator[Path]:
    """Lock the config's run folder within the block; yield its absolute path.

    Makes the folder if necessary. `earlier` is the folder of an earlier start of this run, whose files may be there.
    Raises `RequestError` as `check` does, for a folder that cannot be made, and for an earlier start's folder that is
    missing on this node; `RunError` if that start's rank 0, perhaps on a lost node, still has the lock. If the block
    raises `RequestError` before any step, removes the files written, so that the user can repeat the command.
    """
    path = check(config, earlier=earlier)
    if path is not None and path == earlier and not (path / LOCK).exists() and not config.record.remote:
        # Other nodes than rank 0's have at most written their ranks' output to a folder of that name.
        raise RequestError(
            f"{shown(path)} on {platform.node()} is not the folder in which this run was begun, on another node: its "
            "results would be lost; put --output where all nodes see it."
        )
    is_new = path is None or not os.path.lexists(path)  # also if this user may not read its parent
    was_free = path is None or is_new or not list_run_files(path)
    path = (path or fresh(default_name(config))).absolute()
    _make(path)
    try:
        lock = _acquire_lock(path, min(_PATIENCE_S, config.parallel.stall_timeout / 2) if path == earlier else 0.0)
    except OSError as error:
        raise unwritable(path, error) from error
    with lock:
        with contextlib.suppress(OSError), open(path / LOCK, "w", encoding="utf-8", opener=unlinked) as file:
            file.write(f"process {os.getpid()} on {platform.node()}")
        try:
            yield path
        except RequestError:
            if was_free:
                _withdraw(path, is_new)
            raise


def _withdraw(path: Path, is_new: bool) -> None:
    steps = path / "steps.jsonl"
    with contextlib.suppress(OSError):  # other files stay
        if not (os.path.lexists(steps) and any(_STEP in line for line in lines_of(steps))):
            for file in list_run_files(path, LOCK):
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        if is_new:
            path.rmdir()  # if empty


def check(config: RunConfig, *, earlier: Path | None = None) -> Path | None:
    """Return the config's folder, or None. Raises `RequestError` for a folder that cannot be a run's.

    Callers check before the ranks start, seconds before these would raise. `claim` explains `earlier`.
    """
    path, resume = _requested_folder(config), config.checkpoint.resume
    if path is None or not os.path.lexists(path):
        return path
    if not path.is_dir():
        kind = "a file" if path.exists() else f"a link to {path.readlink()}, which is not there"
        raise RequestError(f"--output {path} is {kind}; give a folder.")
    try:
        for file in list_run_files(path, LOCK, "slurm-*.out"):
            check_own(file)
        if path != earlier:
            check_free(path)
        has_run = (path / "manifest.json").exists()
    except OSError as error:
        raise unwritable(path, error) from error
    if path == earlier:
        return path
    holder = path if resume in ("", "auto") or is_url(resume) else run_of(Path(resume))
    if has_run and not resume:
        raise RequestError(
            f"--output {path} holds a run already: continue it with --resume auto, or give another folder."
        )
    if not resume and list_run_files(path):  # without a manifest, perhaps a person's copy of a run
        raise RequestError(
            f"--output {path} holds files that a run would overwrite, and is no run's folder; give another folder, or "
            "--resume auto if a run was killed there before it began."
        )
    if has_run and (holder is None or holder.resolve() != path.resolve()):
        raise RequestError(
            f"--output {path} holds another run than the one to continue, {resume}; omit --output to continue that run "
            "in its own folder, or give a new folder."
        )
    return path


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{path} cannot be made: {error.strerror}; give another --output.") from error


def _acquire_lock(folder: Path, patience_s: float = 0.0) -> FileLock:
    """Return the folder's lock, acquired. Raises `RequestError` if another run has it.

    With patience, the holder is an earlier start of this run; raises `RunError` if that does not end in time.
    """
    lock = FileLock(folder / LOCK, timeout=patience_s, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        holder = read(folder / LOCK, most_bytes=200).decode(errors="replace") or "another process"
        if patience_s:
            raise RunError(
                f"{folder} is still held by rank 0 of the start before this one ({holder}), which might write there, "
                f"and has not ended within {patience_s:g} s: end that process."
            ) from error
        raise RequestError(
            f"{folder} is in use by another run ({holder}): wait until it has ended, or give another --output."
        ) from error
    return lock


def check_free(folder: Path) -> None:
    """Raise `RequestError` if another run has locked the folder. Raises `OSError` for an unwritable lock file."""
    if os.path.lexists(folder / LOCK):
        _acquire_lock(folder).release()


def list_run_files(folder: Path, *patterns: str) -> list[Path]:
    """List the folder's entries that a run writes, or that match `patterns`."""
    return [path for path in folder.glob("*") if any(fnmatch(path.name, name) for name in (*WRITTEN, *patterns))]


def check_meant(config: RunConfig, file: Path) -> None:
    """Raise `RequestError` if --resume auto would not continue the run whose config.toml is `file`."""
    folder = file.absolute().parent
    if config.checkpoint.resume != "auto" or config.record.output is not None or run_of(folder) != folder:
        return
    latest = _latest(config)
    if latest is None or latest.resolve() != folder.resolve():
        action = f"begin a new run in {RUNS}" if latest is None else f"continue {latest}"
        raise RequestError(
            f"--config {file} is of the run in {file.parent}, and --resume auto without --output would {action}; "
            f"continue that run with --resume {file.parent}, or name another by --output."
        )


def unwritable(path: Path | None, error: OSError) -> RequestError:
    """Return the `RequestError` for a failed write in a run's folder."""
    if error.errno in REFUSED:
        path = Path(error.filename)
    remedy = "make room there, or give" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give"
    return RequestError(f"{shown(path)} cannot be written: {error.strerror}; {remedy} another --output.")


def reserve(config: RunConfig, *, make: bool) -> tuple[Path, bool]:
    """Return (a later run's absolute folder, whether this call made it). `make` makes the folder."""
    path, name = check(config), default_name(config)
    is_new = make and (path is None or not path.exists())
    if path is None:
        path = fresh(name) if make else _next(name)
    elif make:
        _make(path)
    return path.absolute(), is_new


@contextlib.contextmanager
def begun(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the config with its run's folder; make a new default one.

    If a rank is lost before rank 0 claims the folder, --resume auto then finds it, and not an earlier run's folder.
    """
    if _requested_folder(config) is not None:
        yield config
        return
    is_first = not RUNS.exists()
    path = fresh(default_name(config))
    try:
        yield dataclasses.replace(config, record=dataclasses.replace(config.record, output=path))
    except (RequestError, Stopped):
        with contextlib.suppress(OSError):  # a folder with files stays
            path.rmdir()
            if is_first:
                RUNS.rmdir()
        raise


def _requested_folder(config: RunConfig) -> Path | None:
    """Return the folder of --output or --resume; None for a new default folder."""
    resume, output = config.checkpoint.resume, config.record.output
    if output is None and resume:
        return _latest(config) if resume == "auto" else run_of(Path(resume))
    return output


def default_name(config: RunConfig) -> str:
    """Return the name of the config's default folder."""
    names = [name for name in (config.data.name, config.model.name) if name]
    return "-".join(names).replace(":", ".").replace("/", ".")


def fresh(name: str) -> Path:
    """Make and return a new folder: runs/NAME, else runs/NAME-2, and so on."""
    while True:
        folder = _next(name)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another process has made it meanwhile
            continue
        except OSError as error:
            raise RequestError(f"{folder} cannot be made: {error.strerror}; give --output FOLDER.") from error


def _next(name: str) -> Path:
    number = max(_numbered(name), default=0) + 1
    return RUNS / (name if number == 1 else f"{name}-{number}")


def _numbered(name: str) -> dict[int, Path]:
    """Return the default folders of this name by number. 1 is runs/NAME, 2 runs/NAME-2, …"""
    matches = ((re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", path.name), path) for path in RUNS.glob("*"))
    return {int(match[1] or 1): path for match, path in matches if match}


def _latest(config: RunConfig) -> Path | None:
    # A link, as in a checked-out repository, would choose where a run writes.
    folders = {number: path for number, path in _numbered(default_name(config)).items() if not path.is_symlink()}
    return folders[max(folders)] if folders else None


def run_of(path: Path) -> Path | None:
    """Return the run's folder at or above `path` (a checkpoint), or None."""
    for folder in (path, *list(path.absolute().parents)[:2]):  # RUN/checkpoints/last
        if (folder / "steps.jsonl").exists() or (folder / "checkpoints").is_dir():
            return folder
    return None


def find(path: Path, *names: str) -> Path:
    """Return a run's folder, given that folder or one of its checkpoints.

    Raises `RequestError` if the folder has none of the files `names`.
    """
    folder = run_of(path) or path
    if any((folder / name).is_file() for name in names):
        return folder
    problem = f"is in no run's folder: there is no {' and no '.join(names)}" if path.exists() else "is not there"
    raise RequestError(f"{path} {problem}; give a run's folder, such as runs/NAME, or one of its checkpoints.")

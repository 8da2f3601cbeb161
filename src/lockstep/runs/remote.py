"""A run's folder in a store such as S3 (`--remote s3://bucket/run`), by fsspec.

The run works in its local folder, which a thread of rank 0 copies to the store:

    checkpoints/step-00000512/    a checkpoint; its checksums.json comes last
    checkpoints/best, last        files in place of links, with the name of a complete checkpoint
    steps.jsonl, …                the other files of the run

Checkpoints come first, then records, `best` and `last`; then, older checkpoints are deleted. A checkpoint that the run
replaces before its turn comes is not uploaded. Nothing that a store says is used as a path.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..checkpoint import find
from ..checkpoint.layout import LINKS, STATE, SUMS, parse_name
from ..checkpoint.write import point
from ..config.options import local_folder
from ..config.schema import RunConfig
from ..errors import LockstepError, RequestError
from ..files import LOCK, own_folder, reason, shown, unlinked
from ..monitor import bounded
from ..printable import one_line
from ..record.base import Recorder
from ..world.world import World
from . import folders

_ANSWER_S = 30.0  # for a store to answer at the start
_EVERY_S, _SHARE = 30.0, 20  # least pause between uploads of records; the same as a multiple of an upload's time
_SILENT_S = 1.0  # a longer wait at the end is announced
_HEAD_BYTES = 1 << 16
_CHECKPOINT = (STATE, SUMS, "*.safetensors")


class Store:
    """A folder in a store. The methods raise the errors of fsspec's implementations."""

    def __init__(self, url: str) -> None:
        self.url = url

    @functools.cached_property
    def files(self) -> Any:
        """The folder as a file system. Opened at first use: that may connect."""
        from fsspec.core import url_to_fs
        from fsspec.implementations.dirfs import DirFileSystem

        files, root = url_to_fs(self.url)
        return DirFileSystem(root, files)

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder; none without a folder."""
        self.files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return sorted(Path(path).name for path in self.files.ls(folder, detail=False))
        return []

    def head(self, name: str) -> bytes:
        """Return the first 64 KiB of a file; none without a file."""
        with contextlib.suppress(FileNotFoundError):
            return bytes(self.files.cat_file(name, start=0, end=_HEAD_BYTES))
        return b""

    def target(self, link: str) -> str:
        """Return the name of the checkpoint that `last` or `best` stands for, or ""."""
        path = Path(self.head(f"checkpoints/{link}").decode(errors="replace").strip())
        return path.name if parse_name(path) else ""

    def download(self, run: Path, name: str, *, is_whole: bool) -> None:
        """Download a checkpoint to a run's local folder, as its last; if `is_whole`, the best one and records too."""
        checkpoints = run / "checkpoints"
        if is_whole:
            part = self._fetch("", folders.RECORDS, checkpoints)
            for path in part.iterdir():
                path.replace(run / path.name)
            part.rmdir()
        for link, target in (("best", self.target("best") if is_whole else ""), ("last", name)):
            final = checkpoints / target
            if target and not final.exists():
                part = self._fetch(f"checkpoints/{target}/", _CHECKPOINT, checkpoints)
                if (part / SUMS).exists():
                    with contextlib.suppress(OSError):  # another host on the same disk was faster
                        part.rename(final)
                shutil.rmtree(part, ignore_errors=True)
            if target and final.exists():
                point(checkpoints / link, final)

    def _fetch(self, folder: str, patterns: tuple[str, ...], into: Path) -> Path:
        """Download the files of a folder that match, to a new hidden folder in `into`, which the next run removes."""
        own_folder(into)
        (part := into / f".saving-{uuid.uuid4().hex}").mkdir()
        names = [name for name in self.names(folder) if any(fnmatch(name, pattern) for pattern in patterns)]
        self.files.get([f"{folder}{name}" for name in names], [str(part / name) for name in names])
        return part


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turn an error of a store in the block into a `RequestError`."""
    try:
        yield
    except LockstepError:
        raise
    except bounded.Late as error:
        raise RequestError(f"{url}: no answer within {_ANSWER_S:g} s; check the address and the network.") from error
    except ImportError as error:
        raise RequestError(f"{url} needs a package that is not installed: {one_line(str(error))}.") from error
    except Exception as error:  # each implementation has its own
        raise RequestError(f"{url} cannot be used ({reason(error)}); check the URL and the permissions.") from error


def restore(config: RunConfig, world: World, *, is_restart: bool, must_exist: bool) -> None:
    """Claim the run's folder in the store; download the checkpoint that the run continues (*collective*).

    Each host without it downloads it; one that the store lacks counts if all hosts have it. Raises `RequestError` for a
    store that cannot be used, and for a folder of another run; with `must_exist`, also without a checkpoint.
    """
    store, folder, resume = Store(config.record.remote), config.record.output or Path(), config.checkpoint.resume
    is_own = is_restart or resume == "auto" or (resume and folders.run_of(Path(resume).absolute()) == folder)

    def claim() -> tuple[str, str]:
        if is_restart and world.topology.nodes == 1 and (local := _newest(folder)):
            return local, ""  # a store that is down for a while ends no run
        with _reaching(store.url):
            claim = functools.partial(_claim, store, folder, is_own=bool(is_own), must_exist=must_exist)
            return bounded.within(_ANSWER_S, claim, "store")

    def download(is_turn: bool) -> None:
        if is_turn and name != _newest(folder):
            with _reaching(store.url):
                store.download(folder, name, is_whole=world.is_main)

    newest, stored = world.from_main(claim)
    has_newest = newest == stored or (folder / "checkpoints" / newest).exists()
    name = newest if all(world.gather(has_newest)) else stored
    for is_turn in (world.is_main, world.topology.local_rank == 0):  # other hosts may share rank 0's disk
        world.together(functools.partial(download, is_turn and bool(name)))


def _newest(folder: Path) -> str:
    """Return the name of the checkpoint that a run in `folder` would continue, or ""."""
    path = find(folder)
    return Path(os.path.realpath(path)).name if path else ""


def _number(name: str) -> tuple[int, int]:
    return parse_name(Path(name)) or (-1, 0)


def _claim(store: Store, folder: Path, *, is_own: bool, must_exist: bool) -> tuple[str, str]:
    """Check and mark the folder in the store; return the names of the newest checkpoint, and of the last one there."""
    last = store.target("last")
    newest = max(_newest(folder), last, key=_number)
    if must_exist and not newest:
        raise RequestError(f"--resume {store.url}: there is no complete checkpoint; check the URL.")
    if not is_own and any(fnmatch(name, pattern) for name in store.names() for pattern in folders.WRITTEN):
        raise RequestError(f"{store.url} holds a run already: continue it with --resume auto, or give another URL.")
    _check_same_run(store, folder)
    with contextlib.suppress(FileExistsError, NotImplementedError):
        store.files.mkdir("", create_parents=False)  # and no bucket
    store.files.pipe_file(LOCK, f"process {os.getpid()} on {platform.node()}\n".encode())  # fails without permission
    return (newest, last) if is_own else ("", "")


def _check_same_run(store: Store, folder: Path) -> None:
    """Raise `RequestError` if the local folder has another run than the store, or another checkpoint of a step."""
    local = b""
    with contextlib.suppress(FileNotFoundError), open(folder / "steps.jsonl", "rb", opener=unlinked) as file:
        local = file.read(_HEAD_BYTES).partition(b"\n")[0]
    stored = store.head("steps.jsonl").partition(b"\n")[0]  # the run's first start, with its time
    if local and stored and local != stored:
        raise RequestError(f"{store.url} holds another run than {shown(folder)}; give another URL, or --output.")


def fetched(url: str) -> Path:
    """Download a run, or the one of a checkpoint's URL, to its local folder; return the local path.

    Raises `RequestError` for a run without a complete checkpoint, and for a local folder of another run.
    """
    address, slash, checkpoint = url.rstrip("/").partition("/checkpoints/")
    store, folder = Store(address), local_folder(address)
    with _reaching(address):
        name = bounded.within(_ANSWER_S, lambda: store.target("last"), "store")
        if not name:
            raise RequestError(f"There is no complete checkpoint at {url}; check the URL.")
        _check_same_run(store, folder)
        if _number(name) > _number(_newest(folder)):
            store.download(folder, name, is_whole=True)
    return folder / f"checkpoints/{checkpoint}" if slash else folder


class Upload(Recorder):
    """Copies a run's folder to a store, in a thread. A failure is reported once; the next upload tries again.

    `record` records an event of the run. The thread starts with the run.
    """

    def __init__(self, config: RunConfig, record: Callable[..., None]) -> None:
        self._store, self._folder = Store(config.record.remote), config.record.output or Path()
        self._keep, self._limit_s = config.checkpoint.keep, config.parallel.stall_timeout / 2
        self._record = record
        self._wake, self._done = threading.Event(), threading.Event()  # of the latest `flush`
        self._is_over = self._is_late = False
        self._failure = self._reported = ""
        self._complete: set[str] = set()  # checkpoints in the store
        self._targets: dict[str, str] = {}  # of `best` and `last` there
        self._sent: dict[Path, tuple[int, int]] = {}  # size and time of each record in the store
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    def record(self, event: str, **fields: Any) -> None:
        """Upload a new checkpoint at once, records from time to time."""
        if event == "start":
            self._thread.start()
        elif event == "checkpoint":
            self._wake.set()
        if event not in ("warning", "upload"):
            self._report_failure()

    def flush(self, limit_s: float = math.inf) -> None:
        """Wait until the store has all files so far, or for half of --stall-timeout or `limit_s`."""
        if not self._thread.is_alive() or self._is_late:
            return
        done = self._done = threading.Event()
        self._wake.set()
        if not done.wait(_SILENT_S):
            limit_s = min(limit_s, self._limit_s)
            self._record("upload", text=f"waiting for the upload to {self._store.url}, {limit_s:g} s at most")
            self._is_late = not done.wait(limit_s)
            if self._is_late:
                self._failure = f"it takes longer than {limit_s:g} s"
        self._report_failure()

    def close(self) -> None:
        """End the thread, without waiting: the run may have failed, and its other ranks wait for the news."""
        self._is_over = True
        self._wake.set()

    def _report_failure(self) -> None:
        is_known, self._reported = bool(self._reported), self._failure
        if self._reported and not is_known:
            folder = shown(self._folder)
            text = f"The upload to {self._store.url} failed ({self._reported}): {folder} has all files, and the next "
            self._record("warning", text=f"{text}upload sends them.")

    def _run(self) -> None:
        pause_s = 0.0
        while not self._is_over:
            self._wake.wait(pause_s)
            self._wake.clear()
            begun_s, done = time.monotonic(), self._done
            try:
                self._upload()
                self._failure = ""
            except Exception as error:  # each implementation has its own
                self._failure = reason(error)
            done.set()
            pause_s = max(_EVERY_S, _SHARE * (time.monotonic() - begun_s))

    def _upload(self) -> None:
        checkpoints = self._folder / "checkpoints"
        links = [link for link in reversed(LINKS) if (checkpoints / link).is_symlink()]  # `last` comes last
        targets = {link: (checkpoints / link).readlink().name for link in links}
        for name in {*targets.values()} - self._complete:
            if self._upload_checkpoint(checkpoints / name):
                self._complete.add(name)
        for path in self._records():
            status = path.stat()
            version = status.st_size, status.st_mtime_ns
            if status.st_size and self._sent.get(path) != version:
                self._put(path, str(path.relative_to(self._folder)))
                self._sent[path] = version
        if "last" in targets and targets != self._targets and {*targets.values()} <= self._complete:
            for link, name in targets.items():
                self._store.files.pipe_file(f"checkpoints/{link}", f"{name}\n".encode())
            self._delete_old(*targets.values())
            self._targets = targets

    def _put(self, path: Path, name: str) -> None:
        self._store.files.makedirs(name.rpartition("/")[0], exist_ok=True)
        self._store.files.put_file(str(path), name)

    def _upload_checkpoint(self, folder: Path) -> bool:
        """Upload a checkpoint; return False if the run has deleted it."""
        place, store = f"checkpoints/{folder.name}", self._store
        (part := folder.with_name(f".saving-{uuid.uuid4().hex}")).mkdir()
        try:
            for path in folder.iterdir():  # hard links stay when the run deletes the checkpoint
                (part / path.name).hardlink_to(path)
            stored = store.head(f"{place}/{SUMS}")
            if stored != (part / SUMS).read_bytes():
                if stored:  # another checkpoint of that step, of an abandoned branch
                    self._withdraw(folder.name)
                for path in sorted(part.iterdir(), key=lambda path: path.name == SUMS):
                    self._put(path, f"{place}/{path.name}")
        except FileNotFoundError:
            if folder.exists():
                raise
            return False
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return True

    def _withdraw(self, name: str) -> None:
        """Mark a checkpoint there as incomplete: `last` then stands for the newest complete one, `best` for none."""
        files = self._store.files
        links = [link for link in LINKS if self._store.target(link) == name]
        names = [other for other in self._store.names("checkpoints") if parse_name(Path(other)) and other != name]
        complete = [other for other in names if self._store.head(f"checkpoints/{other}/{SUMS}")]
        for link in links:
            if link == "last" and complete:
                files.pipe_file(f"checkpoints/{link}", f"{max(complete, key=_number)}\n".encode())
            else:
                files.rm(f"checkpoints/{link}")
        files.rm(f"checkpoints/{name}/{SUMS}")
        self._targets = {}

    def _records(self) -> Iterator[Path]:
        for path in folders.list_run_files(self._folder):
            paths = path.iterdir() if path.name in ("failures", "output") and path.is_dir() else (path,)
            yield from (path for path in paths if path.is_file() and not path.is_symlink())

    def _delete_old(self, *targets: str) -> None:
        """Delete checkpoints after the last one, of an abandoned branch, and those before the last `keep`."""
        names = sorted((name for name in self._store.names("checkpoints") if parse_name(Path(name))), key=_number)
        newest = [name for name in names if _number(name) <= _number(targets[-1])][-self._keep :]
        for name in {*names} - {*newest, *targets}:
            self._store.files.rm(f"checkpoints/{name}", recursive=True)

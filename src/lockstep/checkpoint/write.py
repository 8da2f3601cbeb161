"""Saving: a copy of the tensors, then files, checksums, a rename and two links, in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..files import check_own, own_folder, shown, sync_folder
from .layout import FORMAT, STATE, SUMS, VERSION, digest, free_name, render, steps
from .read import peek
from .state import State

_HIDDEN = re.compile(r"\.(saving|deleting|last|best)-.*")


class Checkpoints:
    """Saves to one folder, in the background, one checkpoint at a time.

    `warn` is told, in the caller's thread, when a checkpoint could not be written: training goes on, the older
    checkpoints stay, and the next save tries again. `saved`, if given, hears `(step, folder)` of each one that is
    safely on the disk. Both are called from `save`, `poll`, `wait` and `close`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        warn: Callable[[str], None],
        saved: Callable[[int, Path], None] | None = None,
        origin: Path | None = None,
    ) -> None:
        """`origin` is the checkpoint that the run was taken up from: it stays until there are two newer ones."""
        self.folder = folder
        self._origin = origin.resolve() if origin else None  # for its name, which "." has not
        self._warn = warn
        self._saved = saved
        self._writer: threading.Thread | None = None
        self._outcome: Path | BaseException | None = None
        self._failed = False
        self._step = 0
        own_folder(folder)
        _tidy(folder)

    def save(self, state: State, *, step: int, best: bool) -> None:
        """Copy the state, have it written in the background, and return.

        Tensors are named `group/name` (`model/conv1.weight`). `meta` comes back as JSON gives it (tuples as lists);
        NaN and infinities are allowed in it. Waits for the save before this one, if that is still being written.
        Raises TypeError where `meta` is not what JSON can hold.
        """
        self.wait()
        groups = _snapshot(state.tensors)
        text = render({"format": FORMAT, "version": VERSION, "meta": state.meta})
        self._step = step
        self._writer = threading.Thread(target=self._write, args=(groups, text, best), name="checkpoint")
        self._writer.start()

    def poll(self) -> None:
        """Tell `warn` or `saved` how the last save ended, if it has; never waits."""
        if self._writer is not None and not self._writer.is_alive():
            self.wait()

    def wait(self) -> None:
        """Return once nothing is being written."""
        if self._writer is None:
            return
        self._writer.join()
        outcome, self._writer, self._outcome = self._outcome, None, None
        again, self._failed = self._failed, isinstance(outcome, OSError | SafetensorError)
        if isinstance(outcome, Path):
            if self._saved is not None:
                self._saved(self._step, outcome)
        elif isinstance(outcome, OSError | SafetensorError):
            where, why = shown(self.folder), _reason(outcome)
            self._warn(
                f"The checkpoint of step {self._step} could not be written either ({why})."
                if again
                else f"The checkpoint of step {self._step} could not be written to {where} ({why}); "
                f"training goes on{self._before()}."
            )
        elif outcome is not None:
            raise outcome

    def _before(self) -> str:
        with contextlib.suppress(OSError):
            if steps(self.folder):
                return ", and the checkpoints before it are untouched"
        return ""

    def close(self) -> None:
        """Return once the last checkpoint is on the disk."""
        self.wait()

    def _write(self, groups: dict[str, dict[str, Tensor]], text: bytes, best: bool) -> None:
        try:
            self._outcome = _publish(self.folder, groups, text, step=self._step, best=best, origin=self._origin)
            self._origin = None
        except BaseException as error:  # handed to the thread that trains, by `wait`
            self._outcome = error


def _reason(error: OSError | SafetensorError) -> str:
    """Return the operating system's word, which safetensors hands on within a sentence of its own."""
    if found := re.search(r"os error (\d+)", str(error)):
        return os.strerror(int(found[1]))
    return getattr(error, "strerror", None) or str(error)


def _snapshot(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return copies in host memory, by group: no storage is shared with the live tensors.

    They keep the order in memory, since training waits for them: to turn channels_last weights takes more than
    twice as long, and is left to the thread that writes.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    on_device = set()
    for name, tensor in tensors.items():
        group, slash, rest = name.partition("/")
        assert slash, f"tensor {name!r} is not named group/name"
        assert group.isidentifier(), f"tensor {name!r}: its group becomes a file name"
        # Copies from a GPU to pinned memory are queued together and waited for once.
        copy = torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)
        copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        groups.setdefault(group, {})[rest] = copy
        if tensor.is_cuda:
            on_device.add(tensor.device)
    for device in on_device:
        torch.cuda.current_stream(device).synchronize()
    return groups


def _publish(
    folder: Path, groups: dict[str, dict[str, Tensor]], text: bytes, *, step: int, best: bool, origin: Path | None
) -> Path:
    """Write a checkpoint, move the links to it and return its folder. An OSError leaves the old ones as they were.

    Of the older ones stay the last and the best; where the last is damaged, the run comes from `origin`, which is not.
    """
    check_own(folder)
    part = folder / f".saving-{step:08d}-{os.getpid()}"
    final = free_name(folder, step)
    try:
        _write_folder(part, groups, text)
        part.rename(final)
    except (OSError, SafetensorError):
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(folder)
    before = _target(folder / "last")
    if best:  # first: a run that is killed in between goes on from the last one, and finds its best again
        _point(folder / "best", final)
    _point(folder / "last", final)
    sync_folder(folder)
    kept = {final, before, _target(folder / "best"), folder / origin.name if origin else None}
    for _, old in steps(folder):
        if old not in kept and (old / SUMS).exists():  # another program's may be called so
            with contextlib.suppress(OSError):  # one that somebody reads over a network; the next save tries again
                _delete(old)
    return final


def _write_folder(part: Path, groups: dict[str, dict[str, Tensor]], text: bytes) -> None:
    part.mkdir()
    for group, tensors in groups.items():
        for name, tensor in tensors.items():  # as the file has them; the copy of before goes, one by one
            tensors[name] = tensor.contiguous()
        # To a file, not to bytes: that call lets other threads run, while `save` stopped them for 42 ms per 100 MB.
        save_file(tensors, part / f"{group}.safetensors")
    (part / STATE).write_bytes(text)
    for group in groups:  # which safetensors leaves to the owner alone, whatever the umask grants
        (part / f"{group}.safetensors").chmod((part / STATE).stat().st_mode & 0o777)
    sums = {path.name: digest(path) for path in sorted(part.iterdir())}
    (part / SUMS).write_bytes(render(sums))
    for path in part.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(part)


def _target(link: Path) -> Path | None:
    """Return the folder beside `link` that it points to, whether that is there or not."""
    return link.parent / link.readlink() if link.is_symlink() else None


def _point(link: Path, target: Path) -> None:
    """Make `link` point to its sibling `target`, atomically."""
    part = link.with_name(f".{link.name}-{os.getpid()}")
    part.unlink(missing_ok=True)
    part.symlink_to(target.name, target_is_directory=True)
    part.replace(link)


def _delete(folder: Path) -> None:
    """Remove a checkpoint; it loses its name first, so that a kill half way leaves no checkpoint with missing files."""
    hidden = folder.with_name(f".deleting-{folder.name}")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _tidy(folder: Path) -> None:
    """Remove what killed saves left, and make `last` and `best` links again where a copy of the run has folders."""
    for path in list(folder.iterdir()):
        if not _HIDDEN.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for link in (folder / "last", folder / "best"):
        if link.is_dir() and not link.is_symlink():
            step = (peek(link) or {}).get("step")
            if type(step) is int and 0 <= step < 2**63:
                named = free_name(folder, step)
                link.rename(named)
                _point(link, named)

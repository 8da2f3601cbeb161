"""Save checkpoints in a background thread. Copy, files, checksums, a rename, two links."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..files import check_own, own_folder, reason, shown, sync_folder
from .layout import COMPLEX, FORMAT, LINKS, STATE, SUMS, VERSION, digest, free_name, render, steps
from .read import peek
from .state import State

_HIDDEN = re.compile(r"\.(saving|deleting|last|best)-.*")
Groups = dict[str, dict[str, Tensor]]


class Checkpoints:
    """Saves to one folder, in the background, one checkpoint at a time.

    `warn` is told when a checkpoint could not be written: training goes on, the older ones stay, and the next save
    tries again. `saved` hears `(step, folder)` of each one that is safely on the disk. Both are called in the caller's
    thread, from `save`, `poll` and `wait`. `origin` is the checkpoint that the run was taken up from.
    """

    def __init__(
        self,
        folder: Path,
        *,
        warn: Callable[[str], None],
        saved: Callable[[int, Path], None] = lambda step, path: None,
        origin: Path | None = None,
    ) -> None:
        self.folder, self._warn, self._saved = folder, warn, saved
        self._writing: Future[Path] | None = None
        self._step = 0
        own_folder(folder)
        _tidy(folder)
        self._before = folder / origin.resolve().name if origin else None  # by the name that it has now

    def save(self, state: State, *, step: int, best: bool) -> None:
        """Copy the state and write it in the background. Waits for the previous save.

        Tensors are named `group/name` (`model/conv1.weight`). `meta` comes back as JSON gives it (tuples as lists); NaN
        and infinities are allowed in it. Raises TypeError where JSON cannot hold `meta`.
        """
        self.wait()
        groups = _snapshot(state.tensors)
        text = render({"format": FORMAT, "version": VERSION, "meta": state.meta})
        before = self._before or _target(self.folder / "last")
        writing = Future[Path]()
        given = (writing, self.folder, groups, text, step, best, before)
        threading.Thread(target=_write, args=given, name="checkpoint").start()
        self._step, self._writing = step, writing  # not before: `wait` waits for it

    def poll(self) -> None:
        """Report a finished save to `warn` or `saved`. Never waits."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self._writing is None:
            return
        error = self._writing.exception()
        writing, self._writing = self._writing, None
        if isinstance(error, OSError | SafetensorError):
            self._warn(
                f"The checkpoint of step {self._step} could not be written to {shown(self.folder)} ({reason(error)}); "
                "training goes on, and older checkpoints are untouched."
            )
        else:
            self._saved(self._step, writing.result())
            self._before = None


def _snapshot(tensors: dict[str, Tensor]) -> Groups:
    """Return copies in host memory, by group. No storage is shared with the live tensors."""
    groups: Groups = {}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        assert rest, f"tensor {name!r} is not named group/name"
        assert group.isidentifier(), f"tensor {name!r}: its group becomes a file name"
        # Copies from a GPU to pinned memory are queued together and waited for once. The order in memory stays, since
        # training waits: to turn channels_last weights takes more than twice as long, and is left to the thread.
        copy = torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)
        copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        groups.setdefault(group, {})[rest] = copy
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return groups


def _write(
    writing: Future[Path], folder: Path, groups: Groups, text: bytes, step: int, best: bool, before: Path | None
) -> None:
    """Write a checkpoint, move the links, remove older ones. An OSError leaves the old ones as they were.

    Of the older ones stay the best, and `before`: the last one, or the one from which the run continues, since the last
    may be damaged.
    """
    part = folder / f".saving-{step:08d}-{os.getpid()}"
    try:
        check_own(folder)
        final = free_name(folder, step)
        _write_folder(part, groups, text)
        part.rename(final)
        sync_folder(folder)
        if best:  # first: a run that is killed in between goes on from the last one, and finds its best again
            _point(folder / "best", final)
        _point(folder / "last", final)
        sync_folder(folder)
        for _, old in steps(folder):
            if old not in (final, before, _target(folder / "best")) and (old / SUMS).exists():  # else it is not ours
                with contextlib.suppress(OSError):  # one that somebody reads over a network; the next save tries again
                    _delete(old)
        writing.set_result(final)
    except BaseException as error:  # raised in the thread that trains, by `wait`
        shutil.rmtree(part, ignore_errors=True)
        writing.set_exception(error)


def _write_folder(part: Path, groups: Groups, text: bytes) -> None:
    part.mkdir()
    for group, tensors in groups.items():
        for name, tensor in tensors.items():  # as the file has them; the copy of before goes, one by one
            tensors[name] = tensor.contiguous()
        # Which the format lacks.
        wide = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
        tensors |= {name: torch.view_as_real(tensors[name]) for name in wide}
        # To a file, not to bytes: that call lets other threads run, while `save` stopped them for 42 ms per 100 MB.
        save_file(tensors, part / f"{group}.safetensors", metadata={COMPLEX: "\n".join(wide)} if wide else None)
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
    """Return the path of the link's target, existing or not. In the link's folder; None for no link."""
    return link.parent / link.readlink() if link.is_symlink() else None


def _point(link: Path, target: Path) -> None:
    part = link.with_name(f".{link.name}-{os.getpid()}")
    part.unlink(missing_ok=True)
    part.symlink_to(target.name, target_is_directory=True)
    part.replace(link)


def _delete(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill leaves none with missing files."""
    hidden = folder.with_name(f".deleting-{folder.name}")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _tidy(folder: Path) -> None:
    """Remove leftovers of killed saves; restore `last` and `best` as links. A copied run may have folders there."""
    for path in [path for path in folder.iterdir() if _HIDDEN.fullmatch(path.name)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for link in (folder / name for name in LINKS):
        step = (peek(link) or {}).get("step") if link.is_dir() and not link.is_symlink() else None
        if type(step) is int and step >= 0:
            step_folder = free_name(folder, step)
            link.rename(step_folder)
            _point(link, step_folder)

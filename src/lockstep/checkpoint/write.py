"""Save checkpoints in a background thread: copy, write, checksum, rename, link."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..files import check_own, own_folder, reason, shown, sync_folder
from .layout import COMPLEX, FORMAT, LINKS, STATE, SUMS, VERSION, digest, free_name, list_checkpoints, render
from .read import peek
from .state import State

_STAGE_BYTES = 1 << 26
_ALIGNED = 16  # bytes, of the largest dtype
_HIDDEN = re.compile(r"\.(saving|deleting|last|best)-.*")
Groups = dict[str, dict[str, Tensor]]


class Checkpoints:
    """Saves to one folder, in the background, one checkpoint at a time.

    If a checkpoint cannot be written, `warn` is called with a message: training continues, older checkpoints stay, and
    the next save tries again. `saved` is called with `(step, folder)` once a checkpoint is synced to disk. Both run in
    the caller's thread, from `save`, `poll` and `wait`. `origin` is the checkpoint that the run continues. The last
    `keep` checkpoints stay, and the best.
    """

    def __init__(
        self,
        folder: Path,
        *,
        warn: Callable[[str], None],
        saved: Callable[[int, Path], None] = lambda step, path: None,
        origin: Path | None = None,
        keep: int = 2,
    ) -> None:
        self.folder, self._warn, self._saved, self._keep = folder, warn, saved, keep
        self._writing: Future[Path] | None = None
        self._step = 0
        own_folder(folder)
        _tidy(folder)
        # The run's own so far, oldest first: not those after `origin`. `_tidy` may have renamed it.
        newest = folder / origin.resolve().name if origin else _target(folder / "last")
        checkpoints = [path for _, path in list_checkpoints(folder)]
        self._own = checkpoints[: checkpoints.index(newest) + 1] if newest in checkpoints else []

    def save(self, state: State, *, step: int, best: bool) -> None:
        """Copy the state and write it in the background. Waits for the previous save.

        Tensors are named `group/name` (`model/conv1.weight`). `meta` is stored as JSON (tuples become lists; NaN and
        infinities are allowed). Raises TypeError for a `meta` that JSON cannot represent.
        """
        self.wait()
        groups = _snapshot(state.tensors)
        text = render({"format": FORMAT, "version": VERSION, "meta": state.meta})
        writing = Future[Path]()
        arguments = (writing, self.folder, groups, text, step, best, self._own, self._keep)
        threading.Thread(target=_write, args=arguments, name="checkpoint").start()
        self._step, self._writing = step, writing  # not earlier: `wait` would wait for a thread that did not start

    def poll(self) -> None:
        """Report a finished save to `warn` or `saved`, without waiting."""
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
            self._own = [*self._own, writing.result()][-self._keep :]
            self._saved(self._step, writing.result())


def _snapshot(tensors: dict[str, Tensor]) -> Groups:
    """Return copies in host memory, by group. They share no storage with the live tensors."""
    groups: Groups = {}
    for name, tensor in tensors.items():
        group, _, key = name.partition("/")
        assert key, f"tensor {name!r} is not named group/name"
        assert group.isidentifier(), f"tensor {name!r}: its group becomes a file name"
        # The memory order stays, since training waits: reordering channels_last weights takes more than twice as long,
        # and the thread does it.
        groups.setdefault(group, {})[key] = torch.empty_like(tensor.detach(), device="cpu")
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for name, tensor in tensors.items():
        group, _, key = name.partition("/")
        by_device.setdefault(tensor.device, []).append((groups[group][key], tensor.detach()))
    for device, pairs in by_device.items():
        if device.type == "cpu":
            for copy, tensor in pairs:
                copy.copy_(tensor)
        else:
            stage(pairs, torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True))
    return groups


def stage(pairs: Sequence[tuple[Tensor, Tensor]], buffer: Tensor) -> None:
    """Fill host tensors from a device's, (copy, tensor) of equal memory order, through a pinned `buffer` (bytes,).

    torch pins whole powers of two and keeps them: pinned copies would take up to twice the state's memory for good.
    Small tensors share a wait for the device.
    """
    waiting: list[tuple[Tensor, Tensor]] = []
    used = 0

    def drain() -> None:
        nonlocal used
        if waiting:
            torch.accelerator.current_stream(pairs[0][1].device).synchronize()
        for part, staged in waiting:
            part.copy_(staged)
        waiting.clear()
        used = 0

    for copy, tensor in pairs:
        flat, source = _flat(copy), _flat(tensor if tensor.stride() == copy.stride() else tensor.clone())
        step = len(buffer) // copy.element_size()
        for part, sent in zip(torch.split(flat, step), torch.split(source, step), strict=True):
            if used + part.nbytes > len(buffer):
                drain()
            staged = buffer[used : used + part.nbytes].view(part.dtype)
            staged.copy_(sent, non_blocking=True)
            waiting.append((part, staged))
            used += -(-part.nbytes // _ALIGNED) * _ALIGNED
    drain()


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps as a view (elements,) of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _write(
    writing: Future[Path],
    folder: Path,
    groups: Groups,
    text: bytes,
    step: int,
    best: bool,
    earlier: Sequence[Path],
    keep: int,
) -> None:
    """Write a checkpoint, move the links, remove older ones. An OSError leaves the older ones unchanged.

    The best one stays, and the last `keep` of the run: `earlier` ones and this one.
    """
    part = folder / f".saving-{step:08d}-{os.getpid()}"
    try:
        check_own(folder)
        final = free_name(folder, step)
        _write_folder(part, groups, text)
        part.rename(final)
        sync_folder(folder)
        if best:  # first: a run killed in between continues from the old last one, and reaches its best again
            point(folder / "best", final)
        point(folder / "last", final)
        sync_folder(folder)
        newest = [*earlier, final][-keep:]
        for _, old in list_checkpoints(folder):
            is_kept = old in newest or old == _target(folder / "best")
            if not is_kept and (old / SUMS).exists():  # else lockstep did not write it
                with contextlib.suppress(OSError):  # another host may be reading it; the next save tries again
                    _delete(old)
        writing.set_result(final)
    except BaseException as error:  # `wait` raises it in the training thread
        shutil.rmtree(part, ignore_errors=True)
        writing.set_exception(error)


def _write_folder(part: Path, groups: Groups, text: bytes) -> None:
    part.mkdir()
    for group, tensors in groups.items():
        for name, tensor in tensors.items():  # as the format requires; each reordered copy replaces its snapshot
            tensors[name] = tensor.contiguous()
        # The format lacks complex128.
        complex_names = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
        tensors |= {name: torch.view_as_real(tensors[name]) for name in complex_names}
        # `save_file` releases Python's lock; `save`, to bytes, blocked other threads for 42 ms per 100 MB.
        save_file(
            tensors,
            part / f"{group}.safetensors",
            metadata={COMPLEX: "\n".join(complex_names)} if complex_names else None,
        )
    (part / STATE).write_bytes(text)
    for group in groups:  # safetensors grants access to the owner alone, whatever the umask
        (part / f"{group}.safetensors").chmod((part / STATE).stat().st_mode & 0o777)
    sums = {path.name: digest(path) for path in sorted(part.iterdir())}
    (part / SUMS).write_bytes(render(sums))
    for path in part.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(part)


def _target(link: Path) -> Path | None:
    """Return the path of the link's target, in the link's folder, existing or not; None for no link."""
    return link.parent / link.readlink() if link.is_symlink() else None


def point(link: Path, target: Path) -> None:
    """Set a link atomically to a checkpoint in the same folder."""
    part = link.with_name(f".{link.name}-{os.getpid()}")
    part.unlink(missing_ok=True)
    part.symlink_to(target.name, target_is_directory=True)
    part.replace(link)


def _delete(folder: Path) -> None:
    """Remove a checkpoint. Rename it first, so that a kill leaves no incomplete checkpoint under its name."""
    hidden = folder.with_name(f".deleting-{folder.name}")
    folder.rename(hidden)
    shutil.rmtree(hidden)


def _tidy(folder: Path) -> None:
    """Remove leftovers of killed saves; restore links `last` and `best` that a copy has turned into folders."""
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
            point(link, step_folder)

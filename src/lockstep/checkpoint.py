"""Checkpoints: one format for every strategy, that no kill can break and no flipped bit can pass.

    RUN/checkpoints/
      step-00000512/            written under a hidden name, synced to the disk, then renamed: it is whole or not there
        model.safetensors       tensors `model/...`; likewise optimizer.safetensors, ema.safetensors: one file a group
        state.json              the rest: step, epoch, seed, plan, config, states of random number generators
        checksums.json          SHA-256 of each file above
      last -> step-00000512     relative links, replaced atomically
      best -> step-00000384

Saving costs the training one copy of the tensors; a thread writes them while training goes on. Kept are the
checkpoints that `last` and `best` point to and the one that was last before, so that a damaged one leaves a good one.

Nothing here can run code: tensors are safetensors, the rest is JSON. Loading verifies every checksum first, and what
does not match is refused with the newest checkpoint that is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from .errors import RequestError
from .record.files import sync_folder
from .state import State

FORMAT = "lockstep checkpoint"
VERSION = 1

_STATE = "state.json"
_SUMS = "checksums.json"
_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_HIDDEN = re.compile(r"\.(saving|deleting|last|best)-.*")


class Checkpoints:
    """Saves to one folder, in the background, one checkpoint at a time.

    `warn` is told, in the caller's thread, when a checkpoint could not be written: training goes on, the older
    checkpoints stay, and the next save tries again. `saved`, if given, hears `(step, folder)` of each one that is
    safely on the disk. Both are called from `save`, `poll`, `wait` and `close`.
    """

    def __init__(
        self, folder: Path, *, warn: Callable[[str], None], saved: Callable[[int, Path], None] | None = None
    ) -> None:
        self._folder = folder
        self._warn = warn
        self._saved = saved
        self._writer: threading.Thread | None = None
        self._outcome: Path | BaseException | None = None
        self._step = 0
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)

    def save(self, state: State, *, step: int, best: bool) -> None:
        """Copy the state, have it written in the background, and return.

        Tensors are named `group/name` (`model/conv1.weight`). `meta` comes back as JSON gives it (tuples as lists);
        NaN and infinities are allowed in it. Waits for the save before this one, if that is still being written.
        Raises TypeError where `meta` is not what JSON can hold.
        """
        self.wait()
        groups = _snapshot(state.tensors)
        text = _render({"format": FORMAT, "version": VERSION, "meta": state.meta})
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
        if isinstance(outcome, Path):
            if self._saved is not None:
                self._saved(self._step, outcome)
        elif isinstance(outcome, OSError | SafetensorError):
            self._warn(
                f"The checkpoint of step {self._step} could not be written to {self._folder} ({outcome}); "
                f"training goes on, and the checkpoints before it are untouched."
            )
        elif outcome is not None:
            raise outcome

    def close(self) -> None:
        """Return once the last checkpoint is on the disk."""
        self.wait()

    def _write(self, groups: dict[str, dict[str, Tensor]], text: bytes, best: bool) -> None:
        try:
            self._outcome = _publish(self._folder, groups, text, step=self._step, best=best)
        except BaseException as error:  # handed to the thread that trains, by `wait`
            self._outcome = error


def _snapshot(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return copies in host memory, contiguous, by group: no storage is shared with the live tensors."""
    groups: dict[str, dict[str, Tensor]] = {}
    on_device = set()
    for name, tensor in tensors.items():
        group, slash, rest = name.partition("/")
        assert slash, f"tensor {name!r} is not named group/name"
        assert group.isidentifier(), f"tensor {name!r}: its group becomes a file name"
        # Copies from a GPU to pinned memory are queued together and waited for once.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        groups.setdefault(group, {})[rest] = copy
        if tensor.is_cuda:
            on_device.add(tensor.device)
    for device in on_device:
        torch.cuda.current_stream(device).synchronize()
    return groups


def _publish(folder: Path, groups: dict[str, dict[str, Tensor]], text: bytes, *, step: int, best: bool) -> Path:
    """Write a checkpoint, move the links to it and return its folder. An OSError leaves the old ones as they were."""
    part = folder / f".saving-{step:08d}-{os.getpid()}"
    final = _free_name(folder, step)
    try:
        _write_folder(part, groups, text)
        part.rename(final)
    except (OSError, SafetensorError):
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(folder)
    before = _target(folder / "last")
    _point(folder / "last", final)
    if best:
        _point(folder / "best", final)
    sync_folder(folder)
    kept = {final, before, _target(folder / "best")}
    for _, old in _steps(folder):
        if old not in kept:
            with contextlib.suppress(OSError):  # one that somebody reads over a network; the next save tries again
                _delete(old)
    return final


def _write_folder(part: Path, groups: dict[str, dict[str, Tensor]], text: bytes) -> None:
    part.mkdir()
    for group, tensors in groups.items():
        # To a file, not to bytes: that call lets other threads run, while `save` stopped them for 42 ms per 100 MB.
        save_file(tensors, part / f"{group}.safetensors")
    (part / _STATE).write_bytes(text)
    sums = {path.name: _digest(path) for path in sorted(part.iterdir())}
    (part / _SUMS).write_bytes(_render(sums))
    for path in part.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(part)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _render(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def _free_name(folder: Path, step: int) -> Path:
    """Return the folder for `step`: a resumed run may come again to a step whose older checkpoint is still in use."""
    path, count = folder / f"step-{step:08d}", 1
    while path.exists():
        count += 1
        path = folder / f"step-{step:08d}.{count}"
    return path


def _steps(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """Return the checkpoints in `folder`, oldest step first."""
    found = []
    for path in folder.iterdir():
        if (match := _FOLDER.fullmatch(path.name)) and path.is_dir():
            found.append(((int(match[1]), int(match[2] or 1)), path))
    return sorted(found)


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
            with contextlib.suppress(ValueError, KeyError, TypeError):
                step = int(json.loads((link / _STATE).read_bytes())["meta"]["step"])
                named = _free_name(folder, step)
                link.rename(named)
                _point(link, named)


def find(path: Path) -> Path | None:
    """Return the checkpoint that a run would go on from, or None where there is none yet.

    `path` is a run's folder, its `checkpoints`, or one checkpoint. Whether that one is whole is for `load` to say.
    """
    points_nowhere = path.is_symlink() and not path.exists()
    if points_nowhere or _is_checkpoint(path):
        return path
    for folder in (path / "checkpoints", path):
        if (folder / "last").is_symlink() or (folder / "last").is_dir():
            return folder / "last"
        # A run that was killed after its first checkpoint was whole, and before the link to it.
        if folder.is_dir() and (steps := _steps(folder)):
            return steps[-1][1]
    return None


def _is_checkpoint(path: Path) -> bool:
    """Return whether the folder is a checkpoint of ours, whole or damaged: either of its two JSON files says so."""
    if (path / _SUMS).is_file():
        return True
    try:
        return bool(json.loads((path / _STATE).read_bytes())["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def fingerprint(path: Path) -> str:
    """Return what tells this checkpoint from every other: its folder's name, and a digest of all its checksums."""
    folder = find(path)
    assert folder is not None, "only what was loaded has a fingerprint"
    return f"{folder.resolve().name} ({_digest(folder / _SUMS)[:8]})"


def load(path: Path) -> State:
    """Return the state in a checkpoint (`RUN/checkpoints/last`), or in a run's last one; tensors are on the CPU.

    Raises `RequestError` where there is nothing, something else, a newer format, or a file that is not what was
    written: then with the newest checkpoint beside it that is whole.
    """
    folder = find(path)
    if folder is None:
        raise RequestError(_why_not(path))
    if (newer := _newer_version(folder)) is not None:
        raise RequestError(
            f"The checkpoint {path} has format version {newer}; this lockstep reads up to version {VERSION}: "
            f"update lockstep-torch."
        )
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {}
    try:
        for name, data in _verified(folder):
            if name == _STATE:
                meta = json.loads(data)["meta"]
            elif name.endswith(".safetensors"):
                group = name.removesuffix(".safetensors")
                tensors |= {f"{group}/{key}": tensor for key, tensor in load_tensors(data).items()}
    except _DamageError as damage:
        raise RequestError(f"The checkpoint {path} cannot be used: {damage}; {_offer(folder)}") from damage
    return State(tensors, meta)


class _DamageError(Exception):
    """A checkpoint is not what was written; the message is a clause."""


def _verified(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of a checkpoint, once its checksum is verified; raise _DamageError."""
    if not folder.is_dir():
        raise _DamageError(f"{folder.name} points to {folder.readlink()}, which is not there")
    listed = _read(folder / _SUMS)
    try:
        sums = json.loads(listed)
    except ValueError:
        sums = None
    # Compared as a whole, so that there is no byte in the list, either, that could change unseen.
    if not isinstance(sums, dict) or _render(sums) != listed or _STATE not in sums:
        raise _DamageError(f"{_SUMS} is damaged")
    for name, expected in sums.items():
        data = _read(folder / name)
        if hashlib.sha256(data).hexdigest() != expected:
            raise _DamageError(f"{name} does not match its checksum (it was changed or cut short)")
        yield name, data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _DamageError(f"{path.name} cannot be read ({error.strerror})") from error


def _newer_version(folder: Path) -> int | None:
    """Return the format's version where it is one that this code does not know, None otherwise."""
    try:
        state = json.loads((folder / _STATE).read_bytes())
        version = state["version"] if state["format"] == FORMAT else VERSION
        listed = json.loads((folder / _SUMS).read_bytes()).get(_STATE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    # A flipped bit in the version is damage, and told as such.
    intact = listed is None or listed == _digest(folder / _STATE)
    return version if intact and isinstance(version, int) and version > VERSION else None


def _offer(damaged: Path) -> str:
    """Return the clause that names the newest whole checkpoint beside `damaged`."""
    beside = damaged.parent
    broken = damaged.resolve()
    for _, folder in reversed(_steps(beside)):
        if folder.resolve() != broken:
            with contextlib.suppress(_DamageError):
                for _ in _verified(folder):
                    pass
                return f"the last good one is {folder}: give that one instead."
    return "there is no other good one beside it."


def _why_not(path: Path) -> str:
    """Return the sentence for a path that holds no checkpoint."""
    if not path.exists():
        return (
            f"There is no checkpoint at {path}: no such file or folder; give a run's folder or one of its checkpoints."
        )
    if path.is_file():
        return (
            f"{path} is not a lockstep checkpoint: a checkpoint is a folder with {_STATE} and safetensors files, "
            f"and pickled files such as .pth are never loaded; give a run's folder or one of its checkpoints."
        )
    return f"{path} holds no lockstep checkpoint (no {_STATE}, no checkpoints/last); give a run that saved one."

"""Loading: which checkpoint a path means, whether it is what was written, and what to offer where it is not."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from .. import files
from ..errors import RequestError
from ..files import MOST_BYTES, parse_json
from .layout import FORMAT, STATE, SUMS, VERSION, digest, linked, numbered, render, steps
from .state import State

_TENSORS = ".safetensors"


def find(path: Path) -> Path | None:
    """Return the checkpoint that a run would go on from, or None where there is none yet.

    `path` is a run's folder, its `checkpoints`, or one checkpoint. Whether that one is whole is for `load` to say.
    """
    points_nowhere = path.is_symlink() and not path.exists()
    if points_nowhere or (path / SUMS).is_file() or peek(path) is not None:  # whole, or damaged
        return path
    for folder in (path / "checkpoints", path):
        if (folder / "last").is_symlink() or (folder / "last").is_dir():
            return folder / "last"
        # A run that was killed after its first checkpoint was whole, and before the link to it.
        if folder.is_dir() and (found := steps(folder)):
            return found[-1][1]
    return None


def fingerprint(folder: Path) -> str:
    """Return what tells this checkpoint from every other: its folder's name, and a digest of all its checksums."""
    return f"{folder.resolve().name} ({digest(folder / SUMS)[:8]})"


def load(path: Path) -> State:
    """Return the state in a checkpoint (`RUN/checkpoints/last`), or in a run's last one; tensors are on the CPU.

    Raises `RequestError` where there is nothing, something else, a newer format, or a file that is not what was
    written: then with the newest checkpoint beside it that is whole.
    """
    folder = find(path)
    if folder is None:
        raise RequestError(_why_not(path))
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {}
    try:
        folder = _folder(folder)
        for name, data in _verified(folder):
            if name == STATE:
                meta = _meta(path, data)
            else:
                group = name.removesuffix(_TENSORS)
                tensors |= {f"{group}/{key}": tensor for key, tensor in _loaded(name, data).items()}
    except _DamageError as damage:
        raise DamagedError(path, damage, _good_beside(folder)) from damage
    return State(tensors, meta, origin=folder)


def load_good(path: Path) -> State:
    """Return what `load` does or, where that one is damaged, the state in the newest whole one before it.

    Nothing is lost then but the steps between them. Where none is before it, a later one does, of a branch that the run
    had left. The state's `caution` names it. Raises what `load` does.
    """
    try:
        return load(path)
    except DamagedError as damaged:
        if damaged.good is None:
            raise
        state = load(damaged.good)
        caution = f"{path} is damaged ({damaged.why}): the run goes on from {damaged.good}"
        return dataclasses.replace(state, caution=caution)


def peek(path: Path) -> dict[str, Any] | None:
    """Return the `meta` of the checkpoint in `path` without its tensors; None where it cannot be read."""
    try:
        return _meta(path, files.read(linked(path) / STATE))
    except (OSError, RequestError, _DamageError):
        return None


class DamagedError(RequestError):
    """A checkpoint that is not what was written; `good` is one beside it that is (see `load_good`)."""

    def __init__(self, path: Path, why: Exception, good: Path | None) -> None:
        offer = (
            "there is no other good one beside it; start a new run in another --output."
            if good is None
            else f"the last good one is {good}: give that one instead."
        )
        super().__init__(f"The checkpoint {path} cannot be used: {why}; {offer}")
        self.why, self.good = str(why), good


class _DamageError(Exception):
    """A checkpoint is not what was written; the message is a clause."""


def _folder(named: Path) -> Path:
    """Return the checkpoint that `named` is or is a link to, as it is now: a run that trains meanwhile moves `last`."""
    try:
        folder = linked(named)
    except OSError as error:
        raise _DamageError(f"{named.name} cannot be followed ({error.strerror})") from error
    if not folder.is_dir():
        gone = f"{named.name} points to {named.readlink()}, which is" if named.is_symlink() else "it is"
        raise _DamageError(f"{gone} not there")
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


def _verified(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of a checkpoint once its checksum is verified, `state.json` first.

    Raises _DamageError.
    """
    listed = _read(folder / SUMS, MOST_BYTES)
    try:
        sums = parse_json(listed)
    except ValueError:
        sums = None
    if not isinstance(sums, dict) or STATE not in sums:
        raise _DamageError(f"{SUMS} is damaged")
    room = psutil.virtual_memory().total
    for name, expected in sorted(sums.items(), key=lambda item: item[0] != STATE):  # which says what the others are
        # A name that leads elsewhere would have other files read.
        if name != STATE and not (name.endswith(_TENSORS) and name.removesuffix(_TENSORS).isidentifier()):
            raise _DamageError(f"{SUMS} names {name!r}, which is no file of a checkpoint")
        data = _read(folder / name, MOST_BYTES if name == STATE else room)
        room -= len(data)
        if hashlib.sha256(data).hexdigest() != expected:
            raise _DamageError(f"{name} does not match its checksum (it was changed or cut short)")
        yield name, data
    # Compared as a whole, so that there is no byte in the list, either, that could change unseen.
    if render(sums) != listed:
        raise _DamageError(f"{SUMS} is damaged")


def _read(path: Path, most_bytes: int) -> bytes:
    try:
        return files.read(path, most_bytes=most_bytes)
    except OSError as error:
        raise _DamageError(f"{path.name} cannot be read ({error.strerror})") from error


def _meta(path: Path, data: bytes) -> dict[str, Any]:
    """Return the `meta` in the `state.json` of `path`; raise `RequestError` where its format is a newer one."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        state = parse_json(data)
        if state["format"] == FORMAT and isinstance(meta := state["meta"], dict):
            if state["version"] <= VERSION:
                return meta
            raise RequestError(
                f"The checkpoint {path} has format version {state['version']}; this lockstep reads up to version "
                f"{VERSION}: update lockstep-torch."
            )
    raise _DamageError(f"{STATE} is not what lockstep writes")


def _loaded(name: str, data: bytes) -> dict[str, Tensor]:
    try:
        return load_tensors(data)
    except (SafetensorError, *files.DEFECTS) as error:
        raise _DamageError(f"{name} is no file of tensors") from error


def _good_beside(damaged: Path) -> Path | None:
    """Return the newest whole checkpoint beside `damaged` that came before it, else the newest; None where none is.

    Later ones are of a branch that the run has left, when it was taken up at an older one: better than nothing.
    """
    beside = damaged.parent
    broken = Path(os.path.realpath(damaged))  # not `resolve`, which raises where a link points to itself
    number = numbered(broken)

    def preference(found: tuple[tuple[int, int], Path]) -> tuple[bool, tuple[int, int]]:
        return number is None or found[0] <= number, found[0]

    for _, folder in sorted(steps(beside), key=preference, reverse=True):
        if Path(os.path.realpath(folder)) != broken:
            with contextlib.suppress(_DamageError):
                for _ in _verified(folder):
                    pass
                return folder
    return None


def _why_not(path: Path) -> str:
    """Return the sentence for a path that holds no checkpoint."""
    if not path.exists():
        return (
            f"There is no checkpoint at {path}: no such file or folder; give a run's folder or one of its checkpoints."
        )
    if path.is_file():
        return (
            f"{path} is not a lockstep checkpoint: a checkpoint is a folder with {STATE} and safetensors files, "
            f"and pickled files such as .pth are never loaded; give a run's folder or one of its checkpoints."
        )
    return f"{path} holds no lockstep checkpoint (no {STATE}, no checkpoints/last); give a run that saved one."

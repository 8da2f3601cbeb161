"""Find, verify and load a checkpoint; suggest another if damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from .. import files
from ..errors import RequestError
from .layout import COMPLEX, FORMAT, STATE, SUMS, VERSION, digest, linked, numbered, render, steps
from .state import State

_TENSORS = re.compile(r"(\w+)\.safetensors")


class _DamageError(Exception):
    """A checkpoint's files are not as written; the message is a clause."""


def find(path: Path) -> Path | None:
    """Return the checkpoint from which a run would continue. Whole or damaged; None where there is none yet.

    `path` is a run's folder, its `checkpoints`, or one checkpoint.
    """
    is_dangling = path.is_symlink() and not path.exists()
    if is_dangling or (path / SUMS).is_file() or peek(path) is not None:
        return path
    for folder in (path / "checkpoints", path):
        if (folder / "last").is_symlink() or (folder / "last").is_dir():
            return folder / "last"
        # A run that was killed after its first checkpoint was whole, and before the link to it.
        if folder.is_dir() and (found := steps(folder)):
            return found[-1][1]
    return None


def fingerprint(folder: Path) -> str:
    """Return a checkpoint's identity: folder name and digest of its checksums."""
    return f"{folder.resolve().name} ({digest(folder / SUMS)[:8]})"


def load(path: Path, *, fall_back: bool = False) -> State:
    """Return the state in a checkpoint (`RUN/checkpoints/last`), or a run's last one.

    Its tensors are mapped from the files, on the CPU: ranks of one host share that memory, and a write stays with its
    rank. Raises `RequestError` for a missing path, another kind of file, a newer format, or a damaged file; the newest
    whole checkpoint beside it is then offered, or with `fall_back` returned, with a `caution`.
    """
    with files.understanding(path, "give one that this user can read"):
        folder = find(path)
    if folder is None:
        why = "it holds no lockstep checkpoint" if path.exists() else "no such file or folder"
        why = "it is a file, and pickled ones such as .pth are never loaded" if path.is_file() else why
        raise RequestError(f"There is no checkpoint at {path}: {why}; give a run's folder or one of its checkpoints.")
    try:
        return _verified(folder)
    except _DamageError as damage:
        good, told = _good_beside(folder), f"The checkpoint {path} cannot be used: {damage}"
        if good is None:
            advice = "there is no other good one beside it; start a new run in another --output."
            raise RequestError(f"{told}; {advice}") from damage
        if not fall_back:
            raise RequestError(f"{told}; the last good one is {good.origin}: give that one instead.") from damage
        caution = f"{path} is damaged ({damage}): the run goes on from {good.origin}"
        return dataclasses.replace(good, caution=caution)


def peek(path: Path) -> dict[str, Any] | None:
    """Return a checkpoint's `meta`, unverified, without its tensors. None where it cannot be read."""
    try:
        return _meta(linked(path))
    except (RequestError, *files.DEFECTS):
        return None


def _meta(folder: Path) -> dict[str, Any]:
    state = files.parse_json(files.read(folder / STATE))
    meta: dict[str, Any] = state["meta"]
    if state["format"] != FORMAT or not isinstance(meta, dict):
        raise ValueError("it is not what lockstep writes")
    if state["version"] > VERSION:
        raise RequestError(
            f"The checkpoint {folder} has format version {state['version']}; this lockstep reads up to version "
            f"{VERSION}: update lockstep-torch."
        )
    return meta


def _verified(named: Path) -> State:
    """Return the state in a checkpoint, with each file's checksum verified. Raises _DamageError."""
    name = named.name
    try:
        # As it is now: a run that trains meanwhile moves `last`.
        folder = linked(named)
        folder = Path(os.path.realpath(folder)) if folder.is_symlink() else folder
        if not folder.is_dir():
            raise _DamageError(f"{folder.name} is not there")
        name = SUMS
        listed = files.read(folder / SUMS)
        sums = files.parse_json(listed)
        if not isinstance(sums, dict) or STATE not in sums:
            raise _DamageError(f"{SUMS} is damaged")
        # A name that leads elsewhere would have other files read.
        if strange := [each for each in sums if each != STATE and not _TENSORS.fullmatch(each)]:
            raise _DamageError(f"{SUMS} names {strange[0]!r}, which is no file of a checkpoint")
        room = psutil.virtual_memory().total
        tensors: dict[str, Tensor] = {}
        meta: dict[str, Any] = {}
        for name in sorted(sums, key=lambda each: each != STATE):  # it describes the others
            found = (folder / name).stat()
            files.check_filled(found)
            room -= found.st_size
            if room < 0:
                raise _DamageError("its files are larger than this host's memory")
            if digest(folder / name) != sums[name]:
                raise _DamageError(f"{name} does not match its checksum (it was changed or cut short)")
            if name == STATE:
                meta = _meta(folder)
            else:
                group = name.partition(".")[0]
                found_tensors = load_file(folder / name)
                with safe_open(folder / name, "pt") as file:
                    wide = (file.metadata() or {}).get(COMPLEX, "").split("\n")
                for key, tensor in found_tensors.items():
                    tensors[f"{group}/{key}"] = torch.view_as_complex(tensor) if key in wide else tensor
        # Compared as a whole, so that there is no byte in the list, either, that could change unseen.
        if render(sums) != listed:
            raise _DamageError(f"{SUMS} is damaged")
    except (SafetensorError, RuntimeError, *files.DEFECTS) as error:
        raise _DamageError(f"{name} cannot be read ({files.reason(error)})") from error
    return State(tensors, meta, origin=folder)


def _good_beside(damaged: Path) -> State | None:
    """Return the newest whole checkpoint older than `damaged`, else the newest. None where none is.

    Later ones are of a branch that the run left when it resumed from an older one: better than nothing.
    """
    broken = Path(os.path.realpath(damaged))  # not `resolve`, which raises where a link points to itself
    number = numbered(broken) or (sys.maxsize, 0)
    for _, folder in sorted(steps(damaged.parent), key=lambda found: (found[0] <= number, found), reverse=True):
        if Path(os.path.realpath(folder)) != broken:
            with contextlib.suppress(_DamageError, RequestError):
                return _verified(folder)
    return None

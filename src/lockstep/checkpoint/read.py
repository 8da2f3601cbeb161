"""Find, verify and load a checkpoint; suggest another one if it is damaged."""

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
from .layout import COMPLEX, FORMAT, STATE, SUMS, VERSION, digest, list_checkpoints, parse_name, render, resolve_link
from .state import State

_TENSORS = re.compile(r"(\w+)\.safetensors")


class _DamageError(Exception):
    """A checkpoint's files have changed since they were written; the message is a clause."""


def find(path: Path) -> Path | None:
    """Return the checkpoint that a run would continue, intact or damaged; None without one.

    `path` is a run's folder, its `checkpoints`, or one checkpoint.
    """
    is_dangling = path.is_symlink() and not path.exists()
    if is_dangling or (path / SUMS).is_file() or peek(path) is not None:
        return path
    for folder in (path / "checkpoints", path):
        if (folder / "last").is_symlink() or (folder / "last").is_dir():
            return folder / "last"
        # The run was killed between writing its first checkpoint and linking it.
        if folder.is_dir() and (checkpoints := list_checkpoints(folder)):
            return checkpoints[-1][1]
    return None


def fingerprint(folder: Path) -> str:
    """Return a checkpoint's identity: folder name and digest of its checksums."""
    return f"{folder.resolve().name} ({digest(folder / SUMS)[:8]})"


def load(path: Path, *, fall_back: bool = False) -> State:
    """Return the state in a checkpoint (`RUN/checkpoints/last`), or in a run's last one.

    Its tensors are mapped from the files, on the CPU: ranks of one host share that memory, copied on write. Raises
    `RequestError` for a missing path, another kind of file, a newer format, or a damaged file. For a damaged file, the
    error names the newest intact checkpoint of the same run; with `fall_back`, returns that one, with a `caution`.
    """
    with files.understanding(path, "give one that this user can read"):
        folder = find(path)
    if folder is None:
        reason = "it holds no lockstep checkpoint" if path.exists() else "no such file or folder"
        reason = "it is a file, and pickled ones such as .pth are never loaded" if path.is_file() else reason
        raise RequestError(
            f"There is no checkpoint at {path}: {reason}; give a run's folder or one of its checkpoints."
        )
    try:
        return _load_verified(folder)
    except _DamageError as damage:
        intact, message = _find_intact(folder), f"The checkpoint {path} cannot be used: {damage}"
        if intact is None:
            advice = "the run has no other intact one; start a new run in another --output."
            raise RequestError(f"{message}; {advice}") from damage
        if not fall_back:
            raise RequestError(f"{message}; the last intact one is {intact.origin}: give that one instead.") from damage
        caution = f"{path} is damaged ({damage}): the run continues from {intact.origin}"
        return dataclasses.replace(intact, caution=caution)


def peek(path: Path) -> dict[str, Any] | None:
    """Return a checkpoint's unverified `meta`, without its tensors; None if it cannot be read."""
    try:
        return _meta(resolve_link(path))
    except (RequestError, *files.DEFECTS):
        return None


def _meta(folder: Path) -> dict[str, Any]:
    state = files.parse_json(files.read(folder / STATE))
    meta: dict[str, Any] = state["meta"]
    if state["format"] != FORMAT or not isinstance(meta, dict):
        raise ValueError("it is no lockstep checkpoint")
    if state["version"] > VERSION:
        raise RequestError(
            f"The checkpoint {folder} has format version {state['version']}; this lockstep reads up to version "
            f"{VERSION}: update lockstep-torch."
        )
    return meta


def _load_verified(path: Path) -> State:
    """Return the state in a checkpoint; verify each file's checksum. Raises _DamageError."""
    name = path.name
    try:
        # Resolved once: a run that is still training moves `last`.
        folder = resolve_link(path)
        folder = Path(os.path.realpath(folder)) if folder.is_symlink() else folder
        if not folder.is_dir():
            raise _DamageError(f"{folder.name} is not there")
        name = SUMS
        listed = files.read(folder / SUMS)
        sums = files.parse_json(listed)
        if not isinstance(sums, dict) or STATE not in sums:
            raise _DamageError(f"{SUMS} is damaged")
        # Other names could lead to files outside the folder.
        if unknown_names := [key for key in sums if key != STATE and not _TENSORS.fullmatch(key)]:
            raise _DamageError(f"{SUMS} names {unknown_names[0]!r}, which is no file of a checkpoint")
        free_bytes = psutil.virtual_memory().total
        tensors: dict[str, Tensor] = {}
        meta: dict[str, Any] = {}
        for name in sorted(sums, key=lambda key: key != STATE):  # the state first: it describes the tensor files
            free_bytes -= (folder / name).stat().st_size
            if free_bytes < 0:
                raise _DamageError("its files are larger than this host's memory")
            if digest(folder / name) != sums[name]:
                raise _DamageError(f"{name} does not match its checksum (it was changed or cut short)")
            if name == STATE:
                meta = _meta(folder)
            else:
                group = name.partition(".")[0]
                stored = load_file(folder / name)
                with safe_open(folder / name, "pt") as file:
                    complex_names = (file.metadata() or {}).get(COMPLEX, "").split("\n")
                for key, tensor in stored.items():
                    # A copy: the file aligns to 8 bytes, and code for complex128 may crash unless it is aligned to 16.
                    tensors[f"{group}/{key}"] = (
                        torch.view_as_complex(tensor.clone()) if key in complex_names else tensor
                    )
        # Compared byte by byte, so that no byte of the checksums' file can change unnoticed.
        if render(sums) != listed:
            raise _DamageError(f"{SUMS} is damaged")
    except (SafetensorError, RuntimeError, *files.DEFECTS) as error:
        raise _DamageError(f"{name} cannot be read ({files.reason(error)})") from error
    return State(tensors, meta, origin=folder)


def _find_intact(damaged: Path) -> State | None:
    """Return the newest intact checkpoint older than `damaged`, else the newest, else None.

    Newer ones belong to a branch that the run abandoned by resuming from an older checkpoint: better than nothing.
    """
    damaged_folder = Path(os.path.realpath(damaged))  # not `resolve`, which raises for a link to itself
    number = parse_name(damaged_folder) or (sys.maxsize, 0)
    for _, folder in sorted(
        list_checkpoints(damaged.parent), key=lambda entry: (entry[0] <= number, entry), reverse=True
    ):
        if Path(os.path.realpath(folder)) != damaged_folder:
            with contextlib.suppress(_DamageError, RequestError):
                return _load_verified(folder)
    return None

"""Read tensors from lockstep, torch or safetensors files. No code in them runs.

Tensors are named as in lockstep's checkpoints: `model/conv1.weight`, `optimizer/…`. The prefixes of wrappers (`module.`
of DataParallel and DistributedDataParallel, `_orig_mod.` of torch.compile) are removed.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import RequestError
from ..files import DEFECTS, open_regular, reason
from .read import load

_GROUPS = {
    **dict.fromkeys(("model", "state_dict", "model_state_dict", "module", "net", "weights"), "model"),
    **dict.fromkeys(("ema", "model_ema", "state_dict_ema", "ema_state_dict", "model_ema_state_dict"), "ema"),
    **dict.fromkeys(("optimizer", "optim", "optimizer_state_dict"), "optimizer"),
}
"""Our group names, by the keys that training scripts use."""
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")
_PICKLES = 5  # pickles at the beginning of torch's format before the zip archive
_VIEWS = 1000  # most bytes of tensors per byte of their file; views share memory
_LEVELS, _ITEMS = 32, 3_000_000  # most levels of nested dictionaries and lists; most items in all of them
_BROKEN = (*DEFECTS, RuntimeError, EOFError, AssertionError, MemoryError, SafetensorError, zipfile.BadZipFile)
"""Errors raised for files of other formats; the type depends on the bytes."""


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors in `path` by name, on the CPU.

    `path` is a lockstep run or one of its checkpoints, a safetensors file, or the output of `torch.save` for tensors in
    dictionaries and lists. Raises `RequestError` for a file without tensors, a damaged file, a file that would need far
    more memory than its size, and a pickle of more than tensors, numbers and strings: loading it could run code.
    """
    if not path.exists() or path.is_dir():
        return load(path).tensors
    try:
        tensors = _name_tensors(path, _load_content(path))
    except pickle.UnpicklingError as error:
        raise RequestError(
            f"{path} is a pickle of more than tensors, and loading it could run code, so it is not loaded; where it "
            "came from, save the state_dict() alone."
        ) from error
    except _BROKEN as error:
        raise RequestError(
            f"{path} cannot be read: it is cut short, damaged, or no file of weights ({reason(error)}); give another "
            "copy of it."
        ) from error
    if not tensors:
        raise RequestError(f"{path} holds no tensor; give a checkpoint, or a file of weights.")
    return tensors


def _load_content(path: Path) -> Any:
    """Return the file's content. First check that it needs no more memory than disk space."""
    with open(path, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > psutil.virtual_memory().total:
            raise ValueError(f"its {size:,} bytes are more than this host's memory")
        begin = file.read(9)
        file.seek(0)
        if begin[8:9] == b"{":
            return load_file(path)
        if begin[:4] == b"PK\3\4":
            _check_archive(file, size)
        elif begin[:1] == b"\x80":
            _check_pickles(file, size, _PICKLES)
        else:
            raise ValueError("its format is unknown")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(path, map_location="cpu", weights_only=True)


def _check_archive(file: IO[bytes], size: int) -> None:
    """Raise ValueError for compressed, overlapping or repeated archive entries. Checks the pickles in it."""
    # torch reads the directory at the zip64 locator's offset, zipfile just before the locator.
    file.seek(max(0, size - 98))
    end = file.read()
    if end[-22:-18] != b"PK\5\6" or (end[56:60] == b"PK\6\7" and end[64:72] != struct.pack("<Q", size - 98)):
        raise ValueError("the archive has no end, or two")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = {entry.filename.lower() for entry in entries}  # torch ignores case
        if any(entry.compress_type or entry.flag_bits & 1 for entry in entries) or len(names) < len(entries):
            raise ValueError("an entry of the archive is compressed, or there twice")
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("the archive's entries are larger than it")
        for entry in entries:
            if entry.filename.lower().endswith("data.pkl"):
                with archive.open(entry) as pickled:
                    _check_pickles(pickled, size, 1)


def _check_pickles(file: IO[bytes], size: int, count: int) -> None:
    """Scan pickles for what torch loads, however much memory or time it takes. torch itself refuses code.

    Raises ValueError if the expanded references are far larger than the file: hashing nested tuples, or one large key
    many times, would take exponential time. Raises UnpicklingError for a bytearray, which may have any size, and for
    later protocols than `torch.save` writes.
    """
    for _ in range(count):
        repeated, memo, stack = 0, dict[Any, int](), list[int | None]()  # expanded size of each object; None for a mark
        for op, arg, _ in pickletools.genops(file):
            if op.proto > 2 or (op.name == "GLOBAL" and "bytearray" in str(arg)):
                raise pickle.UnpicklingError(op.name)
            if op.name.endswith("PUT"):
                memo[arg] = stack[-1] or 0
                continue
            weight, operands = memo.get(arg, 0) if op.name.endswith("GET") else 1, list(op.stack_before)
            repeated += weight - 1
            if repeated > 1_000_000 + size:
                raise ValueError("it refers to itself")
            if pickletools.markobject in operands:
                while (top := stack.pop()) is not None:
                    weight += top
                operands = operands[: operands.index(pickletools.markobject)]
            for _ in operands:
                weight += stack.pop() or 0
            stack += [None if op.name == "MARK" else weight] * len(op.stack_after)


def _name_tensors(path: Path, content: Any) -> dict[str, Tensor]:
    """Return the tensors in nested dictionaries and lists, by group and name.

    Tensors at the top level are a model's. Raises ValueError for tensors whose values cannot be compared.
    """
    if not isinstance(content, Mapping):
        content = {"model": {"tensor": content} if isinstance(content, Tensor) else content}
    remaining = [_ITEMS]
    top_level = {key: part for key, part in content.items() if isinstance(part, Tensor)}
    groups = {str(key): part for key, part in content.items() if not isinstance(part, Tensor)}
    parts = [(key, list(_flatten(part, remaining))) for key, part in (("model", top_level), *groups.items())]
    group_counts = Counter(_GROUPS.get(key, key) for key, members in parts if members)
    tensors: dict[str, Tensor] = {}
    for key, members in parts:
        group = _GROUPS.get(key, key)
        for name, tensor in members:
            full_name = f"{group if group_counts[group] == 1 else key}/{_WRAPPERS.sub('', name)}"
            if full_name in tensors or tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided:
                raise ValueError(f"{full_name} is there twice, quantized, sparse or without data; save it dense")
            tensors[full_name] = tensor
    most_bytes = _VIEWS * path.stat().st_size
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > most_bytes:
        raise ValueError("its tensors have more bytes than a file of its size can hold")
    return tensors


def _flatten(part: Any, remaining: list[int], name: str = "", level: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in `part` by name. Raises ValueError for a cycle, or more than `remaining[0]` items."""
    if isinstance(part, Tensor):
        yield name, part
        return
    items = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, list | tuple) else ()
    for key, item in items:
        remaining[0] -= 1
        if remaining[0] < 0 or level > _LEVELS:
            raise ValueError("it contains itself, or is far too large")
        yield from _flatten(item, remaining, f"{name}/{key}" if name else str(key), level + 1)

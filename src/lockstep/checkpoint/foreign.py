"""Read tensors from lockstep, torch or safetensors files. No code in them runs.

Names are those of our checkpoints: `model/conv1.weight`, `optimizer/…`. The prefixes that wrappers leave in names
(`module.` of DataParallel and DistributedDataParallel, `_orig_mod.` of torch.compile) are taken off.
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
from ..files import DEFECTS, check_filled, named, reason
from .read import load

_GROUPS = {
    **dict.fromkeys(("model", "state_dict", "model_state_dict", "module", "net", "weights"), "model"),
    **dict.fromkeys(("ema", "model_ema", "state_dict_ema", "ema_state_dict", "model_ema_state_dict"), "ema"),
    **dict.fromkeys(("optimizer", "optim", "optimizer_state_dict"), "optimizer"),
}
"""Our names of a checkpoint's parts, by those of training scripts."""
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")
_PLAIN = re.compile(
    r"collections (OrderedDict|Counter)|_codecs encode|(__builtin__|builtins) (set|complex)|torch \w+|"
    r"torch\.(cuda|storage|nn\.parameter|serialization|_tensor) \w+|"
    r"torch\._utils _rebuild_(parameter\w*|tensor\w*|sparse_tensor|qtensor|meta_tensor_no_storage)"
)
"""Names in a pickle of tensors. Others that torch takes for safe, such as bytearray, allocate any size of memory."""
_CALLS = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"})
_PICKLES = 5  # at the beginning of a file that torch wrote before it wrote archives
_VIEWS = 1000  # bytes of tensors for each that their file has: some share memory
_LEVELS, _ITEMS = 32, 3_000_000  # of dictionaries and lists in each other, and in all of them
_BROKEN = (
    *(*DEFECTS, RuntimeError, EOFError, AssertionError, MemoryError),
    *(pickle.UnpicklingError, SafetensorError, zipfile.BadZipFile),
)
"""Errors for bytes that are no file of weights; their type depends on the bytes."""


class _CodeError(Exception):
    """A pickle contains more than tensors."""


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors in `path` by name, on the CPU.

    `path` is a run of ours or one of its checkpoints, a safetensors file, or the output of `torch.save` for tensors in
    dictionaries and lists. Raises `RequestError` for no tensors, damage, and a file that would take far more memory
    than its size; and for a pickle of anything but tensors, numbers and words, since to load it could run code.
    """
    if not path.exists() or path.is_dir():
        return load(path).tensors
    try:
        found = _named(path, _held(path))
    except _CodeError as error:
        raise RequestError(
            f"{path} is a pickle of more than tensors, and loading it could run code, so it is not loaded; where it "
            "came from, save the state_dict() alone."
        ) from error
    except _BROKEN as error:
        raise RequestError(
            f"{path} cannot be read: it is cut short, damaged, or no file of weights ({reason(error)}); give another "
            "copy of it."
        ) from error
    if not found:
        raise RequestError(f"{path} holds no tensor; give a checkpoint, or a file of weights.")
    return found


def _held(path: Path) -> Any:
    """Return the file's content. First checks that it needs no more memory than disk."""
    with open(path, "rb", opener=named) as file:
        check_filled(found := os.fstat(file.fileno()))
        size = found.st_size
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
            raise ValueError("it begins as none does")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(path, map_location="cpu", weights_only=True)


def _check_archive(file: IO[bytes], size: int) -> None:
    """Raise for compressed, overlapping or repeated archive entries. Also raises what `_check_pickles` does."""
    # torch looks for the directory where the locator of a zip64 archive says, zipfile just before it.
    file.seek(max(0, size - 98))
    end = file.read()
    if end[-22:-18] != b"PK\5\6" or (end[56:60] == b"PK\6\7" and end[64:72] != struct.pack("<Q", size - 98)):
        raise ValueError("the archive has no end, or two")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = {each.filename.lower() for each in entries}  # torch finds them so
        if any(each.compress_type or each.flag_bits & 1 for each in entries) or len(names) < len(entries):
            raise ValueError("an entry of the archive is compressed, or there twice")
        if sum(each.file_size for each in entries) > size:
            raise ValueError("the archive's entries are larger than it")
        for each in entries:
            if each.filename.lower().endswith("data.pkl"):
                with archive.open(each) as pickled:
                    _check_pickles(pickled, size, 1)


def _check_pickles(file: IO[bytes], size: int, count: int) -> None:
    """Scan pickles without loading them. Raises `_CodeError` for one that names more than tensors.

    Raises ValueError where repeated references, written out, are far larger than the file: to hash tuples in tuples, or
    one large key many times, takes for ever.
    """
    for _ in range(count):
        repeated, memo, stack = 0, dict[Any, int](), list[int | None]()  # how large each object is; None: a mark
        for op, arg, _ in pickletools.genops(file):
            if op.name in _CALLS and not (op.name == "GLOBAL" and _PLAIN.fullmatch(str(arg))):
                raise _CodeError(arg)
            if op.name.endswith("PUT"):
                memo[arg] = stack[-1] or 0
                continue
            weight, taken = memo.get(arg, 0) if op.name.endswith("GET") else 1, list(op.stack_before)
            repeated += weight - 1
            if repeated > 1_000_000 + size:
                raise ValueError("it refers to itself")
            if pickletools.markobject in taken:
                while (top := stack.pop()) is not None:
                    weight += top
                taken = taken[: taken.index(pickletools.markobject)]
            for _ in taken:
                weight += stack.pop() or 0
            stack += [None if op.name == "MARK" else weight] * len(op.stack_after)


def _named(path: Path, found: Any) -> dict[str, Tensor]:
    """Return nested tensors by name, with the group in front. From dictionaries and lists.

    Tensors at the top level of a checkpoint are a model. Raises ValueError for tensors whose values cannot be compared.
    """
    if not isinstance(found, Mapping):
        found = {"model": {"tensor": found} if isinstance(found, Tensor) else found}
    left = [_ITEMS]
    bare = {key: part for key, part in found.items() if isinstance(part, Tensor)}
    others = {str(key): part for key, part in found.items() if not isinstance(part, Tensor)}
    parts = [(key, list(_flat(part, left))) for key, part in (("model", bare), *others.items())]
    several = Counter(_GROUPS.get(key, key) for key, held in parts if held)
    tensors: dict[str, Tensor] = {}
    for key, held in parts:
        group = _GROUPS.get(key, key)
        for name, tensor in held:
            full = f"{group if several[group] == 1 else key}/{_WRAPPERS.sub('', name)}"
            if full in tensors or tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided:
                raise ValueError(f"{full} is there twice, quantized, sparse or without data; save it dense")
            tensors[full] = tensor
    most_bytes = _VIEWS * path.stat().st_size
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > most_bytes:
        raise ValueError("its tensors have more bytes than a file of its size can hold")
    return tensors


def _flat(part: Any, left: list[int], name: str = "", level: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in `part` by name. Raises ValueError for a cycle, or more than `left[0]` items."""
    if isinstance(part, Tensor):
        yield name, part
        return
    items = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, list | tuple) else ()
    for key, item in items:
        left[0] -= 1
        if left[0] < 0 or level > _LEVELS:
            raise ValueError("it holds itself, or far too much")
        yield from _flat(item, left, f"{name}/{key}" if name else str(key), level + 1)

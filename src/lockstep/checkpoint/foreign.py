"""The tensors in a file that holds weights, whoever wrote it: ours, torch's or safetensors'; nothing in it is run.

Names come out alike, as our checkpoints have them: `model/conv1.weight`, `optimizer/…`. The prefixes that wrappers
leave in names (`module.` of DataParallel and DistributedDataParallel, `_orig_mod.` of torch.compile) are taken off.
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

from .. import checkpoint, files
from ..errors import RequestError

_MODEL_KEYS = frozenset({"model", "state_dict", "model_state_dict", "module", "net", "weights"})
"""What training scripts call the model's part of a checkpoint."""
_GROUPS = ("optimizer", "ema")
_WRAPPERS = ("module.", "_orig_mod.")
_PLAIN = re.compile(
    r"collections (OrderedDict|Counter)|_codecs encode|(__builtin__|builtins) (set|complex)|torch \w+|"
    r"torch\.(cuda|storage|nn\.parameter|serialization|_tensor) \w+|"
    r"torch\._utils _rebuild_(parameter\w*|tensor\w*|sparse_tensor|qtensor|meta_tensor_no_storage)"
)
"""What a pickle of tensors names. Others that torch takes for safe, such as bytearray, make memory out of a number."""
_CALLS = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"})
_PICKLES = 5
"""At the beginning of a file that torch wrote before there were archives."""
_VIEWS = 1000
"""Bytes of tensors for each that their file has: some share memory."""
_LEVELS, _ITEMS = 32, 3_000_000
"""Of dictionaries and lists in each other, and in all of them."""
_BROKEN = (
    *(RuntimeError, ValueError, LookupError, OSError, AttributeError, TypeError, EOFError, AssertionError),
    *(pickle.UnpicklingError, struct.error, SafetensorError, OverflowError, MemoryError, RecursionError),
    zipfile.BadZipFile,
)
"""What is raised for bytes that are no file of weights, which depends on what they look like."""


class _CodeError(Exception):
    """A pickle of more than tensors."""


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors in `path` by name, on the CPU.

    `path` is a run of ours or one of its checkpoints, a safetensors file, or what `torch.save` wrote of tensors in
    dictionaries and lists: a state dict, also one for each rank, or a training script's checkpoint.

    Raises `RequestError` where there is nothing, where it is cut short or damaged or would take far more memory than
    the file does, and for a pickle of anything but tensors, numbers and words, which is never loaded, since that could
    run code.
    """
    if not path.exists() or path.is_dir():
        return checkpoint.load(path).tensors
    try:
        found = _named(path, _held(path))
    except _CodeError as error:
        raise RequestError(
            f"{path} is a pickle of more than tensors, and loading it could run code, so it is not loaded; where it "
            "came from, save the state_dict() alone."
        ) from error
    except _BROKEN as error:
        raise _damaged(path, error) from error
    if not found:
        raise RequestError(f"{path} holds no tensor; give a checkpoint, or a file of weights.")
    return found


def _held(path: Path) -> Any:
    """Return what the file holds, once it is known to be no larger in memory than on the disk."""
    with open(path, "rb", opener=files.named) as file:
        size = os.fstat(file.fileno()).st_size
        if size > (room := psutil.virtual_memory().total):
            raise ValueError(f"it has {size:,} bytes, and this host's memory {room:,}")
        files.check_filled(file.fileno())
        begin = file.read(9)
        file.seek(0)
        if begin[8:9] == b"{":
            return load_file(path)
        if begin[:4] == b"PK\3\4":
            _check_archive(file, size)
        elif begin[:1] == b"\x80":
            _check_pickles(file, size, _PICKLES, is_code=begin[1:2] > b"\x02")  # torch.save writes protocol 2
        else:
            raise ValueError("it begins as none does")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(path, map_location="cpu", weights_only=True)


def _check_archive(file: IO[bytes], size: int) -> None:
    """Raise where the archive's files are compressed, lie upon each other or come twice, and `_check_pickles` does."""
    # torch looks for the directory where the end says: there is one, just before it, and nothing behind.
    file.seek(max(0, size - 98))
    end = file.read()
    if end[-22:-18] != b"PK\5\6" or (end[56:60] == b"PK\6\7" and end[64:72] != struct.pack("<Q", size - 98)):
        raise ValueError("the archive has no end")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = [each.filename.lower() for each in entries]  # torch finds them so
        if any(each.compress_type or each.flag_bits & 1 for each in entries) or len(set(names)) < len(names):
            raise ValueError("an entry of the archive is compressed, or there twice")
        if sum(each.file_size for each in entries) > size:
            raise ValueError("the archive's entries are larger than it")
        for each in entries:
            if each.filename.lower().endswith("data.pkl"):
                with archive.open(each) as pickled:
                    _check_pickles(pickled, size, 1)


def _check_pickles(file: IO[bytes], size: int, count: int, *, is_code: bool = False) -> None:
    """Go through pickles without loading them; raise `_CodeError` for what names more than tensors, ValueError else.

    That is where what they refer to again and again would, written out, be far larger than the file: to look for a key
    of tuples in tuples takes so long.
    """
    try:
        for _ in range(count):
            repeated, memo, stack = 0, dict[Any, int](), list[int | None]()  # how large each object is; None: a mark
            for op, arg, _ in pickletools.genops(file):
                if op.name in _CALLS and not (op.name == "GLOBAL" and _PLAIN.fullmatch(str(arg))):
                    raise _CodeError(arg)
                if op.name.endswith("PUT"):
                    memo[arg] = stack[-1] or 0
                    continue
                taken, weight = list(op.stack_before), memo.get(arg, 0) if op.name.endswith("GET") else 1
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
    except (ValueError, LookupError) as error:
        raise _CodeError if is_code else error from error


def _damaged(path: Path, error: Exception) -> RequestError:
    said = " ".join(str(error).split()).partition(". ")[0].removesuffix(".")[:120]
    reason = type(error).__name__ + (f": {said}" if said else "")
    return RequestError(
        f"{path} cannot be read: it is cut short, damaged, or no file of weights ({reason}); give another copy of it."
    )


def _named(path: Path, found: Any) -> dict[str, Tensor]:
    """Return the tensors in nested dictionaries and lists by name, with the group in front.

    Where a checkpoint has several models or optimizers, the name has its key too; and where two tensors are told apart
    by a wrapper's prefix alone, prefixes stay. Raises `RequestError` for tensors whose values cannot be compared.
    """
    groups = _grouped(found)
    several = Counter(group for group, _, _ in groups)
    full = [(f"{group}/{key}" if several[group] > 1 and key else group, parts) for group, key, parts in groups]
    for unwrap in (_unwrapped, str):
        named = [(f"{group}/{unwrap(name)}", tensor) for group, parts in full for name, tensor in parts]
        if len(dict(named)) == len(named):
            break
    for name, tensor in named:
        kind = "quantized" if tensor.is_quantized else "without data" if tensor.is_meta else "sparse"
        if tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided:
            raise RequestError(f"{path} holds {name}, a tensor that is {kind}, and values are compared; save it dense.")
    most_bytes = _VIEWS * path.stat().st_size
    if (held_bytes := sum(tensor.numel() * tensor.element_size() for _, tensor in named)) > most_bytes:
        raise ValueError(f"its tensors have {held_bytes:,} bytes, and no file of its size holds as many")
    return dict(named)


def _grouped(found: Any) -> list[tuple[str, str, list[tuple[str, Tensor]]]]:
    """Return (group, key, tensors) of each part of a checkpoint; all tensors that lie bare in it are one part."""
    if isinstance(found, Tensor):
        return [("model", "", [("tensor", found)])]
    left = [_ITEMS]
    if not isinstance(found, Mapping):
        return [("model", "", list(_flat(found, left)))]
    bare = [(str(key), part) for key, part in found.items() if isinstance(part, Tensor)]
    parts = [("model", "", bare)]
    for key, part in found.items():
        if not isinstance(part, Tensor):
            known = next((group for group in _GROUPS if group in str(key).lower()), str(key))
            parts.append(("model" if key in _MODEL_KEYS else known, str(key), list(_flat(part, left))))
    return [each for each in parts if each[2]]


def _flat(part: Any, left: list[int], name: str = "", level: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in `part`; raise ValueError where it holds itself, or more than `left[0]` things."""
    if isinstance(part, Tensor):
        yield name, part
        return
    items = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, list | tuple) else ()
    if items:
        left[0] -= len(part)
        if left[0] < 0 or level > _LEVELS:
            raise ValueError("it holds itself, or far too much")
        for key, item in items:
            yield from _flat(item, left, f"{name}/{key}" if name else str(key), level + 1)


def _unwrapped(name: str) -> str:
    while wrapper := next((each for each in _WRAPPERS if name.startswith(each)), ""):
        name = name.removeprefix(wrapper)
    return name

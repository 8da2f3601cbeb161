"""The tensors in a file that holds weights, whoever wrote it: ours, torch's or safetensors'; nothing in it is run.

Names come out alike, as our checkpoints have them: `model/conv1.weight`, `optimizer/…`. The prefixes that wrappers
leave in names (`module.` of DataParallel and DistributedDataParallel, `_orig_mod.` of torch.compile) are taken off.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from .. import checkpoint
from ..errors import RequestError

_MODEL_KEYS = frozenset({"model", "state_dict", "model_state_dict", "module", "net", "weights"})
"""What training scripts call the model's part of a checkpoint."""
_GROUPS = ("optimizer", "ema")
_WRAPPERS = ("module.", "_orig_mod.")
_CODE = re.compile(
    r"[Uu]nsupported (global|GLOBAL|class)|[Uu]nsupported class|reduce for unrecognized|not an allowed global"
)
"""What torch.load says of a pickle that asks for a function or a class."""
_BROKEN = (
    *(RuntimeError, ValueError, LookupError, OSError, AttributeError, TypeError, EOFError, AssertionError),
    *(pickle.UnpicklingError, struct.error, SafetensorError, OverflowError, MemoryError),
)
"""What torch.load raises for bytes that are no file of its own, which depends on what they look like."""


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors in `path` by name, on the CPU.

    `path` is a run of ours or one of its checkpoints, a safetensors file, or what `torch.save` wrote of tensors in
    dictionaries and lists: a state dict, also one for each rank, or a training script's checkpoint.

    Raises `RequestError` where there is nothing, where it is cut short or damaged, and for a pickle of anything but
    tensors, numbers and words, which is never loaded, since that could run code.
    """
    if not path.exists() or path.is_dir():
        return checkpoint.load(path).tensors
    with path.open("rb") as file:
        begin = file.read(9)
    is_pickle = begin[:1] == b"\x80" and begin[1:2] > b"\x02"  # torch.save writes protocol 2, or an archive
    found = _safetensors(path) if begin[8:9] == b"{" else _saved_by_torch(path, is_pickle=is_pickle)
    if not found:
        raise RequestError(f"{path} holds no tensor; give a checkpoint, or a file of weights.")
    return found


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return _named(path, load_file(path))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _saved_by_torch(path: Path, *, is_pickle: bool) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about protocols of pickles, which are then refused or read
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not _CODE.search(str(error)) and not is_pickle:
            raise _damaged(path, error) from error
        raise RequestError(
            f"{path} is a pickle of more than tensors, and loading it could run code, so it is not loaded; where it "
            "came from, save the state_dict() alone."
        ) from error
    except _BROKEN as error:
        raise _damaged(path, error) from error
    return _named(path, found)


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
    full = [
        (f"{group}/{key}" if several[group] > 1 and key else group, list(_flat(part))) for group, key, part in groups
    ]
    for unwrap in (_unwrapped, str):
        named = [(f"{group}/{unwrap(name)}", tensor) for group, parts in full for name, tensor in parts]
        if len(dict(named)) == len(named):
            break
    for name, tensor in named:
        kind = "quantized" if tensor.is_quantized else "without data" if tensor.is_meta else "sparse"
        if tensor.is_quantized or tensor.is_meta or tensor.layout != torch.strided:
            raise RequestError(f"{path} holds {name}, a tensor that is {kind}, and values are compared; save it dense.")
    return dict(named)


def _grouped(found: Any) -> list[tuple[str, str, Any]]:
    """Return (group, key, part) of each part of a checkpoint; all tensors that lie bare in it are one part."""
    if isinstance(found, Tensor):
        return [("model", "", {"tensor": found})]
    if not isinstance(found, Mapping):
        return [("model", "", found)]
    bare = {str(key): part for key, part in found.items() if isinstance(part, Tensor)}
    parts = [("model", "", bare)] if bare else []
    for key, part in found.items():
        if not isinstance(part, Tensor):
            known = next((group for group in _GROUPS if group in str(key).lower()), str(key))
            parts.append(("model" if key in _MODEL_KEYS else known, str(key), part))
    return [(group, key, part) for group, key, part in parts if next(_flat(part), None) is not None]


def _flat(part: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield name, part
        return
    items = part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, list | tuple) else ()
    for key, item in items:
        yield from _flat(item, f"{name}/{key}" if name else str(key))


def _unwrapped(name: str) -> str:
    while wrapper := next((each for each in _WRAPPERS if name.startswith(each)), ""):
        name = name.removeprefix(wrapper)
    return name

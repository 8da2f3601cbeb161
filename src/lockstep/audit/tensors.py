"""Tensors of batches and of ranks: copy, count, hash, join and compare them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_IGNORED = -100  # target that the field's losses leave out


def copy_batch(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a batch whose tensors the script cannot change, with real numbers in `dtype`, if given."""

    def copy(parts: Sequence[Tensor]) -> Tensor:
        tensor = parts[0].detach().clone()
        return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor

    return _map_tensors(copy, [batch])


def join_batches(batches: Sequence[Any]) -> Any:
    """Return the batches as one, samples end to end. Raises ValueError for tensors that cannot be concatenated."""
    return _map_tensors(_concatenate, _pad(batches))


def join_draws(draws: Sequence[Tensor], result: Tensor, is_left: bool) -> Tensor:
    """Return one process's draw, with the ranks' shorter ones where `join_batches` has their tokens.

    Raises ValueError for ones that are not shorter.
    """
    joint, sizes = result.clone(), [len(draw) for draw in draws]
    for draw, rows in zip(draws, torch.split(joint, sizes), strict=True):
        place = rows
        for dim, (size, full) in enumerate(zip(draw.shape, rows.shape, strict=True)):
            if size > full:
                raise ValueError("its ranks draw more random numbers for a sample than one process")
            place = place.narrow(dim, full - size if is_left else 0, size)
        place.copy_(draw)
    return joint


def pads_left(batches: Sequence[Any]) -> bool:
    """Return whether token batches are padded on the left, by their masks."""
    return any(bool((mask[:, 0] == 0).any()) for mask in _masks_of(batches))


def count_samples(batch: Any) -> int:
    """Return a batch's number of samples, by its first tensor; 0 without one."""
    return next((len(tensor) for tensor in list_tensors(batch) if tensor.dim()), 0)


def list_tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch of any structure."""
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, list | tuple) else ()
    return [tensor for value in values for tensor in list_tensors(value)]


def hash_samples(tensors: list[Tensor]) -> list[bytes]:
    """Return a digest of each sample: of the rows of tensors with the same first dimension n."""
    tensors = [tensor.detach().cpu() for tensor in tensors if tensor.dim()]
    tensors = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
    size = len(tensors[0]) if tensors else 0
    rows = [tensor.reshape(size, -1).contiguous().view(torch.uint8).numpy() for tensor in tensors if tensor.numel()]
    return [hashlib.sha256(b"".join(row[number].tobytes() for row in rows)).digest()[:16] for number in range(size)]


def are_equal(tensors: Sequence[Tensor]) -> bool:
    """Return whether all ranks have the same values."""
    return all(torch.equal(tensors[0], tensor) for tensor in tensors[1:])


def has_equal_pair(tensors: Sequence[Tensor]) -> bool:
    """Return whether two ranks have the same values."""
    return any(torch.equal(a, b) for a, b in itertools.combinations(tensors, 2))


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    if not parts[0].dim():
        return parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = " and ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"its ranks have batches of shapes {shapes} at once, which are no batch of one process")
    return torch.cat([*parts])


def _pad(batches: Sequence[Any]) -> Sequence[Any]:
    """Pad the ranks' token batches to the longest, on the side and with the values that their masks show."""
    masks = _masks_of(batches)
    if len(masks) < len(batches) or len({mask.shape[1] for mask in masks}) == 1:
        return batches
    longest, is_left = max(mask.shape[1] for mask in masks), pads_left(batches)

    def pad(key: str, tensor: Any, mask: Tensor) -> Any:
        if not isinstance(tensor, Tensor) or tensor.shape[:2] != mask.shape:
            return tensor
        padding = [batch[key][mask == 0] for batch, mask in zip(batches, masks, strict=True)]
        default = _IGNORED if key == "labels" else 0
        value = next((part.flatten()[0].item() for part in padding if len(part)), default)
        width = (longest - tensor.shape[1], 0) if is_left else (0, longest - tensor.shape[1])
        return torch.nn.functional.pad(tensor, (*(0, 0) * (tensor.dim() - 2), *width), value=value)

    return [
        type(batch)({key: pad(key, value, mask) for key, value in batch.items()})
        for batch, mask in zip(batches, masks, strict=True)
    ]


def _masks_of(batches: Sequence[Any]) -> list[Tensor]:
    if not all(isinstance(batch, Mapping) or hasattr(batch, "keys") for batch in batches):
        return []
    values = [batch["attention_mask"] if "attention_mask" in batch else None for batch in batches]  # noqa: SIM401
    return [mask for mask in values if isinstance(mask, Tensor) and mask.dim() == 2]


def _map_tensors(join: Callable[[Sequence[Tensor]], Tensor], batches: Sequence[Any]) -> Any:
    """Return one batch of the batches' structure, whose tensors are the `join` of theirs."""
    first = batches[0]
    if isinstance(first, Tensor):
        return join(batches)
    if hasattr(first, "keys"):  # a dict, or a mapping such as a tokenizer's output
        return type(first)({key: _map_tensors(join, [batch[key] for batch in batches]) for key in first.keys()})  # noqa: SIM118
    if isinstance(first, tuple | list):
        items = [item for batch in batches for item in batch]
        lengths = {len(item) if item.dim() else -1 for item in items if isinstance(item, Tensor)}
        are_samples = len({len(batch) for batch in batches}) > 1 or (
            isinstance(first, list) and len(lengths) > len(batches)
        )
        if are_samples or not any(isinstance(item, Tensor | tuple | list) or hasattr(item, "keys") for item in first):
            return type(first)(items)  # texts, boxes: one for each sample
        parts = [_map_tensors(join, [batch[index] for batch in batches]) for index in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if len(batches) > 1 and not (isinstance(first, str | int | float | None) and all(b == first for b in batches)):
        raise ValueError(f"its batches hold a {type(first).__name__} that cannot be joined")
    return first

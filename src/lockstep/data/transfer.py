"""Copies of batches from host memory to the run's device.

Where a device has streams, copies have one of their own: they neither wait for the computation that is queued on the
device nor delay it. The computation waits for the copy that it needs, on the device and not on the host.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Transfer:
    """Copy of a batch to a device, which begins with this object; `finish` returns it.

    A batch has any structure of tensors. `dtype` is that of floating-point tensors, None to keep theirs. With `pins`,
    tensors in pageable memory go through pinned memory, from which a copy does not make the host wait.
    """

    def __init__(
        self, batch: Any, device: torch.device, dtype: torch.dtype | None = None, *, pins: bool = True
    ) -> None:
        self._device, self._dtype, self._pins, self._stream = device, dtype, pins, copy_stream(device)
        self._copies: list[Tensor] = []
        self._batch = self._moved(batch)
        self._event = self._stream.record_event() if self._stream is not None and self._copies else None

    def finish(self) -> Any:
        """Return the batch on the device. What the current stream computes from now on waits for the copies."""
        if self._event is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(self._event)
            for tensor in self._copies:  # else their memory could be overwritten once Python frees them
                tensor.record_stream(current)
        return self._batch

    def _copy(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        if tensor.device.type != "cpu" or self._device.type == "cpu" or tensor.layout is not torch.strided:
            return tensor.to(self._device, dtype)
        tensor = tensor.pin_memory() if self._pins else tensor
        with self._stream or nullcontext():
            moved = tensor.to(self._device, dtype, non_blocking=self._pins)
        self._copies.append(moved)
        return moved

    def _moved(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            return self._copy(part)
        if to := getattr(part, "to", None):  # the tensors inside are unknown: copied on the current stream
            part = to(self._device)
        if isinstance(part, MutableMapping):
            # A copy: its class may have attributes beyond its items, as Hugging Face's BatchEncoding does.
            duplicate: Any = copy.copy(part)
            duplicate.update({key: self._moved(value) for key, value in part.items()})
            return duplicate
        if to is None and isinstance(part, tuple | list):
            parts = [self._moved(item) for item in part]
            return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
        if to is None and dataclasses.is_dataclass(part) and not isinstance(part, type):
            duplicate = copy.copy(part)
            for field in dataclasses.fields(part):  # also of a frozen dataclass
                object.__setattr__(duplicate, field.name, self._moved(getattr(part, field.name)))
            return duplicate
        return part


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`, without making the host wait for it."""
    if tensor.device.type == device.type:
        return tensor
    moved: Tensor = Transfer(tensor, device).finish()
    return moved


def read_ahead(items: Iterator[T], device: torch.device) -> Iterator[T]:
    """Yield each item once the next one is read, if `device` has a stream of copies: its transfer then has begun.

    An error of a read is raised after the items before it.
    """
    if copy_stream(device) is None:
        yield from items
        return
    waiting, is_over, error = deque[T](), False, None
    while not is_over:
        try:
            waiting.append(next(items))
        except StopIteration:
            is_over = True
        except Exception as read_error:
            is_over, error = True, read_error
        while len(waiting) > (not is_over):
            yield waiting.popleft()  # nothing here keeps a yielded batch alive
    if error is not None:
        raise error


@cache
def copy_stream(device: torch.device) -> torch.Stream | None:
    """Return the device's stream of copies; None for a CPU, and for devices without streams, such as Apple's."""
    has_streams = device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")
    return torch.Stream(device) if has_streams else None

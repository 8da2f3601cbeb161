"""Copies of batches from host memory to the run's device."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

S = TypeVar("S")
T = TypeVar("T")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`, without making the host wait for the GPU."""
    if tensor.device.type == device.type:
        return tensor
    # A copy from pageable memory may wait for all work queued on the GPU; one from pinned memory never does.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type != "cpu" else tensor.to(device)


def moved(part: Any, *destination: Any) -> Any:
    """Return `part` with its tensors moved to (device, floating-point dtype or None, non_blocking)."""
    device, dtype, non_blocking = destination
    if isinstance(part, Tensor):
        return part.to(device, dtype if part.is_floating_point() else None, non_blocking=non_blocking)
    if to := getattr(part, "to", None):
        part = to(device)
    if isinstance(part, MutableMapping):
        # A copy: its class may have attributes beyond its items, as Hugging Face's BatchEncoding does.
        duplicate: Any = copy.copy(part)
        duplicate.update({key: moved(value, *destination) for key, value in part.items()})
        return duplicate
    if to is None and isinstance(part, tuple | list):
        parts = [moved(item, *destination) for item in part]
        return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
    if to is None and dataclasses.is_dataclass(part) and not isinstance(part, type):
        duplicate = copy.copy(part)
        for field in dataclasses.fields(part):  # also of a frozen dataclass
            object.__setattr__(duplicate, field.name, moved(getattr(part, field.name), *destination))
        return duplicate
    return part


def map_ahead(make: Callable[[S], T], items: Iterator[S], device: torch.device) -> Iterator[T]:
    """Yield `make(item)` for each item, where `make` copies it to `device`.

    On a device with streams, an item is copied while the device computes on the one before it: on a stream of copies,
    which the computation waits for on the device, and not on the host. An error of an item is raised in its turn.
    """
    stream = copy_stream(device)
    if stream is None:
        yield from map(make, items)
        return
    copies, events, error, is_over = deque[T](), deque[torch.Event](), None, False
    while not is_over:
        try:
            item = next(items)
            # Allocates memory of earlier items, which the computation that is queued by now may use.
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                copies.append(make(item))
            events.append(stream.record_event())
            del item
        except StopIteration:
            is_over = True
        except Exception as item_error:
            is_over, error = True, item_error
        while len(copies) > (not is_over):
            torch.accelerator.current_stream(device).wait_event(events.popleft())
            yield copies.popleft()  # nothing here keeps a yielded batch alive
    if error is not None:
        raise error


@cache
def copy_stream(device: torch.device) -> torch.Stream | None:
    """Return the device's stream of copies; None for a CPU, and for devices without streams."""
    has_streams = device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")
    return torch.Stream(device) if has_streams else None

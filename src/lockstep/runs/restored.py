"""Comparison of a restored copy with the live objects, once, at a run's first checkpoint.

A model or object whose `load_state_dict` does not restore what `state_dict` returned would continue differently after a
resume. Nothing else shows that before the resume.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoint.state import load_model
from ..checks.digest import digest
from ..errors import RequestError

_MOST_BYTES = 1 << 28  # of a model to copy
_MOST_ITEMS = 1000  # of a list or dict to compare
_COPIED = (Tensor, nn.Module, dict, list, tuple, set, bool, int, float, str, type(None))


def fingerprint(value: Any, saved: frozenset[int] | set[int] = frozenset()) -> Any:
    """Return a fingerprint that changes with the value. None for other objects, and tensors at addresses in `saved`."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Generator):
        return int(digest([value.get_state()]))
    if isinstance(value, Tensor):
        if value.requires_grad or value.layout is not torch.strided or value.is_meta or value.data_ptr() in saved:
            return None  # a parameter, an activation kept for inspection, or a buffer
        return int(digest([value.detach()]))
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | deque | set) and len(value) <= _MOST_ITEMS:
        return [fingerprint(item, saved) for item in value]
    return None


def plain_copy(item: Any) -> Any:
    """Return a copy of a user's object whose attributes are all numbers, texts and small containers; else None."""
    attributes = getattr(item, "__dict__", {})
    if not attributes or type(item).__module__.startswith("torch."):
        return None
    if any(value is not None and fingerprint(value) is None for value in attributes.values()):
        return None
    with contextlib.suppress(Exception):  # a class may define its own copying
        return copy.deepcopy(item)
    return None


def find_unrestored_weights(model: nn.Module, tensors: Mapping[str, Tensor], extra: Any) -> list[str]:
    """Return the parameters and saved buffers that a copy of `model` lacks after it has loaded its saved state.

    The copy's weights are zero before. Returns none for a model of over 256 MiB, or one that cannot be copied.
    """
    if sum(tensor.nbytes for tensor in model.parameters()) > _MOST_BYTES:
        return []
    shared: dict[int, Any] = {}  # objects that modules refer to, such as a data set
    for module in model.modules():
        shared |= {id(value): value for value in vars(module).values() if not isinstance(value, _COPIED)}
    try:
        restored = copy.deepcopy(model, shared)
    except Exception:  # a class may define its own copying
        return []
    with torch.no_grad():
        for tensor in (*restored.parameters(), *restored.buffers()):
            tensor.zero_()
    load_model(restored, dict(tensors), extra)
    restored_tensors = dict(_saved_tensors(restored, tensors))
    return [name for name, live in _saved_tensors(model, tensors) if not _is_same(live, restored_tensors.get(name))]


def find_unrestored_attributes(live: Any, fresh: Any, state: Any) -> list[str]:
    """Return the attributes of `live` that `fresh`, a copy from before the loop, lacks after it has loaded `state`."""
    fresh.load_state_dict(state)
    restored = vars(fresh)
    return [key for key, value in vars(live).items() if fingerprint(value) != fingerprint(restored.get(key))]


def describe_differences(
    models: Mapping[str, tuple[nn.Module, Mapping[str, Tensor], Any]], objects: Sequence[tuple[Any, Any, Any]]
) -> Iterator[str]:
    """Yield a sentence per restored copy that differs.

    `models` are (model, tensors, extra state) by name; `objects` are (live object, `plain_copy` from before, state).
    """
    cases: list[tuple[str, Callable[..., list[str]], tuple[Any, ...]]] = [
        *((f"the {name}", find_unrestored_weights, arguments) for name, arguments in models.items()),
        *((type(item[0]).__name__, find_unrestored_attributes, item) for item in objects if item[1] is not None),
    ]
    for name, find, arguments in cases:
        try:
            names = find(*arguments)
        except RequestError as error:
            yield f"no resumed run could load the checkpoint of {name}: {error}"
        except Exception as error:  # of the user's load_state_dict
            yield f"no resumed run could load the checkpoint of {name}, whose load_state_dict raised {error!r}"
        else:
            if names:
                yield (
                    f"a copy of {name} that loads this checkpoint differs in {', '.join(names[:3])}, and so would a "
                    "resumed run: let its state_dict hold, and its load_state_dict restore, all that it computes with"
                )


def _saved_tensors(model: nn.Module, saved: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _is_same(live: Tensor, restored: Tensor | None) -> bool:
    if restored is None or live.shape != restored.shape:
        return False
    return live.layout is not torch.strided or int(digest([live.detach()])) == int(digest([restored.detach()]))

"""Blocks of a model: the modules whose weights are gathered, or whose activations are computed, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ..errors import RequestError, unknown

LISTS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward pass of their own."""
_CONTAINERS = (nn.Sequential, *LISTS)


def find_blocks(model: nn.Module, patterns: Sequence[str], *, flag: str = "--shard-modules") -> list[nn.Module]:
    """Return the outermost modules whose class names match one of the shell `patterns`.

    Without patterns: those of classes that repeat, have layers of their own, and are in a container of torch's.
    Raises `RequestError` if there are none. `flag` is the option with the patterns.
    """
    inner = [module for module in model.modules() if module is not model]
    names = {type(module).__name__ for module in inner}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise unknown(f"{flag} pattern", pattern, names, "It names classes of the model's modules.")
    inner = [module for module in inner if not isinstance(module, LISTS)]
    if patterns:
        chosen = {name for name in names for pattern in patterns if fnmatchcase(name, pattern)}
    else:
        layered = [module for module in inner if _has_layers(module)]
        counts = Counter(type(module).__name__ for module in layered)
        listed = {child for module in model.modules() if isinstance(module, _CONTAINERS) for child in module.children()}
        chosen = {name for module in layered if module in listed and counts[name := type(module).__name__] > 1}
    blocks: list[nn.Module] = []
    within: set[nn.Module] = set()
    for module in inner:  # parents come first
        if type(module).__name__ in chosen and module not in within:
            blocks.append(module)
            within.update(module.modules())
    if not blocks:
        raise RequestError(
            f"The model has no blocks that repeat: name the classes of its large parts by {flag}, such as "
            f"{flag} {min(names, default='Linear')}."
        )
    return blocks


def _has_layers(module: nn.Module) -> bool:
    """Return whether a module is no container of torch's and has child modules with parameters."""
    if isinstance(module, _CONTAINERS):
        return False
    return any(next(child.parameters(), None) is not None for child in module.children())

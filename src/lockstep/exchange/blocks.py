"""Blocks of a model: the modules whose weights are gathered one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from .. import _torch
from ..checkpoint.state import few
from ..errors import RequestError, unknown

_LISTS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward pass of their own."""
_CONTAINERS = (nn.Sequential, *_LISTS)


def find_blocks(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the outermost modules whose class names match one of the shell `patterns`.

    Without patterns: those of classes that repeat, have layers of their own, and are in a container of torch's.
    Raises `RequestError` if there are none.
    """
    inner = [module for module in model.modules() if module is not model]
    names = {type(module).__name__ for module in inner}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise unknown("--shard-modules pattern", pattern, names, "It names classes of the model's modules.")
    inner = [module for module in inner if not isinstance(module, _LISTS)]
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
        weighted = {type(module).__name__ for module in inner if next(module.parameters(), None) is not None}
        raise RequestError(
            f"The model has no blocks that repeat: name the classes of its large parts, such as "
            f"--shard-modules {min(weighted, default='Linear')}."
        )
    return blocks


def _has_layers(module: nn.Module) -> bool:
    """Return whether a module is no container of torch's and has child modules with parameters."""
    if isinstance(module, _CONTAINERS):
        return False
    return any(next(child.parameters(), None) is not None for child in module.children())


def with_forward(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, or the modules of a ModuleDict or ModuleList, which has no forward pass that could gather."""
    if isinstance(model, _LISTS):
        for child in model.children():
            yield from with_forward(child)
    else:
        yield model


def check_divisible(model: nn.Module, blocks: Sequence[nn.Module], parameters: dict[str, nn.Parameter]) -> None:
    """Raise `RequestError` for a model that torch cannot divide, or of which something would be lost."""
    faults = {
        "complex parameters": [name for name, parameter in parameters.items() if parameter.is_complex()],
        "embeddings with sparse gradients": [
            name for name, module in model.named_modules() if getattr(module, "sparse", False) is True
        ],
        "compiled modules (--compile)": [
            name or "the model" for name, part in model.named_modules() if _torch.is_compiled(part)
        ],
        "hooks on parameters from before session.prepare": [
            name for name, parameter in parameters.items() if _torch.has_hooks(parameter)
        ],
        "parameters that two blocks share": _shared(model, blocks),
    }
    for fault, names in faults.items():
        if names:
            raise RequestError(f"--strategy fsdp cannot divide a model with {fault} ({few(names)}); take zero1 or ddp.")


def _shared(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    """Return the names of parameters of several blocks, or of a block and of the rest of the model."""
    within = {module for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if module not in within]
    sharing = Counter(parameter for block in blocks for parameter in block.parameters())
    sharing.update({parameter for module in outside for parameter in module.parameters(recurse=False)})
    return [name for name, parameter in model.named_parameters() if sharing[parameter] > 1]

"""Blocks of a model: the modules whose weights are gathered one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from .. import _torch
from ..checkpoint.state import few
from ..errors import RequestError, unknown

_LISTS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward pass."""
_CONTAINERS = (nn.Sequential, *_LISTS)


def find_blocks(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the outermost modules whose class names match one of the shell `patterns`.

    Without patterns: those of classes that repeat, contain layers, and are in a container of torch's. A
    model of several may have none (see `check_found`).
    """
    inner = [module for module in model.modules() if module is not model and not isinstance(module, _LISTS)]
    if patterns:
        names = inner_classes(model)
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
    return blocks


def inner_classes(model: nn.Module) -> dict[str, bool]:
    """Return {class name of a module within the model: whether it has parameters}."""
    names: dict[str, bool] = {}
    for module in model.modules():
        if module is not model:
            name = type(module).__name__
            names[name] = names.get(name, False) or next(module.parameters(), None) is not None
    return names


def check_found(count: int, names: Mapping[str, bool], patterns: Sequence[str]) -> None:
    """Raise `RequestError` unless each pattern matches one of the models' `inner_classes`, and some have blocks."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise unknown("--shard-modules pattern", pattern, names, "It names classes of a model's modules.")
    if not count:
        weighted = [name for name, has_parameters in names.items() if has_parameters]
        raise RequestError(
            "No model has blocks that repeat: name the classes of the large parts, such as "
            f"--shard-modules {min(weighted, default='Linear')}."
        )


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

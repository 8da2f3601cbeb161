"""Initial weights of `--init-from`, and frozen parameters of `--freeze`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from .._torch import BatchNorm
from ..checkpoint import find, foreign, peek
from ..checkpoint.state import few, matching, misfits
from ..checks.digest import digest
from ..config.schema import ModelConfig, RunConfig
from ..errors import RequestError, counted
from ..models import table as models_table
from ..training.optim import scaled
from ..world.world import World

PRETRAINED = "pretrained"


@dataclass(frozen=True)
class InitialWeights:
    """Names of the tensors loaded from `source`, and of all others."""

    source: str
    taken: list[str]  # loaded
    drawn: list[str]  # missing in the source: initialized from the seed
    left_out: list[str]  # missing in the model
    reshaped: list[str]  # of another shape in the model, with both shapes: initialized from the seed
    names: list[str]  # of the classes that the weights were trained on, if the source records them

    def lines(self) -> list[str]:
        """Return a line for each kind of tensor: the count and the first names."""
        names_by_kind = {
            "of another shape there, initialized from the seed": self.reshaped,
            "not there, initialized from the seed": self.drawn,
            "not in the model, ignored": self.left_out,
        }
        total = counted(len(self.taken) + len(self.drawn) + len(self.reshaped), "tensor")
        lines = [f"{len(names):,} {kind}: {few(names)}" for kind, names in names_by_kind.items() if names]
        return [f"weights from {self.source}: {len(self.taken):,} of the model's {total}", *lines]


def load_weights(config: ModelConfig, model: nn.Module, world: World) -> InitialWeights | None:
    """Copy the weights of `--init-from` into `model` (*collective*); return None without that option.

    Raises `RequestError` on every rank for weights that are unreadable, fit no tensor or differ between ranks.
    """
    if not config.init_from:
        return None
    if config.init_from == PRETRAINED:  # first by one rank, which may have to download it
        world.together(lambda: _read(config) if world.is_main else None)
    source, weights, class_names = world.together(lambda: _read(config))
    facts = {"tensors": len(weights), "digest": f"{int(digest([weights[name] for name in sorted(weights)])):x}"}
    if mismatch := world.find_mismatch(facts):
        raise RequestError(
            f"--init-from {source} is not the same on every rank: rank {mismatch[0]} has {mismatch[1]}; put it where "
            "all nodes see it, or copy it to each of them."
        )
    tensors = model.state_dict()
    missing, unused, reshaped = misfits(tensors, weights)
    matching_names = [name for name in tensors if name in weights and name not in reshaped]
    if not matching_names:
        raise RequestError(
            f"--init-from {source} has nothing of --model {config.name}: the model needs "
            f"{few(list(reshaped.values()) or missing)}, and the file has {few(unused or list(weights))}; give weights "
            "of the same kind of model."
        )
    with torch.no_grad():
        for name in matching_names:
            tensors[name].copy_(weights[name])
    return InitialWeights(source, matching_names, missing, unused, list(reshaped.values()), class_names)


def _read(config: ModelConfig) -> tuple[str, dict[str, Tensor], list[str]]:
    """Return the weights' label, tensors by name, and class names. Prefers averaged weights."""
    if config.init_from == PRETRAINED:
        return *models_table.pretrained(config.name), []
    path = Path(config.init_from)
    tensors, meta = foreign.read(path), None if path.is_file() else peek(find(path) or path)
    class_names = list(map(str, (meta or {}).get("names", ())))
    for group, label in (("ema/", " (its averaged weights)"), ("model/", "")):
        if part := {name.removeprefix(group): tensor for name, tensor in tensors.items() if name.startswith(group)}:
            return f"{config.init_from}{label}", part, class_names
    raise RequestError(f"--init-from {config.init_from} holds no model's weights, but {few(list(tensors))}.")


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freeze the parameters whose names match one of the `patterns`.

    A BatchNorm layer whose parameters are all frozen stays in evaluation mode, and so depends on no batch. A layer
    without parameters does so if its name matches, or if all parameters of the nearest module around it are frozen.
    Raises `RequestError` for a pattern without a match, and if no parameter is left to train.
    """
    matches = [_matches(model, pattern) for pattern in patterns]
    frozen = [parameter for parameters, _ in matches for parameter in parameters]
    for parameter in frozen:
        parameter.requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise RequestError(f"--freeze {' '.join(patterns)} leaves nothing to train; leave some parameters out.")
    for name, layer in model.named_modules() if frozen else ():
        if isinstance(layer, BatchNorm):
            parts = name.split(".")
            ancestors = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts), -1, -1))
            nearest = next(parameters for module in ancestors if (parameters := list(module.parameters())))
            layer.training &= any(parameter.requires_grad for parameter in nearest)
    for layer in (layer for _, layers in matches for layer in layers):
        layer.training = False


def _matches(model: nn.Module, pattern: str) -> tuple[list[nn.Parameter], list[BatchNorm]]:
    """Return the parameters that a --freeze pattern matches, and the BatchNorm layers without parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, BatchNorm)
        and not list(layer.parameters(recurse=False))
        and any(fnmatchcase(candidate, pattern) for candidate in (name, f"{name}.weight"))
    ]
    if layers and not any(fnmatchcase(name, pattern) for name in parameters):
        return [], layers
    return matching("--freeze", pattern, parameters), layers


def describe_patterns(model: nn.Module, config: RunConfig) -> list[str]:
    """Return a line per --freeze and --lr-scale pattern, with the number of matched tensors and weights."""
    lines = []
    for pattern in config.model.freeze:
        parameters, layers = _matches(model, pattern)
        statistics = f", and the statistics of {counted(len(layers), 'layer')} without any" if layers else ""
        lines.append(f"frozen by {pattern}: {_count_weights(parameters)}{statistics}")
    return lines + [
        f"learning rate × {factor:g} by {pattern}: {_count_weights(parameters)}"
        for pattern, factor, parameters in scaled(model, config.optim)
    ]


def _count_weights(parameters: Iterable[nn.Parameter]) -> str:
    unique = {*parameters}
    weights = sum(parameter.numel() for parameter in unique)
    return f"{counted(len(unique), 'tensor')} with {counted(weights, 'weight')}"

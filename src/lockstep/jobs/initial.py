"""Initial weights from elsewhere, and frozen parameters."""

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
class Taken:
    """Names of tensors taken from `source`, and of the others."""

    source: str
    taken: list[str]
    drawn: list[str]  # missing in the source: as the seed has drawn them
    left_out: list[str]  # missing in the model
    reshaped: list[str]  # of another shape in the model, with both shapes: as drawn, too
    names: list[str]  # of the classes that they were trained on, if the source is a run that says so

    def lines(self) -> list[str]:
        """Return the counts by kind in words, with the first names."""
        others = {
            "of another shape there, and so as drawn": self.reshaped,
            "not there, and so as drawn": self.drawn,
            "not in the model, and left out": self.left_out,
        }
        total = counted(len(self.taken) + len(self.drawn) + len(self.reshaped), "tensor")
        told = [f"{len(names):,} {what}: {few(names)}" for what, names in others.items() if names]
        return [f"weights from {self.source}: {len(self.taken):,} of the model's {total}", *told]


def load(config: ModelConfig, model: nn.Module, world: World) -> Taken | None:
    """Copy the weights of `--init-from` into `model` (*collective*). None without that option.

    Raises `RequestError`, on every rank, for weights that are unreadable, fit nowhere or differ between ranks.
    """
    if not config.init_from:
        return None
    if config.init_from == PRETRAINED:  # first by one rank, which may have to download it
        world.together(lambda: _read(config) if world.is_main else None)
    source, found, names = world.together(lambda: _read(config))
    facts = {"tensors": len(found), "digest": f"{int(digest([found[name] for name in sorted(found)])):x}"}
    if differ := world.find_mismatch(facts):
        raise RequestError(
            f"--init-from {source} is not the same on every rank: rank {differ[0]} has {differ[1]}; put it where all "
            "nodes see it, or copy it to each of them."
        )
    own = model.state_dict()
    drawn, left_out, reshaped = misfits(own, found)
    taken = [name for name in own if name in found and name not in reshaped]
    if not taken:
        raise RequestError(
            f"--init-from {source} has nothing of --model {config.name}: {few(list(reshaped.values()) or drawn)} is "
            f"what the model needs, and it has {few(left_out or list(found))}; give weights of the same kind of model."
        )
    with torch.no_grad():
        for name in taken:
            own[name].copy_(found[name])
    return Taken(source, taken, drawn, left_out, list(reshaped.values()), names)


def _read(config: ModelConfig) -> tuple[str, dict[str, Tensor], list[str]]:
    """Return the weights' label, tensors by name, and any names of classes. Averaged weights are preferred."""
    if config.init_from == PRETRAINED:
        return *models_table.pretrained(config.name), []
    path = Path(config.init_from)
    found, meta = foreign.read(path), None if path.is_file() else peek(find(path) or path)
    names = list(map(str, (meta or {}).get("names", ())))
    for group, what in (("ema/", " (its averaged weights)"), ("model/", "")):
        if part := {name.removeprefix(group): each for name, each in found.items() if name.startswith(group)}:
            return f"{config.init_from}{what}", part, names
    raise RequestError(f"--init-from {config.init_from} holds no model's weights, but {few(list(found))}.")


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freeze the parameters whose names match one of the `patterns`.

    A BatchNorm layer whose parameters are all frozen stays in evaluation mode: it depends on no batch. So does one
    without parameters whose name matches, or beside which all parameters are frozen.
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
            around = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts), -1, -1))
            own = next(parameters for module in around if (parameters := list(module.parameters())))
            layer.training &= any(parameter.requires_grad for parameter in own)
    for layer in (layer for _, layers in matches for layer in layers):
        layer.training = False


def _matches(model: nn.Module, pattern: str) -> tuple[list[nn.Parameter], list[BatchNorm]]:
    """Return the parameters that a --freeze pattern matches, and the BatchNorm layers without parameters."""
    named = dict(model.named_parameters(remove_duplicate=False))
    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, BatchNorm)
        and not list(layer.parameters(recurse=False))
        and any(fnmatchcase(each, pattern) for each in (name, f"{name}.weight"))
    ]
    if layers and not any(fnmatchcase(name, pattern) for name in named):
        return [], layers
    return matching("--freeze", pattern, named), layers


def reached(model: nn.Module, config: RunConfig) -> list[str]:
    """Return a line per --freeze and --lr-scale pattern. Each has the number of matched tensors and weights."""
    lines = []
    for pattern in config.model.freeze:
        parameters, layers = _matches(model, pattern)
        statistics = f", and the statistics of {counted(len(layers), 'layer')} without any" if layers else ""
        lines.append(f"frozen by {pattern}: {_sizes(parameters)}{statistics}")
    scales = scaled(model, config.optim)
    return lines + [f"learning rate × {factor:g} by {pattern}: {_sizes(those)}" for pattern, factor, those in scales]


def _sizes(parameters: Iterable[nn.Parameter]) -> str:
    unique = {*parameters}
    return f"{counted(len(unique), 'tensor')} with {counted(sum(each.numel() for each in unique), 'weight')}"

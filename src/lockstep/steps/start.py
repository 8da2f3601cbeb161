"""How a new run begins: with weights from elsewhere, and with parameters that are not trained.

It is no continuation: it begins at step 0, with a fresh optimizer, and may have other options, data and classes. What
does not fit the model stays as the seed has drawn it, and each tensor's case is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .._torch import BatchNorm
from ..checkpoint import foreign as files_of_tensors
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
    """Which tensors of `source` a model has begun with, by name, and which not."""

    source: str
    taken: list[str]
    drawn: list[str]
    """Those that the source lacks: they are as the seed has drawn them."""
    left_out: list[str]
    """Those that the model lacks."""
    reshaped: list[str]
    """Those that are of another shape in the model, with both shapes: as drawn, too."""

    def lines(self) -> list[str]:
        """Return in words how many there are of each kind, with the first names."""
        others = {
            "of another shape there, and so as drawn": self.reshaped,
            "not there, and so as drawn": self.drawn,
            "not in the model, and left out": self.left_out,
        }
        total = len(self.taken) + len(self.drawn) + len(self.reshaped)
        counts = f"{len(self.taken):,} of the model's {counted(total, 'tensor')}"
        return [
            f"weights from {self.source}: {counts}",
            *(f"{len(names):,} {what}: {few(names)}" for what, names in others.items() if names),
        ]


def load(config: ModelConfig, model: nn.Module, world: World) -> Taken | None:
    """Copy what `--init-from` names into `model`, as far as it fits; None where it names nothing (*collective*).

    Raises `RequestError`, on every rank, for what cannot be read, where nothing fits, and where ranks read different
    tensors.
    """
    if not config.init_from:
        return None
    if config.init_from == PRETRAINED:  # first by one rank, which may have to download it
        world.together(lambda: _read(config) if world.is_main else None)
    source, found = world.together(lambda: _read(config))
    facts = {"tensors": len(found), "digest": f"{int(digest([found[name] for name in sorted(found)])):x}"}
    if differ := world.unlike(facts):
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
    return Taken(source, taken, drawn, left_out, list(reshaped.values()))


def _read(config: ModelConfig) -> tuple[str, dict[str, Tensor]]:
    """Return what the weights are to be called, and the tensors by the model's names.

    Where averaged weights were saved (EMA), they are those that were evaluated, and those that are taken.
    """
    if config.init_from == PRETRAINED:
        return models_table.pretrained(config.name)
    found = files_of_tensors.read(Path(config.init_from))
    for group, what in (("ema/", " (its averaged weights)"), ("model/", "")):
        if part := {name.removeprefix(group): each for name, each in found.items() if name.startswith(group)}:
            return f"{config.init_from}{what}", part
    raise RequestError(f"--init-from {config.init_from} holds no model's weights, but {few(list(found))}.")


def reached(model: nn.Module, config: RunConfig) -> list[str]:
    """Return a line for each pattern of --freeze and --lr-scale: how many tensors and weights of `model` it reached."""
    named = dict(model.named_parameters(remove_duplicate=False))
    lines = [f"frozen by {each}: {_size(matching('--freeze', each, named))}" for each in config.model.freeze]
    if lines:
        every = list(named.values())
        held = _size(each for each in every if not each.requires_grad)
        kept = sum(isinstance(each, BatchNorm) and not each.training for each in model.modules())
        statistics = f", and the statistics of {counted(kept, 'BatchNorm layer')}" if kept else ""
        lines.append(f"frozen in all: {held}, of {_size(every)}{statistics}")
    rates = scaled(model, config.optim)
    return lines + [f"learning rate × {factor:g} by {each}: {_size(those)}" for each, factor, those in rates]


def _size(parameters: Iterable[nn.Parameter]) -> str:
    held = set(parameters)  # one that is shared has several names
    return f"{counted(len(held), 'tensor')} with {counted(sum(each.numel() for each in held), 'weight')}"


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Have the parameters whose names match one of the `patterns` not trained.

    A BatchNorm layer whose parameters are all frozen goes to evaluation mode, and stays there: it normalises by its
    running statistics, which do not move, and depends on no batch. Raises `RequestError` for a pattern that matches
    nothing, and where nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    frozen = [parameter for pattern in patterns for parameter in matching("--freeze", pattern, named)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in named.values()):
        raise RequestError(f"--freeze {' '.join(patterns)} leaves nothing to train; leave some parameters out.")
    for layer in model.modules() if frozen else ():
        if isinstance(layer, BatchNorm):
            own = list(layer.parameters(recurse=False))
            layer.training &= not own or any(parameter.requires_grad for parameter in own)

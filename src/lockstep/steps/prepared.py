"""Models and optimizers of a session. Defines their checkpoint state, and the tensors equal on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batching import BatchPlan
from ..checkpoint import find
from ..checkpoint.state import State, load_model, load_optimizer, model_tensors, optimizer_state
from ..checks import finite
from ..config.schema import RunConfig
from ..data.ranks import is_changed
from ..data.share import Micro
from ..errors import RequestError
from ..files import shown, understanding
from ..nn import sync_batchnorm
from ..strategies.base import Strategy
from ..training.optim import Average
from ..training.precision import Precision
from ..world.world import World

_OWN = "own"  # the group of the tensors in the states of schedules and of the user's own objects


class Source(Protocol):
    """Data source whose batches count steps. None stands for a stream's unknown numbers."""

    @property
    def plan(self) -> BatchPlan: ...

    @property
    def samples(self) -> int | None: ...

    def steps(self) -> int | None:
        """Return the number of optimizer steps per epoch."""

    def micros(self, epoch: int, *, first: int = 0) -> Generator[Micro, None, None]:
        """Yield this rank's share of each micro-batch of `epoch`, from step `first`."""


@dataclass
class Prepared:
    """Models, optimizers and other objects with a state. Every rank calls *collective* methods."""

    config: RunConfig
    world: World
    precision: Precision
    models: dict[str, nn.Module] = field(default_factory=dict)
    """By the name of their group of tensors: model, model_2, …"""
    optimizers: list[Optimizer] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    strategy: Strategy | None = None
    """Exchanges gradients during the backward pass; None where a session does so afterwards."""
    replica: nn.Module | None = None
    average: Average | None = None
    batchnorm: str = "none"
    contents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Digests of the user's data sets (see `data.source.Splits`)."""
    first_loader: Source | None = None
    kept: set[str] = field(default_factory=set)
    """Numeric settings of the script's optimizers that a checkpoint has replaced, in words."""
    _made: list[list[dict[str, Any]]] = field(default_factory=list)  # the numbers that the optimizers were made with

    @property
    def source(self) -> Source | None:
        """Data source whose batches count steps."""
        return self.first_loader

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices that this process computes on."""
        return [self.world.device] if self.strategy is None else self.strategy.devices

    @property
    def replicas(self) -> int:
        """Number of model replicas over all ranks."""
        return self.world.size * len(self.devices)

    @property
    def _all(self) -> nn.Module:
        """One module of all models. A single model is itself, to keep the parameter names that the user knows."""
        return next(iter(self.models.values())) if len(self.models) == 1 else nn.ModuleDict(self.models)

    @property
    def groups(self) -> dict[str, nn.Module]:
        """The models and the average, by the name of their group of tensors."""
        return self.models if self.average is None else self.models | {"ema": self.average.module}

    def begin(self) -> None:
        """Move optimizer states to their parameters.

        Raises `RequestError` for a parameter of no model, or of two optimizers.
        """
        known = {parameter: name for name, parameter in self._all.named_parameters()}
        owners: dict[Tensor, int] = {}
        for number, optimizer in enumerate(self.optimizers, start=1):
            groups = optimizer.param_groups
            strange = [each for group in groups for each in group["params"] if each not in known]
            if strange:
                raise RequestError(
                    f"Optimizer {number} of session.prepare has {len(strange)} parameters of no prepared model (the "
                    f"first: shape {tuple(strange[0].shape)}): give prepare the model that it was made from, and make "
                    "the optimizer after the last change of that model's layers."
                )
            for each in (each for group in groups for each in group["params"]):
                if owners.setdefault(each, number) != number:
                    raise RequestError(
                        f"Optimizers {owners[each]} and {number} of session.prepare both have the parameter "
                        f"{known[each]}, and a checkpoint has one state of it; give each parameter one optimizer."
                    )
            self._made.append(
                [{key: value for key, value in group.items() if isinstance(value, int | float)} for group in groups]
            )
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, model in self.groups.items():
            yield from ((f"{name}/{key}", held) for key, held in model.named_parameters())

    def _statistics(self) -> Iterator[tuple[str, Tensor]]:
        for name, model in self.groups.items():
            yield from ((f"{name}/{key}", held) for key, held in sync_batchnorm.statistics(model).items())

    def replicated(self) -> dict[str, Tensor]:
        """Return, by name, tensors bitwise equal on all ranks after a step."""
        found = dict(self._weights()) | optimizer_state(self._all, self.optimizers).tensors
        return found | dict(self._statistics()) if self.batchnorm == "sync" else found

    def copies(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the weights on this process's further devices."""
        return [] if self.strategy is None else self.strategy.copies(self._all)

    def _facts(self) -> dict[str, Any]:
        """Return a checkpoint's facts on the sharing of batches."""
        source = self.source
        return {
            "batchnorm": self.batchnorm,
            "replicas": self.replicas,
            "accumulation": 1 if source is None else source.plan.accumulation,
            "batch": 0 if source is None else source.plan.global_size,
            "samples": 0 if source is None else source.samples or 0,
            "contents": self.contents,
        }

    def state(self, step: int) -> State:
        """Return the state for a checkpoint (*collective*).

        Raises `RunError` where weights or statistics are not finite; other buffers, such as a mask, are not checked.
        """
        if names := finite.found(self.world, dict(self._weights()) | dict(self._statistics())):
            raise finite.error(step, names, self.remedy())
        held = optimizer_state(self._all, self.optimizers)
        tensors = dict(held.tensors)
        for name, model in self.groups.items():
            tensors |= model_tensors(model, under=name)
        meta = held.meta | self._facts()
        if self.strategy is None:  # else settings follow from the config and the step
            meta["groups"] = [
                [{key: _packed(value, tensors) for key, value in group.items() if key != "params"} for group in each]
                for each in (optimizer.param_groups for optimizer in self.optimizers)
            ]
            meta["others"] = [_packed(each.state_dict(), tensors) for each in self.others]
            meta["optimizer"] = {name: _packed(value, tensors) for name, value in held.meta["optimizer"].items()}
            meta |= {"made": self._made, "kinds": [type(each).__name__ for each in self.optimizers]}
        return State(tensors, meta)

    def load(self, state: State) -> None:
        """Restore `state` in place. Raises `RequestError` for a state of other parts or other data."""
        is_own = self.strategy is None
        if ("groups" in state.meta) != is_own:
            whose = "lockstep train" if is_own else "a loop or a step of your own"
            raise RequestError(f"{shown(state.origin)} is a checkpoint of {whose}, which this run cannot go on from.")
        self._check_shares(state)
        self.load_weights(state)
        if is_own:
            self._check_parts(state)
            own = state.part(_OWN)
            numbers = {name: _unpacked(value, own) for name, value in state.meta.get("optimizer", {}).items()}
            load_optimizer(self._all, self.optimizers, replace(state, meta=state.meta | {"optimizer": numbers}))
            self._load_settings(state)
        else:
            load_optimizer(self._all, self.optimizers, state)

    def load_weights(self, state: State) -> None:
        """Load a state's models and average alone. Raises `RequestError` for a misfit."""
        with understanding(state.origin or Path("the checkpoint")):
            for name, model in self.groups.items():
                load_model(model, state.part(name))

    def _check_shares(self, state: State) -> None:
        """Raise `RequestError` where sample order or batch statistics would change."""
        now = self._facts()
        saved = now | state.meta
        for what, key in (("samples in the training set", "samples"), ("samples in a global batch", "batch")):
            if saved[key] != now[key]:
                raise RequestError(
                    f"{shown(state.origin)} was trained with {saved[key]} {what}, and here are {now[key]}: its order "
                    "would be another; give it the same data, or start a new run in another --output."
                )
        was, is_now = (each["contents"].get("train") for each in (saved, now))
        if was and is_now and is_changed(was, is_now):
            raise RequestError(
                f"{shown(state.origin)} was trained with other samples or labels, or in another order, than --data "
                f"{self.config.data.name} now gives; give it the same data, or begin a new run with its weights by "
                f"--init-from {shown(state.origin)} in place of --resume."
            )
        kinds = [
            f"local, of {each['replicas']} replicas" if each["batchnorm"] == "local" else each["batchnorm"]
            for each in (saved, now)
        ]
        if kinds[0] != kinds[1]:
            raise RequestError(
                f"The checkpoint was trained with batch statistics {kinds[0]}, and this run would take {kinds[1]}, "
                "which is another model; continue with --strategy, --batchnorm and --devices as they were."
            )

    def _check_parts(self, state: State) -> None:
        meta, kinds = state.meta, [type(each).__name__ for each in self.optimizers]
        groups = [len(optimizer.param_groups) for optimizer in self.optimizers]
        saved, ours = (
            f"{', '.join(map(str, names))} (groups of parameters: {sizes}) and {others} schedules or other objects"
            for names, sizes, others in (
                (meta.get("kinds", kinds), [len(each) for each in meta["groups"]], len(meta["others"])),
                (kinds, groups, len(self.others)),
            )
        )
        if saved != ours:
            raise RequestError(
                f"{shown(state.origin)} was trained with {saved}, and session.prepare was given {ours}; give it the "
                "same, or start a new run in another output."
            )

    def _load_settings(self, state: State) -> None:
        own = state.part(_OWN)
        for optimizer, groups in zip(self.optimizers, state.meta["groups"], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update({key: _unpacked(value, own) for key, value in saved.items()})
        asked, self._made = self._made, state.meta.get("made", self._made)
        for saved, ours in zip(chain.from_iterable(self._made), chain.from_iterable(asked), strict=True):
            differing = {key: value for key, value in ours.items() if saved.get(key, value) != value}
            self.kept |= {f"{key} {saved[key]}, not {value}" for key, value in differing.items()}
        for other, saved in zip(self.others, state.meta["others"], strict=True):
            other.load_state_dict(_unpacked(saved, own))

    def remedy(self) -> str:
        """Return advice on non-finite numbers, with the last checkpoint if any."""
        folder = self.config.record.output
        is_kept = folder is not None and find(folder) is not None
        kept = f"; the last checkpoint in {shown(folder)} is from before" if is_kept else ""
        if self.strategy is None:
            return f"Lower the learning rate, clip the gradients, or warm up{kept}."
        return (
            f"Lower the learning rate (--lr), clip the gradients (--clip), warm up (--warmup) or compute in fp32{kept}."
        )


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return plain data for JSON; tensors go to `tensors`. Raises `RequestError` for other objects."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = f"{_OWN}/{sum(key.startswith(f'{_OWN}/') for key in tensors)}"
        tensors[name] = value.detach()
        return {"tensor": name.partition("/")[2]}
    if isinstance(value, dict):
        pairs = [[_packed(key, tensors), _packed(item, tensors)] for key, item in value.items()]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_packed(item, tensors) for item in value]}
    raise RequestError(
        f"A state given to session.prepare holds a {type(value).__name__}, and checkpoints hold no pickles: put "
        "tensors, numbers, texts, lists, tuples and dicts there."
    )


def _unpacked(value: Any, own: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return own[held].clone()
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(_unpacked(item, own) for item in held)
    found = {_unpacked(key, own): _unpacked(item, own) for key, item in held}
    return Counter(found) if kind == "counter" else found

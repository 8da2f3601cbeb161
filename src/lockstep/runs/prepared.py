"""Models and optimizers of a session. Defines their checkpoint state, and the tensors equal on all ranks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batching import BatchPlan
from ..checkpoint import find
from ..checkpoint.state import (
    State,
    add_buffers,
    buffer_owners,
    laid_out_as,
    load_model,
    load_optimizer,
    load_own_optimizer,
    model_state,
    optimizer_state,
)
from ..checks import finite
from ..checks.samples import Indices
from ..config.schema import RunConfig
from ..data.ranks import is_changed
from ..errors import RequestError
from ..exchange.base import Exchange
from ..files import shown, understanding
from ..nn import sync_batchnorm
from ..training.optim import Average
from ..training.precision import Precision
from ..world.world import World

_OWN = "own"  # the group of the tensors in the states of schedules and of the user's own objects
_CONTAINERS: dict[str, Any] = {
    "counter": Counter,
    "ordered": OrderedDict,
    "dict": dict,
    "list": list,
    "tuple": tuple,
    "set": set,
}
_SUBCLASSES = ("dict", "list", "tuple")  # of which subclasses, such as defaultdict, come back plain


@runtime_checkable
class Source(Protocol):
    """Data source whose batches count steps. None stands for a stream's unknown numbers."""

    @property
    def plan(self) -> BatchPlan: ...

    @property
    def samples(self) -> int | None: ...

    @property
    def index_bound(self) -> int:
        """An exclusive upper bound of the sample indices; 0 for a stream."""

    def epoch_order(self, epoch: int) -> Callable[[int, int], Indices]:
        """Return the order of `epoch`, as a function from [start, stop) to the samples there."""

    def steps(self) -> int | None:
        """Return the number of optimizer steps per epoch."""

    def micros(self, epoch: int, *, first: int = 0, again: int = 0) -> Any:
        """Return an iterator, with `close`, over this rank's share of each micro-batch of `epoch` from step `first`.

        `again` counts the earlier passes over that epoch.
        """


@dataclass
class Prepared:
    """Models, optimizers and other objects with a state. Every rank calls *collective* methods."""

    config: RunConfig
    world: World
    precision: Precision
    exchange: Exchange
    models: dict[str, nn.Module] = field(default_factory=dict)
    """By the name of their group of tensors: model, model_2, …"""
    optimizers: list[Optimizer] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    is_recipe: bool = False
    """Whether settings of optimizers follow from the config and the step, as under `lockstep train`."""
    average: Average | None = None
    batchnorm: str = "none"
    contents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Digests of the user's data sets (see `data.source.Splits`)."""
    first_loader: Source | None = None
    inner: set[Optimizer] = field(default_factory=set)
    """Optimizers that another one keeps and steps, over the same parameters."""
    cautions: list[str] = field(default_factory=list)
    """What the start has to say of the parts."""
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
        return [self.world.device]

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
            for each in (each for group in groups for each in group["params"] if optimizer not in self.inner):
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
        return []

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
            "names": [],
        }

    def state(self, step: int, *, pending: bool = False) -> State:
        """Return the state for a checkpoint (*collective*). With `pending`, gradients wait for a step.

        Raises `RunError` where weights or statistics are not finite; other buffers, such as a mask, are not checked.
        """
        if names := finite.find_non_finite(self.world, dict(self._weights()) | dict(self._statistics())):
            raise finite.error(step, names, self.remedy())
        held = optimizer_state(self._all, self.optimizers)
        tensors, extra = dict(held.tensors), dict[str, Any]()
        for name, model in self.groups.items():
            own, others = model_state(model, under=name)
            tensors |= own
            extra[name] = others
        known = {id(tensor): name for name, tensor in tensors.items()}
        meta = held.meta | self._facts() | {"extra": _packed(extra, tensors, known)}
        if not self.is_recipe:  # else settings follow from the config and the step
            meta["optimizer"] = {}
            meta["optimizers"] = [_packed(each.state_dict(), tensors, known) for each in self.optimizers]
            meta["others"] = [_packed(each.state_dict(), tensors, known) for each in self.others]
            meta |= {"made": self._made, "kinds": self._kinds()}
        meta["buffers"] = {name: buffer_owners(model) for name, model in self.groups.items()}
        if pending:
            gradients = {name: each.grad for name, each in self._all.named_parameters() if each.grad is not None}
            dense = {name: each.to_dense() if each.is_sparse else each for name, each in gradients.items()}
            tensors |= {f"gradients/{name}": each for name, each in dense.items()}
        return State(tensors, meta)

    def load(self, state: State) -> None:
        """Restore `state` in place. Raises `RequestError` for a state of other parts or other data."""
        is_own = not self.is_recipe
        if ("optimizers" in state.meta) != is_own:
            whose = "lockstep train" if is_own else "a loop or a step of your own"
            raise RequestError(f"{shown(state.origin)} is a checkpoint of {whose}, which this run cannot go on from.")
        self._check_shares(state)
        self.load_weights(state)
        if is_own:
            self._check_parts(state)
            for optimizer, saved in zip(self.optimizers, state.meta["optimizers"], strict=True):
                load_own_optimizer(optimizer, _unpacked(saved, state.tensors))
            self._note_kept(state)
            for other, saved in zip(self.others, state.meta["others"], strict=True):
                other.load_state_dict(_unpacked(saved, state.tensors))
        else:
            load_optimizer(self._all, self.optimizers, state)
        gradients = state.part("gradients")
        for name, parameter in self._all.named_parameters() if gradients else ():
            if name in gradients:
                parameter.grad = laid_out_as(parameter, gradients[name].to(parameter.device))

    def load_weights(self, state: State) -> None:
        """Load a state's models and average alone. Raises `RequestError` for a misfit."""
        with understanding(state.origin or Path("the checkpoint")):
            for name, model in self.groups.items():
                extra = _unpacked(state.meta["extra"], state.tensors) if state.meta.get("extra") else {}
                add_buffers(model, state.part(name), state.meta.get("buffers", {}).get(name, {}))
                load_model(model, state.part(name), extra.get(name))

    def _check_shares(self, state: State) -> None:
        """Raise `RequestError` where sample order or batch statistics would change."""
        now, saved = self._facts(), state.meta
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

    def _kinds(self) -> list[list[Any]]:
        """Return each optimizer's class and number of parameter groups."""
        return [[type(each).__name__, len(each.param_groups)] for each in self.optimizers]

    def _check_parts(self, state: State) -> None:
        saved, ours = (
            f"{', '.join(f'{name} (parameter groups: {groups})' for name, groups in kinds)} and {others} schedules "
            "or other objects"
            for kinds, others in (
                (state.meta["kinds"], len(state.meta["others"])),
                (self._kinds(), len(self.others)),
            )
        )
        if saved != ours:
            raise RequestError(
                f"{shown(state.origin)} was trained with {saved}, and session.prepare was given {ours}; give it the "
                "same, or start a new run in another output."
            )

    def _note_kept(self, state: State) -> None:
        """Note the numeric settings of optimizers that the checkpoint has replaced."""
        asked, self._made = self._made, state.meta["made"]
        for saved, ours in zip(chain.from_iterable(self._made), chain.from_iterable(asked), strict=True):
            differing = {key: value for key, value in ours.items() if saved.get(key, value) != value}
            self.kept |= {f"{key} {saved[key]}, not {value}" for key, value in differing.items()}

    def remedy(self) -> str:
        """Return advice on non-finite numbers, with the last checkpoint if any."""
        folder = self.config.record.output
        is_kept = folder is not None and find(folder) is not None
        kept = f"; the last checkpoint in {shown(folder)} is from before" if is_kept else ""
        if not self.is_recipe:
            return f"Lower the learning rate, clip the gradients, or warm up{kept}."
        return (
            f"Lower the learning rate (--lr), clip the gradients (--clip), warm up (--warmup) or compute in fp32{kept}."
        )


def _packed(value: Any, tensors: dict[str, Tensor], known: dict[int, str]) -> Any:
    """Return plain data for JSON; tensors go to `tensors`, if not `known` there by id.

    Raises `RequestError` for other objects.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = known.get(id(value)) or f"{_OWN}/{sum(key.startswith(f'{_OWN}/') for key in tensors)}"
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: [str(value.dtype), value.tolist()]}
    for name, kind in _CONTAINERS.items():
        if type(value) is kind or (name in _SUBCLASSES and isinstance(value, kind)):
            items = [list(pair) for pair in value.items()] if isinstance(value, dict) else list(value)
            return {name: [_packed(item, tensors, known) for item in items]}
    raise RequestError(
        f"A state given to session.prepare holds a {type(value).__name__}, and checkpoints hold no pickles: put "
        "tensors, arrays, numbers, texts, lists, tuples, sets and dicts there."
    )


def _unpacked(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held].clone()
    if kind in ("array", "number"):
        array = np.array(held[1], held[0])
        return array if kind == "array" else array[()]
    items = [_unpacked(item, tensors) for item in held]
    return Counter(dict(items)) if kind == "counter" else _CONTAINERS[kind](items)

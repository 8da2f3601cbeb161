"""Models and optimizers of a session: their checkpoint state, and the tensors equal on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batching import BatchPlan
from ..checkpoint import find
from ..checkpoint.packing import names_in, pack, unpack
from ..checkpoint.shards import full_tensor, is_shard, local, shard_as
from ..checkpoint.state import (
    State,
    add_buffers,
    buffer_owners,
    few,
    laid_out_as,
    load_model,
    load_optimizer,
    model_state,
    optimizer_tensors,
    parameters_of,
)
from ..checks import finite
from ..checks.digest import digest
from ..checks.samples import Indices
from ..config.schema import RunConfig
from ..data.ranks import is_changed
from ..errors import RequestError, RunError
from ..exchange.base import Exchange
from ..files import shown, understanding
from ..nn import sync_batchnorm
from ..nn.recompute import Recomputation
from ..training.memory import MemoryWatch
from ..training.optim import Average
from ..training.precision import Precision
from ..world.world import World
from .restored import describe_differences, plain_copy


@runtime_checkable
class Source(Protocol):
    """Data source whose batches count steps. None stands for unknown numbers of a stream."""

    @property
    def plan(self) -> BatchPlan: ...

    @property
    def samples(self) -> int | None: ...

    @property
    def index_bound(self) -> int:
        """Exclusive upper bound of the sample indices; 0 for a stream."""

    def epoch_order(self, epoch: int) -> Callable[[int, int], Indices]:
        """Return the order of `epoch`: a function from positions [start, stop) to sample indices."""

    def steps(self) -> int | None:
        """Return the number of optimizer steps per epoch."""

    def micros(self, epoch: int, *, first: int = 0, again: int = 0) -> Any:
        """Return an iterator over this rank's shares of the micro-batches of `epoch`, from step `first`.

        The iterator has `close`. `again` counts earlier passes over that epoch.
        """


class Evaluated(Protocol):
    """Data to evaluate."""

    @property
    def samples(self) -> int | None: ...

    @property
    def index_bound(self) -> int:
        """Exclusive upper bound of the sample indices."""

    def shares(self) -> Iterator[Any]:
        """Yield this rank's shares, each sample once over all ranks, and as many shares on each."""


@dataclass
class Prepared:
    """Models, optimizers and other objects with a state. Every rank calls *collective* methods."""

    config: RunConfig
    world: World
    precision: Precision
    exchange: Exchange
    models: dict[str, nn.Module] = field(default_factory=dict)
    """Models by the name of their group of tensors: model, model_2, …"""
    optimizers: list[Optimizer] = field(default_factory=list)
    stateful_objects: list[Any] = field(default_factory=list)
    """Schedules and other user objects with `state_dict` and `load_state_dict`."""
    is_recipe: bool = False
    """Whether the optimizers' settings follow from the config and the step, as under `lockstep train`."""
    averages: list[Average] = field(default_factory=list)
    batchnorm: str = "none"
    recomputation: Recomputation = field(default_factory=Recomputation)
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    contents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Digests of the user's data sets (see `data.source.Splits`)."""
    first_loader: Source | None = None
    inner: set[Optimizer] = field(default_factory=set)
    """Optimizers that a wrapping optimizer steps, over the same parameters."""
    is_renewed: bool = False
    """Whether the loop makes its loader anew, so that no checkpoint within an epoch can be continued."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields for the `start` event; `chosen` and `lines` for the startup report."""
    cautions: list[str] = field(default_factory=list)
    """Sentences on the parts for the startup report."""
    restored_settings: set[str] = field(default_factory=set)
    """Numeric optimizer settings that a checkpoint has replaced, such as `lr 0.1, not 0.05`."""
    _settings: list[list[dict[str, Any]]] = field(default_factory=list)  # initial ones by optimizer and parameter group
    _fresh: list[Any] = field(default_factory=list)  # a plain copy of each stateful object before the loop, or None

    @property
    def source(self) -> Source | None:
        """Data source whose batches count steps."""
        return self.first_loader

    @property
    def optimized(self) -> set[Tensor]:
        """Parameters of the prepared optimizers."""
        return {parameter for optimizer in self.optimizers for parameter in parameters_of(optimizer)}

    @property
    def devices(self) -> Sequence[torch.device]:
        """Devices that this process computes on."""
        return [self.world.device]

    @property
    def replicas(self) -> int:
        """Number of model replicas over all ranks."""
        return self.world.size * len(self.devices)

    @property
    def _all(self) -> nn.Module:
        """One module of all models; a single model itself, to keep the user's parameter names."""
        return next(iter(self.models.values())) if len(self.models) == 1 else nn.ModuleDict(self.models)

    @property
    def groups(self) -> dict[str, nn.Module]:
        """Models and averages by the name of their group of tensors: ema, ema_2, …"""
        modules = enumerate((average.module for average in self.averages), start=1)
        return self.models | {"ema" if number == 1 else f"ema_{number}": module for number, module in modules}

    def begin(self) -> None:
        """Move optimizer states to their parameters.

        Raises `RequestError` for a parameter of no model, or of two optimizers.
        """
        for optimizer in self.optimizers:
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())
        self.exchange.take(self.optimizers)
        self.recomputation.check()
        names = self.check_parameters()
        for item in self.stateful_objects:
            pack(item.state_dict(), {}, {})
        owners: dict[Tensor, int] = {}
        for number, optimizer in enumerate(self.optimizers, start=1):
            groups = optimizer.param_groups
            for parameter in (item for group in groups for item in group["params"] if optimizer not in self.inner):
                if owners.setdefault(parameter, number) != number:
                    raise RequestError(
                        f"Optimizers {owners[parameter]} and {number} of session.prepare both have the parameter "
                        f"{names[parameter]}, and a checkpoint has one state of it; give each parameter one optimizer."
                    )
            self._settings.append(_settings_of(optimizer))
        if self.config.record.output is not None:
            self._fresh = [plain_copy(item) for item in self.stateful_objects]

    def check_parameters(self) -> dict[Tensor, str]:
        """Return the names of the parameters.

        Raises `RequestError` for parameters that the models or optimizers have got after `session.prepare`: no rank
        would exchange them.
        """
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._all.named_parameters()}
        exchanged = set(self.exchange.leaves)
        if added := [name for parameter, name in names.items() if parameter not in exchanged]:
            raise RequestError(
                f"The model has a new parameter since session.prepare, {added[0]}: prepare "
                "the model after the last change of its layers."
            )
        for number, optimizer in enumerate(self.optimizers, start=1):
            groups = optimizer.param_groups
            if foreign := [item for group in groups for item in group["params"] if item not in exchanged]:
                raise RequestError(
                    f"Optimizer {number} of session.prepare has {len(foreign)} parameters of no prepared model (the "
                    f"first: shape {tuple(foreign[0].shape)}): give prepare the model that it was made from, and make "
                    "the optimizer after the last change of that model's layers."
                )
        return names

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, model in self.groups.items():
            yield from ((f"{name}/{key}", parameter) for key, parameter in model.named_parameters())

    def _statistics(self) -> Iterator[tuple[str, Tensor]]:
        for name, model in self.groups.items():
            yield from ((f"{name}/{key}", buffer) for key, buffer in sync_batchnorm.statistics(model).items())

    def replicated(self) -> dict[str, Tensor]:
        """Return the tensors by name that are bitwise equal on all ranks after a step. Raises as `check_parameters`."""
        self.check_parameters()
        tensors = {name: tensor.detach() for name, tensor in self._weights() if not is_shard(tensor)}
        if self.exchange.divides_state or self.exchange.every:  # else other settings soon show in the weights
            settings = [settings for optimizer in self.optimizers for settings in _settings_of(optimizer)]
            numbers = [float(value) for group in settings for _, value in sorted(group.items())]
            tensors |= self.exchange.evidence(digest)
            tensors["optimizer/settings"] = torch.tensor(numbers, dtype=torch.float64)
        if not self.exchange.divides_state:
            tensors |= optimizer_tensors(self._all, self.optimizers)
        return tensors | dict(self._statistics()) if self.batchnorm == "sync" else tensors

    def synchronise(self) -> None:
        """Make ranks equal that have stepped by their own gradients, if the exchange has them do so (*collective*).

        Raises `RunError` for ranks whose optimizers have the state of different parameters.
        """
        if not (self.exchange.every and self.exchange.drift):
            return
        tensors = dict(self._weights()) | optimizer_tensors(self._all, self.optimizers)
        for name, model in self.groups.items():
            tensors |= {f"{name}/{key}": buffer for key, buffer in model.named_buffers()}
        tensors = dict(sorted(tensors.items()))  # optimizers keep states in the order of the first gradients
        names = self.world.gather([*tensors])
        if odd := sorted(set[str]().union(*names) - set.intersection(*map(set, names))):
            raise RunError(
                f"At step {self.world.progress.step + 1}, not all ranks have {few(odd)}: with --exchange "
                f"{self.config.parallel.exchange}, each rank has to train the same parameters."
            )
        by_rank = self.world.stack(torch.stack([digest([tensor]).to(self.world.device) for tensor in tensors.values()]))
        differs = (by_rank != by_rank[0]).any(0).tolist()
        self.exchange.synchronise([tensor for tensor, differ in zip(tensors.values(), differs, strict=True) if differ])

    def copies(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the weights on this process's further devices."""
        return []

    def _facts(self) -> dict[str, Any]:
        """Return a checkpoint's facts on data and batches."""
        source = self.source
        return {
            "batchnorm": self.batchnorm,
            "exchange": self.config.parallel.exchange if self.world.size > 1 else "",
            "replicas": self.replicas,
            "accumulation": 1 if source is None else source.plan.accumulation,
            "batch": 0 if source is None else source.plan.global_size,
            "samples": 0 if source is None else source.samples or 0,
            "contents": self.contents,
            "names": [],
        }

    def state(self, step: int, *, pending: bool = False) -> State:
        """Return the state for a checkpoint (*collective*). With `pending`, it includes the gradients.

        Raises `RunError` for non-finite weights or statistics; other buffers, such as a mask, are not checked. Raises
        as `check_parameters`.
        """
        self.check_parameters()
        tensors = {name: local(tensor) for name, tensor in (*self._weights(), *self._statistics())}
        if non_finite := finite.find_non_finite(self.world, tensors):
            raise finite.error(step, non_finite, self.remedy())
        if pending and self.exchange.every and any(parameter.grad is not None for parameter in self._all.parameters()):
            raise RequestError(
                f"--exchange {self.config.parallel.exchange}: gradients wait for a step at a save, and a checkpoint "
                "has no place for each rank's own: have the optimizer step before the epoch ends."
            )
        with self.exchange.whole_state(self.optimizers):
            return self._state(pending)

    def _state(self, pending: bool) -> State:
        tensors, extra = optimizer_tensors(self._all, self.optimizers), dict[str, Any]()
        for name, model in self.groups.items():
            model_tensors, extra[name] = model_state(model, under=name)
            tensors |= model_tensors
        names = {id(tensor): name for name, tensor in tensors.items()}
        meta = self._facts() | {"is_recipe": self.is_recipe, "extra": pack(extra, tensors, names)}
        meta["optimizers"] = [pack(optimizer.state_dict(), tensors, names) for optimizer in self.optimizers]
        meta["others"] = [pack(item.state_dict(), tensors, names) for item in self.stateful_objects]
        meta |= {"made": self._settings, "kinds": self._kinds(), "orders": self._orders()}
        meta["buffers"] = {name: buffer_owners(model) for name, model in self.groups.items()}
        tensors |= {f"exchange/{name}": tensor for name, tensor in self.exchange.state().items()}
        if pending:
            for name, parameter in self._all.named_parameters():
                if (gradient := parameter.grad) is not None:
                    tensors[f"gradients/{name}"] = gradient.to_dense() if gradient.is_sparse else gradient
        for name in sorted(name for name, tensor in tensors.items() if is_shard(tensor)):
            gathered = full_tensor(tensors.pop(name))  # one at a time, to rank 0's host
            if self.world.is_main:
                tensors[name] = gathered.cpu()
        return State(tensors, meta)

    def fingerprint(self) -> str:
        """Return a digest of models, of the optimizers' settings, and of other objects' states (*collective*)."""
        tensors: dict[str, Tensor] = {}
        states = [pack(item.state_dict(), tensors, {}) for item in self.stateful_objects]
        settings = [_settings_of(optimizer) for optimizer in self.optimizers]
        models = [tensor for model in self.groups.values() for tensor in (*model.parameters(), *model.buffers())]
        values: Any = int(digest([local(tensor) for tensor in (*models, *tensors.values())]))
        if any(map(is_shard, models)):  # all ranks then decide alike
            values = self.world.gather(values)
        return hashlib.sha256(json.dumps([states, settings, values]).encode()).hexdigest()

    def find_differing_state(self, state: State) -> str:
        """Return the class of an object whose state in `state` differs between ranks, or "" (*collective*)."""
        if self.world.size == 1:
            return ""
        digests = [
            [
                hashlib.sha256(json.dumps(packed).encode()).hexdigest(),
                *(int(digest([state.tensors[name]])) for name in names_in(packed)),
            ]
            for packed in state.meta.get("others", [])
        ]
        for of_rank in self.world.gather(digests) if digests else []:
            for item, digest_here, digest_there in zip(self.stateful_objects, digests, of_rank, strict=True):
                if digest_here != digest_there:
                    return type(item).__name__
        return ""

    def compare_restored(self, state: State) -> Iterator[str]:
        """Yield a sentence per model or object of which a copy that loads `state`, just saved, differs from it."""
        extra = unpack(state.meta["extra"], state.tensors) or {}
        models = {name: (model, state.part(name), extra.get(name)) for name, model in self.groups.items()}
        saved = [unpack(item, state.tensors) for item in state.meta.get("others", [])]
        return describe_differences(models, list(zip(self.stateful_objects, self._fresh, saved, strict=False)))

    def load(self, state: State) -> None:
        """Restore `state` in place. Raises `RequestError` for a state of other parts or other data."""
        if state.meta["is_recipe"] != self.is_recipe:
            program = "a session in a script or of --step" if self.is_recipe else "lockstep train"
            raise RequestError(f"{shown(state.origin)} is a checkpoint of {program}; this run cannot continue it.")
        self._check_data(state)
        self.load_weights(state)
        self._check_parts(state)
        for optimizer, saved in zip(self.optimizers, state.meta["optimizers"], strict=True):
            loaded = unpack(saved, state.tensors)
            if self.is_recipe:  # settings follow from the config and the step
                loaded["param_groups"] = [
                    saved_group | {key: value for key, value in group.items() if key != "params"}
                    for saved_group, group in zip(loaded["param_groups"], optimizer.param_groups, strict=True)
                ]
            parameters = parameters_of(optimizer)
            loaded["state"] = {
                index: entries
                for index, entries in loaded["state"].items()
                if not isinstance(index, int) or self.exchange.owns(parameters[index])
            }
            load_optimizer(optimizer, loaded)
        if not self.is_recipe:
            self._note_restored_settings(state)
        self.exchange.load_state(state.part("exchange"))
        for item, saved in zip(self.stateful_objects, state.meta["others"], strict=True):
            item.load_state_dict(unpack(saved, state.tensors))
        gradients = state.part("gradients")
        for name, parameter in self._all.named_parameters() if gradients else ():
            if name in gradients:
                parameter.grad = laid_out_as(parameter, shard_as(parameter, gradients[name].to(parameter.device)))

    def load_weights(self, state: State) -> None:
        """Load only the models and averages. Raises `RequestError` for tensors that do not fit."""
        with understanding(state.origin or Path("the checkpoint")), self.exchange.whole_state(()):
            for name, model in self.groups.items():
                extra = unpack(state.meta["extra"], state.tensors) if state.meta.get("extra") else {}
                add_buffers(model, state.part(name), state.meta.get("buffers", {}).get(name, {}))
                load_model(model, state.part(name), extra.get(name))

    def _check_data(self, state: State) -> None:
        """Raise `RequestError` if sample order or batch statistics would change, or what an exchange owes be lost."""
        current, saved = self._facts(), state.meta
        if state.part("exchange") and (exchange := saved["exchange"]) != current["exchange"]:
            raise RequestError(
                f"{shown(state.origin)} holds the state of --exchange {exchange}, which this run cannot continue; give "
                f"--exchange {exchange} and several ranks, or begin a new run with its weights."
            )
        for label, key in (("samples in the training set", "samples"), ("samples in a global batch", "batch")):
            # A loop that makes its loader within an epoch has none yet.
            if saved[key] != current[key] and self.source is not None:
                raise RequestError(
                    f"{shown(state.origin)} was trained with {saved[key]} {label}, and this run has {current[key]}, "
                    "which changes the order; give it the same data, or start a new run in another --output."
                )
        saved_content, content = (facts["contents"].get("train") for facts in (saved, current))
        if saved_content and content and is_changed(saved_content, content):
            raise RequestError(
                f"{shown(state.origin)} was trained with other samples or labels, or in another order, than --data "
                f"{self.config.data.name} now gives; give it the same data, or begin a new run with its weights by "
                f"--init-from {shown(state.origin)} in place of --resume."
            )
        kinds = [
            f"local, of {facts['replicas']} replicas" if facts["batchnorm"] == "local" else facts["batchnorm"]
            for facts in (saved, current)
        ]
        if kinds[0] != kinds[1]:
            raise RequestError(
                f"The checkpoint was trained with batch statistics {kinds[0]}, and this run would use {kinds[1]}, "
                "which changes the model; continue with the same --strategy, --batchnorm and --devices."
            )

    def _kinds(self) -> list[list[Any]]:
        """Return each optimizer's class and number of parameter groups."""
        return [[type(optimizer).__name__, len(optimizer.param_groups)] for optimizer in self.optimizers]

    def _orders(self) -> list[list[str]]:
        """Return the names of each optimizer's parameters, in its order."""
        names = {parameter: name for name, parameter in self._all.named_parameters()}
        return [[names.get(parameter, "") for parameter in parameters_of(optimizer)] for optimizer in self.optimizers]

    def _check_parts(self, state: State) -> None:
        """Raise `RequestError` unless the optimizers and other objects are of the saved kinds and number."""
        saved, current = (
            f"{', '.join(f'{name} (parameter groups: {groups})' for name, groups in kinds)} and {count} schedules "
            "or other objects"
            for kinds, count in (
                (state.meta["kinds"], len(state.meta["others"])),
                (self._kinds(), len(self.stateful_objects)),
            )
        )
        if saved != current:
            raise RequestError(
                f"{shown(state.origin)} was trained with {saved}, and session.prepare was given {current}; give it "
                "the same, or start a new run in another output."
            )
        for was, now in zip(chain(*state.meta["orders"]), chain(*self._orders()), strict=True):
            if was != now:
                raise RequestError(
                    f"{shown(state.origin)} has the state of an optimizer for {was} where that of session.prepare has "
                    f"{now}: give it its parameters in the same order, from a list rather than a set."
                )

    def _note_restored_settings(self, state: State) -> None:
        """Note the numeric settings of optimizers that the checkpoint has replaced."""
        requested, self._settings = self._settings, state.meta["made"]
        groups = zip(chain.from_iterable(self._settings), chain.from_iterable(requested), strict=True)
        for saved, current in groups:
            replaced = {key: value for key, value in current.items() if saved.get(key, value) != value}
            self.restored_settings |= {f"{key} {saved[key]}, not {value}" for key, value in replaced.items()}

    def remedy(self) -> str:
        """Return advice on non-finite numbers, with the last checkpoint if any."""
        folder = self.config.record.output
        has_checkpoint = folder is not None and find(folder) is not None
        hint = f"; the last checkpoint in {shown(folder)} is from before" if has_checkpoint else ""
        if not self.is_recipe:
            return (
                "Lower the learning rate, clip the gradients, or warm up; a mean over no label is 0/0, as where all of "
                f"a share's are ignored: give session.backward weight=, the number that count{hint}."
            )
        return (
            f"Lower the learning rate (--lr), clip the gradients (--clip), warm up (--warmup) or compute in fp32{hint}."
        )


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the numeric settings of each parameter group."""
    return [
        {key: value for key, value in group.items() if isinstance(value, int | float)}
        for group in optimizer.param_groups
    ]

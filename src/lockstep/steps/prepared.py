"""All that a session trains: what of it checkpoints hold, and what has to be the same on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import find
from ..checkpoint.state import State, load_model, load_optimizer, model_tensors, optimizer_state
from ..checks import finite
from ..config.schema import RunConfig
from ..errors import RequestError
from ..files import shown
from ..nn import sync_batchnorm
from ..world.world import World

if TYPE_CHECKING:
    from ..strategies.base import Strategy
    from ..training.optim import Average
    from .loop import Source

_OWN = "own"
"""The group of the tensors in the states of schedules and of the user's own objects."""


class Prepared:
    """Models, optimizers, and other objects with `state_dict` and `load_state_dict`, in the order of their coming.

    Methods marked *collective* are called by every rank.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self.models: dict[str, nn.Module] = {}
        """By the name of their group of tensors: model, model_2, …"""
        self.optimizers: list[Optimizer] = []
        self.others: list[Any] = []
        self.strategy: Strategy | None = None
        """What exchanges gradients while the backward pass runs; None where a session does so after it."""
        self.replica: nn.Module | None = None
        """What the strategy has made of the model."""
        self.average: Average | None = None
        self.batchnorm = "none"
        self.source: Source | None = None
        """By whose batches steps are counted."""
        self.kept: list[str] = []
        """The numbers of the script's optimizers that a checkpoint has replaced, in words."""
        self._config, self._world = config, world
        self._made: list[list[dict[str, Any]]] = []
        """The numbers that each optimizer's groups were made with, such as the learning rate."""

    def add_model(self, model: nn.Module) -> None:
        """Take in `model`."""
        number = len(self.models) + 1
        self.models["model" if number == 1 else f"model_{number}"] = model

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices that this process computes on."""
        return [self._world.device] if self.strategy is None else self.strategy.devices

    @property
    def replicas(self) -> int:
        """Copies of the model that share out a micro-batch."""
        return self._world.size * len(self.devices)

    @property
    def _all(self) -> nn.Module:
        """One module of all: a single model is itself, so that its parameters have the names that the user knows."""
        return next(iter(self.models.values())) if len(self.models) == 1 else nn.ModuleDict(self.models)

    @property
    def _groups(self) -> dict[str, nn.Module]:
        return self.models if self.average is None else self.models | {"ema": self.average.module}

    def begin(self) -> None:
        """Note what was prepared, and have what optimizers hold lie beside the parameters, which may have moved since.

        Raises `RequestError` where an optimizer has parameters of no prepared model.
        """
        self._made = [
            [{key: value for key, value in group.items() if isinstance(value, int | float)} for group in each]
            for each in (optimizer.param_groups for optimizer in self.optimizers)
        ]
        known = {parameter for model in self.models.values() for parameter in model.parameters()}
        for number, optimizer in enumerate(self.optimizers, start=1):
            strange = [each for group in optimizer.param_groups for each in group["params"] if each not in known]
            if strange:
                raise RequestError(
                    f"Optimizer {number} of session.prepare has {len(strange)} parameters of no prepared model (the "
                    f"first: shape {tuple(strange[0].shape)}): give prepare the model that it was made from, and make "
                    "the optimizer after the last change of that model's layers."
                )
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, model in self._groups.items():
            yield from ((f"{name}/{key}", held) for key, held in model.named_parameters())

    def _statistics(self) -> Iterator[tuple[str, Tensor]]:
        for name, model in self._groups.items():
            yield from ((f"{name}/{key}", held) for key, held in sync_batchnorm.statistics(model).items())

    def replicated(self) -> dict[str, Tensor]:
        """Return, by name, what has to be the same bits on every rank at the end of a step.

        That is no business of statistics which each rank takes over its own samples: an evaluation takes rank 0's.
        """
        found = dict(self._weights()) | optimizer_state(self._all, self.optimizers).tensors
        return found | dict(self._statistics()) if self.batchnorm == "sync" else found

    def local_buffers(self) -> dict[str, Tensor]:
        """Return, by name, the models' buffers that each rank keeps for itself."""
        shared = dict(self._statistics()) if self.batchnorm == "sync" else {}
        return {
            f"{name}/{key}": held
            for name, model in self.models.items()
            for key, held in model.named_buffers()
            if f"{name}/{key}" not in shared
        }

    def copies(self) -> Sequence[Mapping[str, Tensor]]:
        """Return the weights as further devices of this process have them."""
        return [] if self.strategy is None else self.strategy.copies(self._all)

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint says of how batches were shared out."""
        source = self.source
        return {
            "batchnorm": self.batchnorm,
            "replicas": self.replicas,
            "accumulation": 1 if source is None else source.plan.accumulation,
            "batch": 0 if source is None else source.plan.global_size,
            "samples": 0 if source is None else source.samples or 0,
        }

    def state(self, step: int) -> State:
        """Return all that a checkpoint holds: rank 0's, and every rank's but for local buffers (*collective*).

        Raises `RunError`, on every rank, where weights or statistics are not finite on any of them: of the buffers,
        others, such as a mask, may be infinite by intent.
        """
        if names := finite.found(self._world, dict(self._weights()) | dict(self._statistics())):
            raise finite.error(step, names, self.remedy())
        held = optimizer_state(self._all, self.optimizers)
        tensors = dict(held.tensors)
        for name, model in self._groups.items():
            tensors |= model_tensors(model, under=name)
        meta = held.meta | self.facts()
        if self.strategy is None:  # else settings follow from the config and the step
            meta["groups"] = [
                [{key: _packed(value, tensors) for key, value in group.items() if key != "params"} for group in each]
                for each in (optimizer.param_groups for optimizer in self.optimizers)
            ]
            meta["others"] = [_packed(each.state_dict(), tensors) for each in self.others]
            meta |= {"made": self._made, "kinds": [type(each).__name__ for each in self.optimizers]}
        return State(tensors, meta)

    def load(self, state: State) -> None:
        """Continue from `state`, in place.

        Raises `RequestError` where it is of other models, optimizers or objects, or of other data.
        """
        meta, now = state.meta, self.facts()
        if ("groups" in meta) != (self.strategy is None):
            whose = "lockstep train" if self.strategy is None else "a loop or a step of your own"
            raise RequestError(f"{shown(state.origin)} is a checkpoint of {whose}, which this run cannot go on from.")
        for what, key in (("samples in the training set", "samples"), ("samples in a global batch", "batch")):
            if meta.get(key, now[key]) != now[key]:
                raise RequestError(
                    f"{shown(state.origin)} was trained with {meta[key]} {what}, and here are {now[key]}: its order "
                    "would be another; give it the same data, or start a new run in another --output."
                )
        _check_batchnorm(meta, now)
        for name, model in self._groups.items():
            load_model(model, state.part(name))
        if self.strategy is None:
            self._check_kinds(state)
        load_optimizer(self._all, self.optimizers, state)
        if self.strategy is None:
            self._load_settings(state)

    def _check_kinds(self, state: State) -> None:
        for what, ours, theirs in (
            ("optimizers", len(self.optimizers), len(state.meta["groups"])),
            ("schedules and objects of your own", len(self.others), len(state.meta["others"])),
        ):
            if ours != theirs:
                raise RequestError(
                    f"The checkpoint has {theirs} {what}, and session.prepare was given {ours}; give it the same ones."
                )
        kinds = [type(each).__name__ for each in self.optimizers]
        if (saved := state.meta.get("kinds", kinds)) != kinds:
            raise RequestError(
                f"{shown(state.origin)} was trained with {', '.join(map(str, saved))}, and session.prepare was given "
                f"{', '.join(kinds)}; give it the same, or start a new run in another output."
            )

    def _load_settings(self, state: State) -> None:
        own = state.part(_OWN)
        for optimizer, groups in zip(self.optimizers, state.meta["groups"], strict=True):
            if len(groups) != len(optimizer.param_groups):
                raise RequestError(
                    f"The checkpoint's optimizer has {len(groups)} groups of parameters, and this one "
                    f"{len(optimizer.param_groups)}; make it as it was."
                )
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update({key: _unpacked(value, own) for key, value in saved.items()})
        made = state.meta.get("made", self._made)
        self.kept, self._made = _other_numbers(made, self._made), made
        for each, saved in zip(self.others, state.meta["others"], strict=True):
            each.load_state_dict(_unpacked(saved, own))

    def remedy(self) -> str:
        """Return what to do about numbers that are not finite, and where the run can be taken up again."""
        folder = self._config.record.output
        is_kept = folder is not None and find(folder) is not None
        kept = f"; the last checkpoint in {shown(folder)} is from before" if is_kept else ""
        return (
            f"Lower the learning rate (--lr), clip the gradients (--clip), warm up (--warmup) or compute in fp32{kept}."
        )


def _check_batchnorm(meta: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise `RequestError` if batch statistics would be taken over other samples than before: another model."""
    kinds = [(each["batchnorm"], each["replicas"] if each["batchnorm"] == "local" else 0) for each in (meta, now)]
    if kinds[0] != kinds[1]:
        words = [f"{kind} of {count} replicas" if count else kind for kind, count in kinds]
        raise RequestError(
            f"The checkpoint was trained with batch statistics {words[0]}, and this run would take {words[1]}, which "
            "is another model; continue with --strategy, --batchnorm and --devices as they were."
        )


def _other_numbers(saved: Any, asked: list[list[dict[str, Any]]]) -> list[str]:
    """Return, in words, what a checkpoint's optimizers were made with that those of the script are not, each once."""
    found = {
        f"{key} {theirs.get(key)}, not {value}"
        for groups, own in zip(saved, asked, strict=True)
        for theirs, ours in zip(groups, own, strict=True)
        for key, value in ours.items()
        if theirs.get(key, value) != value
    }
    return sorted(found)


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return plain data as JSON holds it; its tensors go to `tensors`. What is no plain data raises `RequestError`."""
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
        f"A state_dict() given to session.prepare holds a {type(value).__name__}, and checkpoints hold no pickles: put "
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


def as_float32(value: Any) -> Any:
    """Return what a model has put out, its half-precision tensors as float32, at any depth of lists and dicts."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):
        for key in value:  # in place: a model's own type of output, such as a dataclass that is a dict, stays
            value[key] = as_float32(value[key])
        return value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(as_float32(each) for each in value)
    return value

"""All that a session was given to train with: what of it checkpoints hold, and what has to be the same on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .batching import BatchPlan
from .config import RunConfig
from .data.share import SharedLoader
from .errors import RequestError, counted
from .files import shown
from .meter import NonFiniteLossError
from .nn import sync_batchnorm
from .precision import Precision
from .progress import Progress
from .state import State, load_model, load_optimizer, model_tensors, optimizer_state
from .world import World

if TYPE_CHECKING:
    from .loop import Loop

_OWN = "own"
"""The group of the tensors in the states of schedules and of the user's own objects."""


class Prepared:
    """Models, optimizers, and other objects with `state_dict` and `load_state_dict`, in the order of their coming."""

    takes_sums = is_scored = False

    def __init__(
        self, config: RunConfig, world: World, precision: Precision, tests: Callable[[], dict[str, Any]] = dict
    ) -> None:
        """`tests()` is called once the run has come to its end (*collective*), for what its result is to hold."""
        self.batchnorm = "none"
        self.devices = [world.device]
        self._config, self._world, self._precision, self._tests = config, world, precision, tests
        self._plan: BatchPlan | None = None
        self._samples = 0
        self._visits: dict[str, Any] = {}
        self._made: list[list[dict[str, Any]]] = []
        """The numbers that each optimizer's groups were made with, such as the learning rate."""
        self._kept: list[str] = []
        """Those that a checkpoint has replaced, in words."""
        self.models: dict[str, nn.Module] = {}
        """By the name of their group of tensors: model, model_2, …"""
        self.optimizers: list[Optimizer] = []
        self.others: list[Any] = []

    def add_model(self, model: nn.Module) -> None:
        """Take in `model`."""
        number = len(self.models) + 1
        self.models["model" if number == 1 else f"model_{number}"] = model

    @property
    def _all(self) -> nn.Module:
        """One module of all: a single model is itself, so that its parameters have the names that the user knows."""
        return next(iter(self.models.values())) if len(self.models) == 1 else nn.ModuleDict(self.models)

    def begin(self, source: SharedLoader | None) -> None:
        """Note what was prepared, and have what optimizers hold lie beside the parameters, which may have moved since.

        Raises `RequestError` where an optimizer has parameters of no prepared model.
        """
        if source is not None:
            self._plan, self._samples = source.plan, source.samples or 0
            self._visits = {"order": source.order, "drop-last": source.drop_last}
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

    def replicated(self) -> dict[str, Tensor]:
        """Return, by name, what has to be the same bits on every rank at the end of a step."""
        found = dict(optimizer_state(self._all, self.optimizers).tensors)
        for name, model in self.models.items():
            found |= {f"{name}/{key}": held for key, held in model.named_parameters()}
            found |= {f"{name}/{key}": held for key, held in _synchronised(model).items()}
        return found

    def local_buffers(self) -> dict[str, Tensor]:
        """Return, by name, the models' buffers that each rank keeps for itself."""
        return {
            f"{name}/{key}": held
            for name, model in self.models.items()
            for key, held in model.named_buffers()
            if key not in _synchronised(model)
        }

    def copies(self) -> list[Mapping[str, Tensor]]:
        """A session computes on one device."""
        return []

    def state(self, progress: Progress) -> State:
        """Return this rank's own state: every rank's, but for buffers and what the user's own objects hold."""
        held = optimizer_state(self._all, self.optimizers)
        tensors = dict(held.tensors)
        for name, model in self.models.items():
            tensors |= model_tensors(model, under=name)
        groups = [
            [{key: _packed(value, tensors) for key, value in group.items() if key != "params"} for group in each]
            for each in (optimizer.param_groups for optimizer in self.optimizers)
        ]
        others = [_packed(each.state_dict(), tensors) for each in self.others]
        facts = {
            "batchnorm": self.batchnorm,
            "replicas": self._world.size,
            "accumulation": 1 if self._plan is None else self._plan.accumulation,
            "batch": self._batch,
            "samples": self._samples,
        }
        facts["kinds"] = [type(each).__name__ for each in self.optimizers]
        return State(tensors, held.meta | facts | {"groups": groups, "others": others, "made": self._made})

    @property
    def _batch(self) -> int:
        return 0 if self._plan is None else self._plan.global_size

    def load(self, state: State) -> None:
        """Continue from `state`, in place.

        Raises `RequestError` where it is of other models, optimizers or objects, or of other data.
        """
        if "groups" not in state.meta:
            raise RequestError(f"{shown(state.origin)} is no checkpoint of a session's loop, but of lockstep train.")
        for what, before, now in (
            ("samples in the training set", state.meta["samples"], self._samples),
            ("samples in a global batch", state.meta["batch"], self._batch),
        ):
            if before != now:
                raise RequestError(
                    f"{shown(state.origin)} was trained with {before} {what}, and here are {now}: its order would be "
                    "another; give it the same data, or start a new run in another output."
                )
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
        for name, model in self.models.items():
            load_model(model, state.part(name))
        load_optimizer(self._all, self.optimizers, state)
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
        self._kept, self._made = _other_numbers(made, self._made), made
        for each, saved in zip(self.others, state.meta["others"], strict=True):
            each.load_state_dict(_unpacked(saved, own))

    def told(self, progress: Progress) -> dict[str, Any]:
        """Return what the record says of the session when its loop begins."""
        parallel, world = self._config.parallel, self._world
        lines = [counted(world.size, "rank") if self._plan is None else str(self._plan)]
        if self.batchnorm == "local" and world.size > 1:
            lines.append("batch statistics are each rank's own (batchnorm local): the model depends on their number")
        if progress.origin is not None:
            lines.append(f"continuing at step {progress.step:,}, from {shown(progress.origin)}")
        if self._config.record.output is None:
            lines.append(
                "nothing is recorded or saved: lockstep.session(output=…), or lockstep run, has a folder for it"
            )
        if self._kept:
            lines.append(
                f"the optimizer goes on as it was saved: {'; '.join(self._kept)}; start a new run to change it"
            )
        chosen = {
            "loop": "own",
            "launcher": parallel.launcher,
            "accelerator": world.device.type,
            "devices": world.size,
            "precision": self._precision.name,
            "collectives": "none" if world.size == 1 else "gloo" if world.memory is None else "shared-memory",
            "batchnorm": self.batchnorm,
            "accumulate": 1 if self._plan is None else self._plan.accumulation,
            "ledger": self._config.proof.ledger,
            "optimizer": ", ".join(
                f"{type(each).__name__} lr {each.param_groups[0]['lr']:g}" for each in self.optimizers
            ),
            **self._visits,
        }
        return {"lines": lines, "chosen": chosen}

    def result(self, loop: Loop) -> dict[str, Any]:
        """Return what the loop has come to."""
        meter, progress = loop.meter, loop.progress
        return {
            "steps": progress.step,
            "epoch_s": list(progress.epoch_s),
            "samples_per_s": meter.images / meter.train_s if meter.images else None,
            "data_wait_s": meter.wait_s,
            "output": shown(self._config.record.output),
            "exit": 0,
            **self._tests(),
        }

    def remedy(self) -> str:
        """Return what to do about numbers that are not finite."""
        return "Lower the learning rate, clip the gradients, or compute in fp32."

    def note_bad(self, bad: NonFiniteLossError) -> str:
        """Which samples they are, the loop's own data know."""
        return ""


def _synchronised(model: nn.Module) -> dict[str, Tensor]:
    is_sync = any(isinstance(each, sync_batchnorm.SyncBatchNorm) for each in model.modules())
    return sync_batchnorm.statistics(model) if is_sync else {}


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
    items: Iterable[Any] = [[_unpacked(part, own) for part in each] for each in held] if kind in _PAIRS else ()
    if kind in _PAIRS:
        return _PAIRS[kind]((key, item) for key, item in items)
    return (list if kind == "list" else tuple)(_unpacked(item, own) for item in held)


def _counter(pairs: Iterable[tuple[Any, Any]]) -> Counter[Any]:
    return Counter(dict(pairs))


_PAIRS: dict[str, Any] = {"dict": dict, "counter": _counter}


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

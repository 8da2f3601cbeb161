"""Hooks in the processes of an audited script, which knows nothing of them.

A *window* is what happens up to one optimizer step. `recorder.py` saves what a rank does in the first windows, and
`replayer.py` has one process do it again. What comes after the windows is the *tail*: loaders of steps end at once, so
that an epoch's end, an evaluation, a checkpoint and the next epoch come soon.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from .._torch import TorchDispatchMode, arguments
from . import BEGUN, VARIABLE, recording

TAIL_S, TAIL_STEPS = 30.0, 4
"""Longest time of a tail, in seconds, and its optimizer steps: of batches that were read ahead."""
_LOCKSTEP = f"{Path(__file__).parents[1]}{os.sep}"
_CHANGES = {"open": 0, "os.rename": 1, "os.remove": 0, "shutil.copyfile": 1, "shutil.move": 1}
"""Events of Python's audit hooks that change a file, and which argument names it."""
_REDUCED = 16  # values of a tensor that an evaluation reduces, at most


class Modules:
    """Outermost modules in the order of their first call while gradients are computed, and the optimizers."""

    def __init__(self) -> None:
        self.depth = 0
        self.roots: list[nn.Module] = []
        self.others: list[nn.Parameter] = []
        """Parameters of optimizers that no module has."""
        self.optimizers: list[Optimizer] = []
        self.is_coarse = False

    def add_root(self, module: nn.Module) -> bool:
        """Take in a module with parameters that are not known; return whether it has any."""
        known = {parameter for root in self.roots for parameter in root.parameters()}
        if all(not each.requires_grad or each in known for each in module.parameters()):
            return False
        self.roots.append(module)
        return True

    def add(self, optimizer: Optimizer) -> int:
        """Take in an optimizer's parameters; return its number."""
        if not any(optimizer is each for each in self.optimizers):
            self.optimizers.append(optimizer)
            known = {parameter for root in self.roots for parameter in root.parameters()} | {*self.others}
            self.others += [parameter for parameter in _held(optimizer) if parameter not in known]
        return next(number for number, each in enumerate(self.optimizers) if each is optimizer)

    def tensors(self) -> list[list[Tensor]]:
        """Return parameters and buffers of each root, and last the parameters of none."""
        return [*([*root.parameters(), *root.buffers()] for root in self.roots), [*self.others]]

    def names(self) -> list[list[str]]:
        """Return the parameters' names, as `gradients` has them."""
        others = [f"parameter {number} of no module" for number in range(len(self.others))]
        return [*([name for name, _ in root.named_parameters()] for root in self.roots), others]

    def gradients(self, optimizer: Optimizer, before: dict[int, Tensor] | None = None) -> list[list[Tensor | None]]:
        """Return the gradients of the optimizer's parameters, or what they were `before`; None for others."""
        held = {id(each) for each in _held(optimizer)}
        parameters = [*([*root.parameters()] for root in self.roots), self.others]

        def gradient(parameter: nn.Parameter) -> Tensor | None:
            if id(parameter) not in held or parameter.grad is None:
                return None
            return parameter.grad.detach().clone() if before is None else before.get(id(parameter), parameter.grad)

        return [[gradient(each) for each in root] for root in parameters]


def _held(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees results of random operators, and may replace them."""

    def __init__(self, see: Callable[[Tensor, bool, bool], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self.is_hidden = False
        """Whether draws were made that are no operator's result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_filled = bool(args) and found is args[0]
        if torch.Tag.nondeterministic_seeded not in func.tags or (is_filled and isinstance(found, nn.Parameter)):
            return found  # what a parameter begins with is recorded as a weight
        if not isinstance(found, tuple | list):
            return self._see(found, not is_filled, "randperm" in func.name())
        if func is torch.ops.aten.native_dropout.default and args[2]:
            mask = self._see(found[1], False, False)
            return args[0] * mask / (1 - args[1]), mask
        names = [each.name for each in arguments(func)]
        if "dropout_p" in names:  # of attention, whose draws are hidden
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.is_hidden |= bool(given.get("dropout_p"))
        return found


class Observer(ABC):
    """What recording and replaying share."""

    def __init__(self, folder: Path, dtype: torch.dtype | None) -> None:
        self.folder, self.dtype, self.modules = folder, dtype, Modules()
        self.step = 0
        self.facts: dict[str, Any] = {"lengths": {}, "reductions": [], "saves": [], "collectives": 0, "gathers": False}
        self.is_evaluating = False
        self.is_tail = False
        self.inputs: list[bytes] = []
        self.unclipped: dict[int, Tensor] = {}
        """Gradients before they were clipped, by their parameters' id."""
        self.schedule_steps = 0
        self.calls = 0
        """Of outermost modules whose gradients are computed, in this window."""
        self.loaders: list[DataLoader[Any]] = []
        self._iterations: dict[int, int] = {}
        self.made = 0
        """Optimizers that were made."""
        self.final: list[list[Tensor]] = []
        """Weights and buffers at the tail's begin."""
        self._tail_steps = 0
        self._mode: _Draws | None = None
        self._stepping = 0
        self._needs_input = False

    def install(self) -> None:
        """Set the hooks."""
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        nn.modules.module.register_module_forward_pre_hook(self._enter)
        nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._after_step(optimizer))
        self._watch_loaders()
        self._watch_collectives()
        self._watch_files()
        self._watch_clipping()
        self._watch_schedules()
        atexit.register(self.write_facts)
        plain = Optimizer.__init__

        @functools.wraps(plain)
        def made(optimizer: Any, *args: Any, **options: Any) -> None:
            plain(optimizer, *args, **options)
            self.made += 1
            self.begin_draws()

        Optimizer.__init__ = made  # type: ignore[method-assign, assignment]

    def begin_draws(self) -> None:
        """Watch random draws from now on, in this thread."""
        if self._mode is None:
            self._mode = _Draws(self.see_draw)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def begin_tail(self) -> None:
        """Let the script come to its epoch's end, for a limited time."""
        self.is_tail = True
        self.final = [[each.detach().clone() for each in root] for root in self.modules.tensors()]
        timer = threading.Timer(TAIL_S, self.end)
        timer.daemon = True
        timer.start()

    def end_step_of_tail(self) -> None:
        """Undo the step of a batch that was read ahead."""
        self._tail_steps += 1
        if self._tail_steps > TAIL_STEPS:
            self.end()
        self.set_weights(self.final)

    def set_weights(self, values: list[list[Tensor]], only: int | None = None) -> None:
        """Put weights and buffers of all outermost modules in place, or of one."""
        for number, (tensors, saved) in enumerate(zip(self.modules.tensors(), values, strict=False)):
            if only in (None, number):
                with torch.no_grad():
                    if [tensor.shape for tensor in tensors] != [value.shape for value in saved]:
                        (self.folder / recording.REFUSED).write_text("in one process it makes a model of another shape")
                        self.end()
                    for tensor, value in zip(tensors, saved, strict=True):
                        if not torch.equal(tensor, value):  # a graph that is still needed may hold it
                            tensor.copy_(value)

    def end(self) -> None:
        """End this process and its data workers."""
        self.write_facts()
        for child in multiprocessing.active_children():
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)

    def number_of(self, loader: DataLoader[Any]) -> int:
        """Return a loader's number in the order of creation."""
        return next(number for number, each in enumerate(self.loaders) if each is loader)

    def _watch_loaders(self) -> None:
        begin, iterate, length, observer = DataLoader.__init__, DataLoader.__iter__, DataLoader.__len__, self

        @functools.wraps(begin)
        def made(loader: DataLoader[Any], *args: Any, **options: Any) -> None:
            begin(loader, *args, **options)
            observer.loaders.append(loader)

        @functools.wraps(iterate)
        def iterated(loader: DataLoader[Any]) -> Iterator[Any]:
            if torch.utils.data.get_worker_info() is not None or not any(loader is each for each in observer.loaders):
                return iter(iterate(loader))
            number = observer.number_of(loader)
            iteration = observer._iterations[number] = observer._iterations.get(number, -1) + 1
            observer.begin_draws()
            return observer.batches(number, iteration, loader, lambda: iter(iterate(loader)))

        @functools.wraps(length)
        def counted(loader: DataLoader[Any]) -> int:
            return observer.length(loader, lambda: length(loader))

        DataLoader.__init__ = made  # type: ignore[method-assign, assignment]
        DataLoader.__iter__ = iterated  # type: ignore[method-assign, assignment]
        DataLoader.__len__ = counted  # type: ignore[method-assign]

    def _watch_collectives(self) -> None:
        observer = self

        def watched(plain: Any, is_sum: bool) -> Any:
            @functools.wraps(plain)
            def call(*args: Any, **options: Any) -> Any:
                tensors = [each for each in (*args, *options.values()) if isinstance(each, Tensor)]
                values = tensors[0] if tensors else None
                if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
                    observer.facts.setdefault("cut", users_place())
                found = plain(*args, **options)
                if observer.is_evaluating and not options.get("async_op"):
                    observer.facts["collectives"] += 1
                    if is_sum and values is not None and values.numel() <= _REDUCED:
                        reduced = {"place": users_place(), "values": values.detach().double().flatten().tolist()}
                        observer.facts["reductions"].append(reduced)
                return found

            return call

        for name in ("all_reduce", "reduce"):
            setattr(dist, name, watched(getattr(dist, name), is_sum=True))
        for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object"):
            setattr(dist, name, watched(getattr(dist, name), is_sum=False))

    def _watch_files(self) -> None:
        """Leave the user's files as they are: one that torch.save would overwrite goes to the audit's folder.

        torch.load finds it there. A new file is written, and removed after the audit (see `start.remove_made`).
        """
        save, load, folder = torch.save, torch.load, self.folder / "saved"

        @functools.wraps(save)
        def saved(values: Any, f: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(f, str | os.PathLike):
                return save(values, f, *args, **options)
            path = Path(f).resolve()
            kept = folder / recording.key(path)
            if not self.is_tail or not any(each["path"] == str(path) for each in self.facts["saves"]):
                self.facts["saves"].append({"path": str(path), "place": users_place()})
            folder.mkdir(exist_ok=True)
            if not path.exists() or recording.is_made(kept):
                recording.make(kept, path)
                return save(values, f, *args, **options)
            recording.save(values, kept)
            return None

        @functools.wraps(load)
        def loaded(f: Any, *args: Any, **options: Any) -> Any:
            if isinstance(f, str | os.PathLike):
                kept = folder / recording.key(Path(f).resolve())
                f = kept if kept.exists() and not recording.is_made(kept) else f
            return load(f, *args, **options)

        torch.save, torch.load = saved, loaded  # type: ignore[assignment]
        begun_s, is_ending = (self.folder / BEGUN).stat().st_mtime, False

        def watch(event: str, args: tuple[Any, ...]) -> None:
            nonlocal is_ending
            if not self.is_tail or is_ending or event not in _CHANGES:
                return
            if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
                return
            target = args[_CHANGES[event]]
            with contextlib.suppress(OSError, TypeError, ValueError):
                if event == "shutil.copyfile" and not Path(target).exists():
                    recording.make(folder / recording.key(Path(target).resolve()), Path(target).resolve())
                if Path(target).is_file() and Path(target).stat().st_mtime < begun_s:
                    is_ending = True
                    self.end()

        sys.addaudithook(watch)  # an evaluation is over: a file of the user's is about to change

    def _watch_clipping(self) -> None:
        """Keep gradients as they were: clipped ones hide a wrong count."""
        plain, observer = nn.utils.clip_grad_norm_, self

        @functools.wraps(plain)
        def clipped(parameters: Any, *args: Any, **options: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else [*parameters]
            observer.unclipped |= {id(each): each.grad.detach().clone() for each in given if each.grad is not None}
            return plain(given, *args, **options)

        nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = clipped

    def _watch_schedules(self) -> None:
        """Count the steps of torch's schedules."""
        depth, observer = 0, self

        def watched(plain: Any) -> Any:
            @functools.wraps(plain)
            def step(*args: Any, **options: Any) -> Any:
                nonlocal depth
                depth += 1
                observer.schedule_steps += depth == 1  # a schedule of schedules steps once
                try:
                    return plain(*args, **options)
                finally:
                    depth -= 1

            return step

        for kind in vars(torch.optim.lr_scheduler).values():
            if isinstance(kind, type) and "step" in vars(kind):
                kind.step = watched(kind.step)  # type: ignore[attr-defined]

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        modules = self.modules
        if not modules.depth:
            is_training = torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters())
            if is_training and not any(module is each for each in modules.roots):
                is_training = modules.add_root(module)
                if is_training:
                    self.see_root(len(modules.roots) - 1)
            self.is_evaluating = not torch.is_grad_enabled() or not module.training
            if is_training:
                number = next(number for number, each in enumerate(modules.roots) if each is module)
                kinds = {parameter.dtype for parameter in module.parameters()}
                is_cast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
                modules.is_coarse |= is_cast or bool(kinds & {torch.bfloat16, torch.float16})
                self._needs_input = True
                self.calls += 1
                self.see_call(number, module)
        modules.depth += 1
        if self._needs_input and inputs and isinstance(inputs[0], Tensor):  # of the innermost, where others take names
            self._needs_input = False
            self.inputs += digests([inputs[0]])
        self.see_module(module)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.modules.depth -= 1

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> Any:
        self._stepping += 1
        if self._stepping > 1:  # of an optimizer within another one
            return None
        closure = options.get("closure") or next((each for each in args[1:] if callable(each)), None)
        if closure is None:
            self.before_step(optimizer)
            return None
        has_begun = False

        def computed(*words: Any) -> Any:  # the gradients are computed within the step, at first or alone
            nonlocal has_begun
            loss = closure(*words)
            if not has_begun:
                has_begun = True
                self.before_step(optimizer)
            return loss

        return (args[0], computed, *args[2:]) if len(args) > 1 else args, options | (
            {"closure": computed} if "closure" in options else {}
        )

    def _after_step(self, optimizer: Optimizer) -> None:
        self._stepping -= 1
        if not self._stepping:
            self.after_step(optimizer)

    @abstractmethod
    def write_facts(self) -> None:
        """Write what is known beside the windows."""

    @abstractmethod
    def batches(self, number: int, iteration: int, loader: DataLoader[Any], plain: Any) -> Iterator[Any]:
        """Yield a loader's batches; `plain()` returns its own iterator."""

    @abstractmethod
    def length(self, loader: DataLoader[Any], plain: Callable[[], int]) -> int:
        """Return the loader's number of batches; `plain()` counts its own."""

    @abstractmethod
    def see_draw(self, result: Tensor, is_new: bool, is_order: bool) -> Tensor:
        """See the result of a random operator; return it, or if it `is_new`, another one of any size.

        `is_order` means that it is a permutation.
        """

    @abstractmethod
    def see_root(self, number: int) -> None:
        """See that a new outermost module is about to be called."""

    def see_call(self, number: int, root: nn.Module) -> None:
        """See that an outermost module is about to be called, whose gradients will be computed."""
        return

    def see_module(self, module: nn.Module) -> None:
        """See that any module is about to be called."""
        return

    @abstractmethod
    def before_step(self, optimizer: Optimizer) -> None:
        """See that an optimizer is about to step."""

    @abstractmethod
    def after_step(self, optimizer: Optimizer) -> None:
        """See that an optimizer has stepped."""


def digests(tensors: list[Tensor]) -> list[bytes]:
    """Return a digest of each sample: of the rows of tensors with the same first dimension n."""
    tensors = [tensor.detach().cpu() for tensor in tensors if tensor.dim()]
    tensors = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
    size = len(tensors[0]) if tensors else 0
    rows = [tensor.reshape(size, -1).contiguous().view(torch.uint8).numpy() for tensor in tensors if tensor.numel()]
    return [hashlib.sha256(b"".join(row[number].tobytes() for row in rows)).digest()[:16] for number in range(size)]


def learning_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def users_place() -> str:
    """Return FILE:LINE of the innermost frame in the user's code; "" without one."""
    from ..monitor.failures import is_library

    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not is_library(file) and not file.startswith(_LOCKSTEP):
            return f"{Path(file).name}:{line}"
    return ""


def install() -> None:
    """Observe this process, as the environment says."""
    from .recorder import Recorder  # late: they import this module
    from .replayer import Replayer

    asked = json.loads(os.environ[VARIABLE])
    folder, dtype = Path(asked["folder"]), torch.float64 if asked.get("float64") else None
    if asked["mode"] == "record":
        Recorder(folder, dtype, asked["steps"]).install()
    else:
        Replayer(folder, dtype, asked["passes"]).install()

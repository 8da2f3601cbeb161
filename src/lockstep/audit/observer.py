"""Hooks in the processes of an audited script, which knows nothing of them.

A *window* is what happens up to one optimizer step. `recorder.py` saves what a rank does in the first windows, and
`replayer.py` has one process do it again. What comes after the windows is the *tail*: loaders of steps end at once, so
that an epoch's end, an evaluation, a checkpoint and the next epoch come soon.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from .._torch import TorchDispatchMode, arguments
from ..world.random_state import device_state
from . import REFUSED, VARIABLE, patches
from .modules import Modules, index_of
from .tensors import hash_samples

TAIL_S, TAIL_STEPS = 30.0, 4
"""Longest time of a tail, in seconds, and its optimizer steps: of batches that were read ahead."""


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees results of random operators, and may replace them."""

    def __init__(self, see: Callable[[Tensor, bool, bool], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self.is_hidden = False
        """Whether draws were made that are no operator's result."""
        self.has_generator = False
        """Whether the present draw is from a generator that the script names."""
        self.state = b""
        """Digest of the present draw's generator before it; b"" if unknown."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        generator = (kwargs or {}).get("generator")
        self.has_generator, self.state = generator is not None, _digest_generator(generator, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        is_filled = bool(args) and result is args[0]
        if is_filled and isinstance(result, nn.Parameter):
            return result  # a parameter's first value is recorded as a weight
        if not isinstance(result, tuple | list):
            return self._see(result, not is_filled, "randperm" in func.name())
        if func is torch.ops.aten.native_dropout.default and args[2]:
            mask = self._see(result[1], False, False)
            return args[0] * mask / (1 - args[1]), mask
        names = [argument.name for argument in arguments(func)]
        values = dict(zip(names, args, strict=False)) | (kwargs or {})
        dropout = values.get("dropout_p") or (values.get("dropout") if values.get("train") else None)
        self.is_hidden |= bool(dropout)  # of attention and of cuDNN's LSTM, whose draws are hidden
        return result


def _digest_generator(generator: torch.Generator | None, args: Any, options: Any) -> bytes:
    """Return a digest of the state of the generator that an operator draws from; b"" if it is unknown."""
    device = next((value.device for value in args if isinstance(value, Tensor)), options.get("device"))
    kind = torch.device(device or "cpu").type
    accelerator = torch.accelerator.current_accelerator()
    if generator is None and kind not in ("cpu", accelerator and accelerator.type):
        return b""
    if generator is not None:
        state = generator.get_state()
    else:
        state = torch.get_rng_state() if kind == "cpu" else device_state(torch.device(device))
    return hashlib.sha256(state.numpy().tobytes()).digest()


class Observer(ABC):
    """What recording and replaying share."""

    def __init__(self, folder: Path, dtype: torch.dtype | None) -> None:
        self.folder, self.dtype, self.modules = folder, dtype, Modules()
        self.step = 0
        self.facts: dict[str, Any] = {"lengths": {}, "reductions": [], "saves": [], "collectives": 0, "gathers": []}
        self.is_evaluating = False
        self.is_tail = False
        self.current: int | None = None
        """The loader of the last batch."""
        self.inputs: list[bytes] = []
        self.unclipped: dict[int, Tensor] = {}
        """Gradients before they were clipped, by their parameters' id."""
        self.schedule_steps = 0
        self.calls = 0
        """Of outermost modules whose gradients are computed, in this window."""
        self.loaders: list[DataLoader[Any]] = []
        self.optimizers_made = 0
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
        for name in ("see_draw", "see_root", "see_call", "see_module", "before_step", "after_step"):
            setattr(self, name, self.refuse_on_error()(getattr(self, name)))
        nn.modules.module.register_module_forward_pre_hook(self._enter)
        nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._after_step(optimizer))
        patches.watch(self)
        atexit.register(self.write_facts)

    def begin_draws(self) -> None:
        """Watch random draws from now on, in this thread."""
        if self._mode is None:
            self._mode = _Draws(self.see_draw)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def begin_tail(self) -> None:
        """Let the script go on to its epoch's end, for a limited time."""
        self.is_tail, self.final = True, self.modules.copies()
        timer = threading.Timer(TAIL_S, self.end)
        timer.daemon = True
        timer.start()

    def end_step_of_tail(self) -> None:
        """Undo the step of a batch that was read ahead."""
        self._tail_steps += 1
        if self._tail_steps > TAIL_STEPS:
            self.end()
        self.set_weights(self.final)

    def end_next_epoch(self) -> NoReturn:
        """End the process where the next epoch begins."""
        self.facts["next_schedule_steps"] = self.schedule_steps
        self.end()

    def set_weights(self, values: list[list[Tensor]], only: int | None = None) -> None:
        """Set weights and buffers of all outermost modules, or of one."""
        for number, (tensors, saved) in enumerate(zip(self.modules.tensors(), values, strict=False)):
            if only not in (None, number):
                continue
            if [tensor.shape for tensor in tensors] != [value.shape for value in saved]:
                self.refuse("in one process it makes a model of another shape")
            with torch.no_grad():
                for tensor, value in zip(tensors, saved, strict=True):
                    if not torch.equal(tensor, value):  # a graph that is still needed may have saved it
                        tensor.copy_(value)

    def refuse(self, reason: str) -> NoReturn:
        """Save the reason why the script cannot be judged, and end."""
        (self.folder / REFUSED).write_text(reason)
        self.end()

    @contextlib.contextmanager
    def refuse_on_error(self) -> Iterator[None]:
        """End with the reason if the observer fails; the script must not seem to."""
        try:
            yield
        except Exception as error:
            self.refuse(f"lockstep fails to observe it ({type(error).__name__}: {error})")

    def end(self) -> NoReturn:
        """End this process and its data workers."""
        self.write_facts()
        for child in multiprocessing.active_children():
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)

    def number_of(self, loader: DataLoader[Any]) -> int | None:
        """Return a loader's number in the order of creation; None if it was not seen."""
        return index_of(self.loaders, loader)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        modules = self.modules
        if not modules.depth:
            is_training = torch.is_grad_enabled() and any(value.requires_grad for value in module.parameters())
            number = index_of(modules.roots, module)
            if is_training and number is None and modules.add_root(module):
                number = len(modules.roots) - 1
                self.see_root(number)
            self.is_evaluating = not torch.is_grad_enabled() or not module.training
            if is_training and number is not None:
                kinds = {parameter.dtype for parameter in module.parameters()}
                is_cast = any(torch.is_autocast_enabled(parameter.device.type) for parameter in module.parameters())
                modules.is_coarse |= is_cast or bool(kinds & {torch.bfloat16, torch.float16})
                self._needs_input = True
                self.calls += 1
                self.see_call(number, module)
        modules.depth += 1
        if self._needs_input and inputs and isinstance(inputs[0], Tensor):  # of the innermost, if others take names
            self._needs_input = False
            self.inputs += hash_samples([inputs[0]])
        self.see_module(module)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.modules.depth -= 1

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> Any:
        self._stepping += 1
        if self._stepping > 1:  # of an optimizer within another one
            return None
        closure = options.get("closure") or next((value for value in args[1:] if callable(value)), None)
        if closure is None:
            self.before_step(optimizer)
            return None
        has_begun = False

        def compute(*words: Any) -> Any:  # gradients are computed within the step, by its first or only call
            nonlocal has_begun
            loss = closure(*words)
            if not has_begun:
                has_begun = True
                self.before_step(optimizer)
            return loss

        args = (args[0], compute, *args[2:]) if len(args) > 1 else args
        return args, options | ({"closure": compute} if "closure" in options else {})

    def _after_step(self, optimizer: Optimizer) -> None:
        self._stepping -= 1
        if not self._stepping:
            self.after_step(optimizer)

    @abstractmethod
    def write_facts(self) -> None:
        """Write the facts beside the windows."""

    @abstractmethod
    def iterate(self, number: int, iteration: int, loader: DataLoader[Any], plain: Any) -> Iterator[Any]:
        """Yield a loader's batches; `plain()` returns its own iterator."""

    @abstractmethod
    def count_batches(self, loader: DataLoader[Any], plain: Callable[[], int]) -> int:
        """Return the loader's number of batches; `plain()` counts its own."""

    @abstractmethod
    def see_draw(self, result: Tensor, is_new: bool, is_order: bool) -> Tensor:
        """See the result of a random operator; return it, or if it `is_new`, another one of any size.

        `is_order` means that it is a permutation.
        """

    def see_root(self, number: int) -> None:
        """See a new outermost module before its first call."""
        return

    def see_call(self, number: int, root: nn.Module) -> None:
        """See an outermost module before a call whose gradients will be computed."""
        return

    def see_module(self, module: nn.Module) -> None:
        """See any module before its call."""
        return

    @abstractmethod
    def before_step(self, optimizer: Optimizer) -> None:
        """See an optimizer before it steps."""

    @abstractmethod
    def after_step(self, optimizer: Optimizer) -> None:
        """See an optimizer after it has stepped."""


def get_generators() -> tuple[Any, Any]:
    """Return the states of `random` and, if it is imported, of NumPy."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def set_generators(states: tuple[Any, Any]) -> None:
    """Restore the states that `get_generators` returned."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def install() -> Observer:
    """Observe this process, as the environment says."""
    from .recorder import Recorder  # late: they import this module
    from .replayer import Replayer

    request = json.loads(os.environ[VARIABLE])
    folder, dtype = Path(request["folder"]), torch.float64 if request.get("float64") else None
    observer: Observer
    if request["mode"] == "record":
        observer = Recorder(folder, dtype, request["steps"])
    else:
        observer = Replayer(folder, dtype, request["passes"])
    observer.install()
    return observer

"""Patches of torch's functions, through which an observer follows an audited process."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from .._torch import loader_copied_by_lightning
from . import BEGUN, recording

if TYPE_CHECKING:
    from .observer import Observer

_LOCKSTEP = f"{Path(__file__).parents[1]}{os.sep}"
_FILE_EVENTS = {"open": 0, "os.rename": 1, "os.remove": 0, "shutil.copyfile": 1, "shutil.move": 1}
"""Events of Python's audit hooks that change a file, and which argument names it."""
_REDUCED = 16  # values of a tensor that an evaluation reduces, at most


def watch(observer: Observer) -> None:
    """Report loaders, collectives, files, clipping, schedules and optimizers to the observer."""
    _watch_loaders(observer)
    _watch_collectives(observer)
    _watch_saved_files(observer)
    _watch_changed_files(observer)
    _watch_clipping(observer)
    _watch_schedules(observer)
    _watch_optimizers(observer)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Call `wrapper` in place of a function, with the function and its arguments."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return wrapper(function, *args, **options)

    setattr(owner, name, call)


def users_place() -> str:
    """Return FILE:LINE of the innermost frame in the user's code; "" without one."""
    from ..monitor.failures import is_library

    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not is_library(file) and not file.startswith(_LOCKSTEP):
            return f"{Path(file).name}:{line}"
    return ""


def _watch_loaders(observer: Observer) -> None:
    iterations = collections.Counter[int]()

    def create(plain: Any, loader: DataLoader[Any], *args: Any, **options: Any) -> None:
        plain(loader, *args, **options)
        number = observer.number_of(loader_copied_by_lightning())
        if number is None:
            observer.loaders.append(loader)
        else:
            observer.loaders[number] = loader

    def iterate(plain: Any, loader: DataLoader[Any]) -> Iterator[Any]:
        number = observer.number_of(loader)
        if torch.utils.data.get_worker_info() is not None or number is None:
            return iter(plain(loader))
        iterations[number] += 1
        observer.begin_draws()
        return observer.iterate(number, iterations[number] - 1, loader, lambda: iter(plain(loader)))

    def count(plain: Any, loader: DataLoader[Any]) -> int:
        return observer.count_batches(loader, lambda: plain(loader))

    wrap(DataLoader, "__init__", create)
    wrap(DataLoader, "__iter__", iterate)
    wrap(DataLoader, "__len__", count)


def _watch_collectives(observer: Observer) -> None:
    def exchange(is_sum: bool, plain: Any, *args: Any, **options: Any) -> Any:
        tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            observer.facts.setdefault("graph_cut", users_place())
        result = plain(*args, **options)
        if observer.is_evaluating and not options.get("async_op"):
            observer.facts["collectives"] += 1
            if is_sum and tensors and tensors[0].numel() <= _REDUCED:
                values = tensors[0].detach().double().flatten().tolist()
                observer.facts["reductions"].append(
                    {"place": users_place(), "loader": observer.current, "values": values}
                )
        return result

    for name in ("all_reduce", "reduce"):
        wrap(dist, name, functools.partial(exchange, True))
    for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object"):
        wrap(dist, name, functools.partial(exchange, False))


def _watch_saved_files(observer: Observer) -> None:
    """Leave the user's files as they are: one that torch.save would overwrite goes to the audit's folder.

    torch.load finds it there. A new file is written, and removed after the audit (see `start.remove_new_files`).
    """
    folder = observer.folder / "saved"

    def save(plain: Any, obj: Any, f: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(f, str | os.PathLike):
            return plain(obj, f, *args, **options)
        path, saves = Path(f).resolve(), observer.facts["saves"]
        if not observer.is_tail or not any(save["path"] == str(path) for save in saves):
            saves.append({"path": str(path), "place": users_place()})
        if not path.exists() or _note_path(folder, path).exists():
            _note_new_file(folder, path)
            return plain(obj, f, *args, **options)
        folder.mkdir(exist_ok=True)
        recording.save(obj, _copy_path(folder, path))
        return None

    def load(plain: Any, f: Any, *args: Any, **options: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            path = Path(f).resolve()
            copy = _copy_path(folder, path)
            f = copy if copy.exists() and not _note_path(folder, path).exists() else f
        return plain(f, *args, **options)

    wrap(torch, "save", save)
    wrap(torch, "load", load)


def _watch_changed_files(observer: Observer) -> None:
    """End the process before it changes a user's file: after the recorded steps, an evaluation is over by then."""
    begun_s, is_ending = (observer.folder / BEGUN).stat().st_mtime, False

    def see(event: str, args: tuple[Any, ...]) -> None:
        nonlocal is_ending
        if not observer.is_tail or is_ending or event not in _FILE_EVENTS:
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        with contextlib.suppress(OSError, TypeError, ValueError):
            path = Path(args[_FILE_EVENTS[event]])
            if event == "shutil.copyfile" and not path.exists():
                _note_new_file(observer.folder / "saved", path.resolve())
            if path.is_file() and path.stat().st_mtime < begun_s:
                is_ending = True
                observer.end()

    sys.addaudithook(see)


def _copy_path(folder: Path, path: Path) -> Path:
    """Return the path of a user's file in the audit's folder."""
    return folder / hashlib.sha256(str(path).encode()).hexdigest()[:32]


def _note_path(folder: Path, path: Path) -> Path:
    """Return the path of the note that the script has made a file."""
    return _copy_path(folder, path).with_suffix(".made")


def _note_new_file(folder: Path, path: Path) -> None:
    folder.mkdir(exist_ok=True)
    _note_path(folder, path).write_text(str(path))


def _watch_clipping(observer: Observer) -> None:
    """Keep gradients from before they are clipped: clipped ones hide a wrong count."""

    def clip(plain: Any, parameters: Any, *args: Any, **options: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        gradients = {id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None}
        observer.unclipped |= {key: gradient.detach().clone() for key, gradient in gradients.items()}
        return plain(parameters, *args, **options)

    for owner in (nn.utils, nn.utils.clip_grad):
        wrap(owner, "clip_grad_norm_", clip)


def _watch_schedules(observer: Observer) -> None:
    depth = 0

    def step(plain: Any, *args: Any, **options: Any) -> Any:
        nonlocal depth
        depth += 1
        observer.schedule_steps += depth == 1  # a schedule of schedules steps once
        try:
            return plain(*args, **options)
        finally:
            depth -= 1

    for kind in vars(torch.optim.lr_scheduler).values():
        if isinstance(kind, type) and "step" in vars(kind):
            wrap(kind, "step", step)


def _watch_optimizers(observer: Observer) -> None:
    def create(plain: Any, optimizer: Optimizer, *args: Any, **options: Any) -> None:
        plain(optimizer, *args, **options)
        observer.optimizers_made += 1
        observer.begin_draws()

    wrap(Optimizer, "__init__", create)


def watch_gathers(observer: Observer, accelerator: Any) -> None:
    """Note calls of Accelerate's (in its module `accelerator`) gather_for_metrics, which drops padding, and gather."""

    def gather_samples(plain: Any, *args: Any, **options: Any) -> Any:
        observer.facts["gathers"].append(observer.current)
        return plain(*args, **options)

    def gather(plain: Any, *args: Any, **options: Any) -> Any:
        observer.facts["is_accelerated"] = observer.facts.get("is_accelerated", False) or observer.is_evaluating
        return plain(*args, **options)

    wrap(accelerator.Accelerator, "gather_for_metrics", gather_samples)
    wrap(accelerator.Accelerator, "gather", gather)

"""Observe a training script from within its processes: record its steps, or replay them in one process.

A *window* is what happens up to one optimizer step. Recording saves, for each of the first windows, this rank's
batches, random draws, weights, buffers and gradients, and changes nothing. Replaying gives the same script the ranks'
batches and draws together (or those of one rank), puts the recorded weights in place before each window, and saves the
gradients that come of them. Files are this user's own, in a private folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler

from .._torch import BatchNorm, TorchDispatchMode
from . import VARIABLE

TOGETHER, BY_SHARE = "together", "statistics by share"
"""Variants of a window: all ranks' samples in one batch; the same with BatchNorm's statistics of each rank's share."""
UNMATCHED = "unmatched"
"""File that says: a random draw had another shape than the ranks' together."""
_SYNCHRONISED = "SyncBatchNorm"
_NO_MORE = object()


class Window(NamedTuple):
    """One rank's part of a step."""

    batches: list[tuple[int, Any]]
    """Number of the loader's iteration, and the batch."""
    draws: list[list[Tensor]]
    """Results of random operators, in call order."""
    weights: list[list[Tensor]]
    """Parameters and buffers of each outermost module, before the step."""
    gradients: list[list[Tensor | None]]
    names: list[list[str]]
    has_batchnorm: bool
    is_coarse: bool
    """Whether a part is computed in less than float32."""
    optimizer: int
    """Number of the optimizer, in the order of their first steps."""
    place: str
    """FILE:LINE of the optimizer's step in the user's code."""


@dataclass
class _Modules:
    """Outermost modules in the order of their first call while gradients are computed."""

    depth: int = 0
    roots: list[nn.Module] = field(default_factory=list)
    others: list[nn.Parameter] = field(default_factory=list)
    """Parameters of optimizers that no module has."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    is_coarse: bool = False

    def add(self, optimizer: torch.optim.Optimizer) -> int:
        """Take in an optimizer's parameters; return its number."""
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            known = {parameter for root in self.roots for parameter in root.parameters()} | {*self.others}
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.others += [parameter for parameter in held if parameter not in known]
        return self.optimizers.index(optimizer)

    def tensors(self) -> list[list[Tensor]]:
        return [*([*root.parameters(), *root.buffers()] for root in self.roots), [*self.others]]

    def parameters(self) -> list[list[tuple[str, nn.Parameter]]]:
        others = [(f"parameter {number} of no module", each) for number, each in enumerate(self.others)]
        return [*([*root.named_parameters()] for root in self.roots), others]


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees results of random operators, and may replace them."""

    def __init__(self, see: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._see(list(found) if isinstance(found, tuple | list) else [found])
        return found


class Observer(ABC):
    """What recording and replaying share: hooks on modules, optimizers and loaders."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.modules = folder, steps, _Modules()
        self.step = 0
        self._iterations = 0
        self._mode: _Draws | None = None

    def install(self) -> None:
        """Set the hooks."""
        nn.modules.module.register_module_forward_pre_hook(self._enter)
        nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self.before_step(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self.after_step(optimizer))
        plain, observer = DataLoader.__iter__, self

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            if multiprocessing.parent_process() is not None and torch.utils.data.get_worker_info() is not None:
                return iter(plain(loader))
            number, observer._iterations = observer._iterations, observer._iterations + 1
            return observer.batches(number, loader, lambda: iter(plain(loader)))

        DataLoader.__iter__ = iterate  # type: ignore[method-assign, assignment]

    def begin_draws(self) -> None:
        """Watch random draws from now on, in this thread."""
        if self._mode is None:
            self._mode = _Draws(self.see_draw)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """End this process and its data workers: the windows asked for are complete."""
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        modules = self.modules
        is_new = not modules.depth and torch.is_grad_enabled() and module not in modules.roots
        if is_new and any(parameter.requires_grad for parameter in module.parameters()):
            modules.roots.append(module)
            self.see_root(len(modules.roots) - 1)
        if not modules.depth:
            kinds = {parameter.dtype for parameter in module.parameters()}
            is_cast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
            modules.is_coarse |= is_cast or bool(kinds & {torch.bfloat16, torch.float16})
        modules.depth += 1

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.modules.depth -= 1

    @abstractmethod
    def batches(self, number: int, loader: DataLoader[Any], plain: Any) -> Iterator[Any]:
        """Yield the batches of the loader's iteration `number`; `plain()` returns its own iterator."""

    @abstractmethod
    def see_draw(self, results: list[Tensor]) -> None:
        """Note the results of a random operator."""

    @abstractmethod
    def see_root(self, number: int) -> None:
        """Note that a new outermost module is about to be called."""

    @abstractmethod
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    @abstractmethod
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""


class Recorder(Observer):
    """Saves this rank's windows."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder, steps)
        self._batches: list[tuple[int, Any]] = []
        self._draws: list[list[Tensor]] = []
        self._is_reading = False

    def batches(self, number: int, loader: DataLoader[Any], plain: Any) -> Iterator[Any]:
        """Yield the loader's batches, and keep them."""
        self._is_reading = True
        iterator = plain()
        while True:
            self._is_reading = True  # what a sampler draws is in the batches
            batch = next(iterator, _NO_MORE)
            self._is_reading = False
            if batch is _NO_MORE:
                return
            self._batches.append((number, copied(batch)))
            self.begin_draws()
            yield batch

    def see_root(self, number: int) -> None:
        """See `Observer.see_root`: nothing to do."""

    def see_draw(self, results: list[Tensor]) -> None:
        """Keep the results, except what a sampler draws."""
        if not self._is_reading:
            self._draws.append([each.detach().clone() for each in results])

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Save a window."""
        number = self.modules.add(optimizer)
        parameters = self.modules.parameters()
        if not self.modules.roots:
            return
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        window = Window(
            batches=self._batches,
            draws=self._draws,
            weights=[[each.detach().clone() for each in tensors] for tensors in self.modules.tensors()],
            gradients=[
                [None if each.grad is None else each.grad.detach().clone() for _, each in root] for root in parameters
            ],
            names=[[name for name, _ in root] for root in parameters],
            has_batchnorm=any(
                isinstance(each, BatchNorm) and each.training and type(each).__name__ != _SYNCHRONISED
                for root in self.modules.roots
                for each in root.modules()
            ),
            is_coarse=self.modules.is_coarse,
            optimizer=number,
            place=_users_place(),
        )
        path = self.folder / f"rank{rank}" / f"window{self.step}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save(tuple(window), path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        self._batches, self._draws = [], []
        self.step += 1

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End after the last window."""
        if self.step >= self.steps:
            self.end()


class Replayer(Observer):
    """Computes the recorded windows again in one process."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(folder, steps)
        self.ranks = load(folder)
        has_batchnorm = self.ranks[0][0].has_batchnorm
        alone = [f"rank {rank}" for rank in range(len(self.ranks))]
        self.plan = [
            (step, variant)
            for step in range(min(map(len, self.ranks)))
            for variant in (TOGETHER, *([BY_SHARE] if has_batchnorm else []), *alone)
        ]
        self._draw = 0
        self._epochs: dict[int, int | None] = {}
        self._last = max(
            (number for windows in self.ranks for window in windows for number, _ in window.batches), default=0
        )
        self._feeds = {number: self._feed(number) for number in range(self._last + 1)}
        """By number of the loader's iteration: the ranks' parts of each micro-batch, over the plan."""
        self._fed: dict[int, int] = {}

    def _feed(self, number: int) -> list[list[Any]]:
        steps = {
            step for windows in self.ranks for step, window in enumerate(windows) if number in dict(window.batches)
        }
        feed = []
        for step, variant in self.plan:
            if step not in steps or (number < self._last and steps == {0} and variant != TOGETHER):
                continue  # only read before the first step, as for an evaluation
            chosen = self._windows(step, variant)
            parts = [[batch for iteration, batch in window.batches if iteration == number] for window in chosen]
            feed += [
                [part[micro] for part in parts if micro < len(part)] for micro in range(max(map(len, parts), default=0))
            ]
        return feed

    def _windows(self, step: int, variant: str) -> list[Window]:
        """Return the windows whose samples a variant of a step has: those of all ranks, or of one."""
        windows = [windows[step] for windows in self.ranks]
        return [windows[int(variant.removeprefix("rank "))]] if variant.startswith("rank ") else windows

    @property
    def _now(self) -> tuple[int, str]:
        """The present step of the recording, and its variant."""
        return self.plan[min(self.step, len(self.plan) - 1)]

    def install(self) -> None:
        """Set the hooks; make this process a world of its own, also where the script says otherwise."""
        super().install()
        plain = dist.init_process_group

        def init(*args: Any, **kwargs: Any) -> None:
            if kwargs.get("rank", 0) > 0:  # of a script that spawns its ranks itself
                os._exit(0)
            plain(*args, **kwargs | ({"world_size": 1} if "world_size" in kwargs else {}))

        dist.init_process_group = init

    def batches(self, number: int, loader: DataLoader[Any], plain: Any) -> Iterator[Any]:
        """Yield the ranks' batches of the loader's iteration `number`, joined."""
        self.begin_draws()
        epoch, before = getattr(loader.sampler, "epoch", None), self._epochs.get(id(loader))
        if self.step >= len(self.plan):  # the epoch after the windows tells whether its order will be another one
            if before is not None and isinstance(loader.sampler, DistributedSampler):
                repeats = loader.sampler.shuffle and epoch == before
                (self.folder / "epochs.json").write_text(json.dumps({"repeats": repeats}))
                self.end()
            return
        number = min(number, self._last)  # a later epoch goes on with the last loader's batches
        if number == self._last:  # the loader of the steps
            self._epochs[id(loader)] = epoch
        while self._fed.get(number, 0) < len(self._feeds[number]):
            at = self._fed[number] = self._fed.get(number, 0) + 1
            yield joined(self._feeds[number][at - 1])

    def see_root(self, number: int) -> None:
        """Put the recorded weights in place; let BatchNorm compute by share."""
        self._set_weights(only=number)
        for module in self.modules.roots[number].modules():
            if isinstance(module, BatchNorm):
                module.forward = _by_share(module, self)  # type: ignore[method-assign]

    def sizes(self) -> list[int] | None:
        """Samples of each rank in the present micro-batch, for statistics by share."""
        step, variant = self._now
        if variant != BY_SHARE:
            return None
        return [size_of(window.batches[0][1]) for window in self._windows(step, variant)]

    def see_draw(self, results: list[Tensor]) -> None:
        """Replace a draw by the ranks' recorded ones."""
        recorded = [window.draws[self._draw] for window in self._windows(*self._now) if self._draw < len(window.draws)]
        self._draw += 1
        for index, result in enumerate(results):
            parts = [draw[index] for draw in recorded if index < len(draw)]
            if parts and result.dim():
                whole = torch.cat(parts) if sum(map(len, parts)) == len(result) else parts[0]
                if whole.shape == result.shape:
                    result.copy_(whole)
                else:
                    (self.folder / UNMATCHED).touch()

    def _set_weights(self, only: int | None = None) -> None:
        weights = self.ranks[0][self._now[0]].weights
        for number, (tensors, saved) in enumerate(zip(self.modules.tensors(), weights, strict=False)):
            if only in (None, number):
                with torch.no_grad():
                    for tensor, value in zip(tensors, saved, strict=True):
                        tensor.copy_(value)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Save the gradients of the present variant."""
        if self.step >= len(self.plan):
            self.end()
        self.modules.add(optimizer)
        step, variant = self.plan[self.step]
        found = [
            [None if each.grad is None else each.grad.detach().clone() for _, each in root]
            for root in self.modules.parameters()
        ]
        torch.save(found, self.folder / f"replay {step} {variant}.pt")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the next window's weights in place."""
        self.step, self._draw = self.step + 1, 0
        self._set_weights()


def _by_share(module: Any, replayer: Replayer) -> Any:
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        sizes = replayer.sizes()
        if sizes is None or not module.training or sum(sizes) != len(x):
            result: Tensor = plain(x)
            return result
        return torch.cat([plain(share) for share in torch.split(x, sizes)])

    return forward


def load(folder: Path) -> list[list[Window]]:
    """Return the recorded windows of each rank."""
    found = []
    for rank in range(len([*folder.glob("rank*")])):
        paths = sorted(folder.glob(f"rank{rank}/window*.pt"), key=lambda path: int(path.stem.removeprefix("window")))
        found.append(_without_lead([Window(*torch.load(path, weights_only=False)) for path in paths]))
    return found


def _without_lead(windows: list[Window]) -> list[Window]:
    """Return the windows with their own batches, where the loop reads some ahead: more in the first window."""
    counts = [len(window.batches) for window in windows]
    if len(counts) < 2 or counts[0] <= counts[1]:
        return windows
    batches, each = [batch for window in windows for batch in window.batches], counts[1]
    return [
        window._replace(batches=batches[number * each : (number + 1) * each]) for number, window in enumerate(windows)
    ]


def copied(batch: Any) -> Any:
    """Return a batch whose tensors the script cannot change."""
    return _mapped(lambda parts: parts[0].detach().clone(), [batch])


def joined(batches: list[Any]) -> Any:
    """Return the batches as one: tensors and lists of samples end to end."""
    return _mapped(lambda parts: torch.cat(parts) if parts[0].dim() else parts[0], batches)


def size_of(batch: Any) -> int:
    """Return a batch's number of samples, by its first tensor; 0 without one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, list | tuple) else ()
    return next(filter(None, map(size_of, values)), 0)


def _mapped(join: Any, batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return join(batches)
    if hasattr(first, "keys"):  # a dict, or a mapping such as a tokenizer's output
        return type(first)({key: _mapped(join, [batch[key] for batch in batches]) for key in first.keys()})  # noqa: SIM118
    if isinstance(first, tuple | list):
        if first and not any(isinstance(each, Tensor | tuple | list) or hasattr(each, "keys") for each in first):
            return type(first)(each for batch in batches for each in batch)  # texts, names: one for each sample
        made = [_mapped(join, [batch[index] for batch in batches]) for index in range(len(first))]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    return first


def _users_place() -> str:
    from ..monitor.failures import is_library

    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if not is_library(file) and "/lockstep/audit/" not in file:
            return f"{Path(file).name}:{line}"
    return ""


def install() -> None:
    """Observe this process, as the environment says."""
    asked = json.loads(os.environ[VARIABLE])
    kind = {"record": Recorder, "replay": Replayer}[asked["mode"]]
    kind(Path(asked["folder"]), int(asked["steps"])).install()

"""Record what a rank of an audited script does, and change nothing of its steps."""

from __future__ import annotations

import collections
import contextlib
import copy
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, Subset

from .._torch import BatchNorm, IterableFetcher, MapFetcher
from ..files import write_json
from ..world.random_state import preserve_generators
from . import recording
from .modules import index_of
from .observer import Observer, get_generators
from .patches import users_place, wrap
from .recording import Read, Window
from .tensors import copy_batch

_SYNCHRONISED = "SyncBatchNorm"
_ORDER = 10_000_000  # indices of an epoch, at most
_UNTRAINED = 128  # batches of a loader before the first training step, at most
_EVALUATION_S = 5.0
"""Expected seconds of an evaluation that is read wholly, at most."""
_AUGMENTATION = 64  # digests of a process and source in a window, at most
_END = object()


class Recorder(Observer):
    """Saves this rank's windows and facts."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, steps: int) -> None:
        super().__init__(folder, dtype)
        self._steps = steps
        self._counts: dict[int, int] = {}
        """Steps of each optimizer."""
        self._is_reading = self._reads_samples = False
        self._generators: Any = None
        self._fetcher: Any = None
        self._recent: set[int] = set()
        """Loaders that were read since a model was called."""
        self._training: set[int] = set()
        """Loaders whose batches are trained on."""
        self._datasets: list[Any] = []
        self.facts |= {"loaders": {}, "next_schedule_steps": None}
        self._begin_window()

    def _begin_window(self) -> None:
        self._reads: list[Read] = []
        self._draws: list[Tensor] = []
        self._states: list[bytes] = []
        self._weights: dict[int, list[Tensor]] = {}
        self._buffers: dict[str, Tensor] = {}
        self._called: set[int] = set()
        self._exchanges: list[bool] = []
        self._digests, self._is_drawn_outside = collections.Counter[str](), False
        self.unclipped, self.calls, self.inputs = {}, 0, []

    def install(self) -> None:
        """Set the hooks, and follow how loaders fetch samples."""
        super().install()
        for kind in (MapFetcher, IterableFetcher):
            wrap(kind, "fetch", self._fetch)

    def _fetch(self, plain: Any, fetcher: Any, *args: Any) -> Any:
        """Fetch samples, without what samplers draw; in a data worker too."""
        earlier_states, self._reads_samples = get_generators(), True
        try:
            batch = plain(fetcher, *args)
        finally:
            self._reads_samples = False
        if isinstance(fetcher, MapFetcher) or fetcher is self._fetcher:  # a stream shuffles before its first
            for source, earlier, state in zip(("random", "numpy"), earlier_states, get_generators(), strict=True):
                if earlier is not None and repr(earlier) != repr(state):
                    self._save_digest(source, state)
        self._fetcher = fetcher
        return batch

    def _path(self, name: str) -> Path:
        """Return the path of a file of this rank."""
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        path = recording.rank_path(self.folder, rank, name)
        path.parent.mkdir(exist_ok=True)
        return path

    def write_facts(self) -> None:
        """See `Observer.write_facts`."""
        if self.step:  # not of a launcher
            is_hidden = self._mode is not None and self._mode.is_hidden
            facts = self.facts | {"training": sorted(self._training), "hidden": is_hidden}
            write_json(self._path("facts.json"), facts)
            if self.is_tail:
                recording.save(self._reads, self._path("tail.pt"))

    def iterate(self, number: int, iteration: int, loader: DataLoader[Any], plain: Any) -> Iterator[Any]:
        """Yield the loader's batches, and keep them; of a long evaluation only the first and the last."""
        self._save_order(number, iteration, loader)
        if self.is_tail and number in self._training:
            self.end_next_epoch()
        iterator, count, yielded_s = None, 0, 0.0
        is_long: bool | None = None  # of an evaluation, from the first call of the model on
        while True:
            self._compare_generators()
            self._is_reading = True  # what samplers and data sets draw is in the batches
            if iterator is None:
                iterator = plain()
            is_over = self.is_tail and number in self._training
            if is_long is None and count and self.is_tail and self.is_evaluating and self.current == number:
                is_long = not self._reads_wholly(number, iteration, loader, time.monotonic() - yielded_s)
            if is_long:
                batch, is_over = self._last_batch(loader, count), True
            else:
                batch = _END if is_over else next(iterator, _END)
            self._is_reading = False
            states = get_generators()
            if count == _UNTRAINED and number not in self._training:
                self.refuse("it reads more batches before it trains than are kept")
            if batch is not _END:
                self._generators = states
                with self.refuse_on_error():
                    batch = copy_batch(batch, self.dtype) if self.dtype else batch
                    self._reads.append(Read(number, iteration, copy_batch(batch), states))
                self.current, count = number, count + 1
                if number in self._training:
                    self.is_evaluating = False
                earlier = set() if self.is_evaluating else self._recent  # an evaluation's are not trained on
                self._recent = earlier | {number}
                yielded_s = time.monotonic()
                yield batch
            if batch is _END or is_over:
                self._reads.append(Read(number, iteration, None, None))
                if self.is_tail:
                    self.write_facts()
                return

    def _compare_generators(self) -> None:
        """Note whether the script has drawn from `random` or NumPy."""
        states = get_generators()
        self._is_drawn_outside |= self._generators is not None and repr(states) != repr(self._generators)
        self._generators = states

    def _save_digest(self, source: str, values: Any) -> None:
        """Save a digest of what a loader draws for samples from a source of random numbers."""
        if not self.is_tail and self._digests[source] < _AUGMENTATION:
            self._digests[source] += 1
            with self._path(f"augmentation {self.step} {source}").open("ab") as file:
                file.write(hashlib.sha256(repr(values).encode()).digest())

    def _reads_wholly(self, number: int, iteration: int, loader: DataLoader[Any], batch_s: float) -> bool:
        """Return whether an evaluation is short enough to be read wholly; the first rank decides for all."""
        batches, path = _list_indices(loader), self.folder / f"evaluation {number} {iteration}"
        is_short = batches is not None and len(batches) < _UNTRAINED and batch_s * len(batches) < _EVALUATION_S
        with contextlib.suppress(FileExistsError):
            path.symlink_to("whole" if is_short else "ends")  # atomic, and has its content at once
        is_whole = path.readlink().name == "whole"
        self.facts["loaders"][str(number)]["is_whole"] = is_whole
        return is_whole

    def _last_batch(self, loader: DataLoader[Any], count: int) -> Any:
        """Return the last batch of an evaluation whose other batches are left out."""
        batches = _list_indices(loader)
        if batches is None or len(batches) <= count:
            return _END
        return copy_batch(loader.collate_fn([loader.dataset[index] for index in batches[-1]]), self.dtype)

    def _save_order(self, number: int, iteration: int, loader: DataLoader[Any]) -> None:
        """Save the indices of the next iteration, in the data set that others are parts of."""
        self._is_reading = True
        batches = _list_indices(loader)
        self._is_reading = False
        facts = {"place": users_place(), "batch_size": len(batches[0]) if batches else 0}
        self.facts["loaders"][str(number)] = facts
        if batches is None:
            return
        dataset, indices = loader.dataset, torch.tensor([index for batch in batches for index in batch])
        if indices.dtype != torch.int64:
            return
        universe = torch.arange(len(dataset))  # type: ignore[arg-type]
        while isinstance(dataset, Subset):
            subset = torch.tensor([*dataset.indices])
            indices, universe, dataset = subset[indices], subset[universe], dataset.dataset
        if index_of(self._datasets, dataset) is None:
            self._datasets.append(dataset)
        facts |= {"dataset": index_of(self._datasets, dataset), "sampler": type(loader.sampler).__module__}
        recording.save(universe, self._path(f"universe {number}.pt"))
        if iteration == 0 or self.is_tail:
            recording.save(indices, self._path(f"order {number} {min(iteration, 1)}.pt"))

    def count_batches(self, loader: DataLoader[Any], plain: Callable[[], int]) -> int:
        """Return and note the loader's number of batches."""
        length, number = plain(), self.number_of(loader)
        if number is not None:
            self.facts["lengths"][str(number)] = length
        return length

    def see_draw(self, result: Tensor, is_new: bool, is_order: bool) -> Tensor:
        """Keep the result, except single numbers, such as seeds; of what a loader draws, a digest."""
        if not result.dim() or self.is_tail:
            return result
        mode = self._mode
        assert mode is not None
        if not self._is_reading:
            self._draws.append(result.detach().clone())
            self._states.append(mode.state)
        elif self._reads_samples and not is_order:
            self._save_digest("generator" if mode.has_generator else "torch", mode.state)
        return result

    def see_call(self, number: int, root: nn.Module) -> None:
        """Keep a root's weights before its first call in a window."""
        self._training |= self._recent
        self._recent = set()
        if number not in self._weights:
            self._weights[number] = [tensor.detach().clone() for tensor in (*root.parameters(), *root.buffers())]

    def see_module(self, module: nn.Module) -> None:
        """Keep a module's buffers before its first call in a window, after its wrapper has broadcast them."""
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
            self._exchanges.append(module.require_backward_grad_sync)
        buffers = [*module.named_buffers(recurse=False)]
        if buffers and not self.is_evaluating and not self.is_tail and id(module) not in self._called:
            self._called.add(id(module))
            prefix = self._prefix(module)
            self._buffers |= {f"{prefix}{name}": buffer.detach().clone() for name, buffer in buffers}

    def _prefix(self, module: nn.Module) -> str:
        names = (name for root in self.modules.roots for name, child in root.named_modules() if child is module)
        name = next(names, type(module).__name__)
        return f"{name}." if name else ""

    def before_step(self, optimizer: Optimizer) -> None:
        """Save a window."""
        modules = self.modules
        number = modules.add_optimizer(optimizer)
        if self.is_tail or not modules.roots:
            return
        parameters = [parameter for root in modules.roots for parameter in root.parameters()]
        if any(hasattr(value, "placements") or type(value).__name__ == "FlatParameter" for value in parameters):
            self.refuse("its parameters are sharded, as by FSDP or DTensor")
        self._compare_generators()
        self._counts[number] = self._counts.get(number, 0) + 1
        window = Window(
            reads=self._reads,
            draws=self._draws,
            states=self._states,
            is_drawn_outside=self._is_drawn_outside,
            weights=[self._weights.get(root, weights) for root, weights in enumerate(modules.copies())],
            gradients=modules.gradients(optimizer, {}),
            unclipped=modules.gradients(optimizer, self.unclipped),
            names=modules.names(),
            buffers=self._buffers,
            has_batchnorm=any(
                isinstance(module, BatchNorm) and module.training and type(module).__name__ != _SYNCHRONISED
                for root in modules.roots
                for module in root.modules()
            ),
            is_coarse=modules.is_coarse,
            optimizer=number,
            learning_rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            schedule_steps=self.schedule_steps,
            inputs=self.inputs,
            calls=self.calls,
            training=self._training,
            exchanges=self._exchanges,
            place=users_place(),
        )
        recording.save(window, self._path(f"window{self.step}.pt"))
        self.step += 1
        self.write_facts()
        self._begin_window()

    def after_step(self, optimizer: Optimizer) -> None:
        """Begin the tail after the last window."""
        counts = self._counts.values()
        is_enough = len(counts) >= self.optimizers_made and min(counts, default=0) >= self._steps
        if not self.is_tail and self.step and (is_enough or max(counts) >= 4 * self._steps):
            self.begin_tail()
            recording.save(self.final, self._path("final.pt"))
            self.write_facts()
        elif self.is_tail:
            self.end_step_of_tail()


def _list_indices(loader: DataLoader[Any]) -> list[list[int]] | None:
    """Return the indices of each batch of the loader's next iteration, which are not consumed; None if unknown."""
    sampler = loader.batch_sampler
    if sampler is None or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return None
    batches, count = list[Any](), 0
    with preserve_generators():
        try:
            for batch in copy.deepcopy(sampler, {id(loader.dataset): loader.dataset}):
                batches.append(batch)
                count += len(batch)
                if count > _ORDER:
                    return None
        except Exception:  # a sampler that cannot be copied
            return None
    return batches if all(isinstance(batch, list | tuple) for batch in batches) else None

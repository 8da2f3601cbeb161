"""Record what a rank of an audited script does, and change nothing of its steps."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, Subset

from .._torch import BatchNorm
from . import recording
from .observer import Observer, learning_rates, users_place
from .recording import Read, Window

_SYNCHRONISED = "SyncBatchNorm"
_ORDER = 10_000_000  # indices of an epoch, at most
_KEPT = 128  # batches of a loader that nothing was trained on yet
_AUGMENTATION = 64  # digests of a window, at most
_NO_MORE = object()


class Recorder(Observer):
    """Saves this rank's windows and facts."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, steps: int) -> None:
        super().__init__(folder, dtype)
        self._steps = steps
        self._counts: dict[int, int] = {}
        """Steps of each optimizer."""
        self._reads: list[Read] = []
        self._draws: list[Tensor] = []
        self._weights: dict[int, list[Tensor]] = {}
        self._buffers: dict[str, Tensor] = {}
        self._seen: set[int] = set()
        self._exchanges: list[bool] = []
        self._is_reading = self._reads_samples = False
        self._augmentation: list[bytes] = []
        self._generators: Any = None
        self._is_drawn_outside = False
        self._current: int | None = None
        self._recent: set[int] = set()
        """Loaders that were read since a model was called."""
        self._training: set[int] = set()
        """Loaders whose batches are trained on."""
        self._datasets: list[Any] = []
        self._is_watching_metrics = False
        self.facts |= {"loaders": {}, "next_schedule_steps": None}

    @property
    def _rank_folder(self) -> Path:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        folder = self.folder / f"rank{rank}"
        folder.mkdir(exist_ok=True)
        return folder

    def write_facts(self) -> None:
        """See `Observer.write_facts`."""
        if self.step:  # not of a launcher
            part = self._rank_folder / f"facts.{os.getpid()}"
            part.write_text(
                json.dumps(
                    self.facts
                    | {"training": sorted(self._training), "hidden": self._mode is not None and self._mode.is_hidden}
                )
            )
            part.replace(self._rank_folder / "facts.json")
            if self.is_tail:
                recording.save([tuple(read) for read in self._reads], self._rank_folder / "tail.pt")

    def batches(self, number: int, iteration: int, loader: DataLoader[Any], plain: Any) -> Iterator[Any]:
        """Yield the loader's batches, and keep them; of an evaluation only the first and the last."""
        self._see_order(number, iteration, loader)
        if self.is_tail and number in self._training:
            self.facts["next_schedule_steps"] = self.schedule_steps
            self.end()
        iterator, count = None, 0
        while True:
            self._note_generators()
            self._is_reading = True  # what samplers and data sets draw is in the batches
            if iterator is None:
                iterator = plain()
            is_over = self.is_tail and number in self._training
            if count and self.is_tail and self.is_evaluating and self._current == number:
                batch, is_over = self._last_batch(loader, count), True
            else:
                self._reads_samples = True
                batch = _NO_MORE if is_over else next(iterator, _NO_MORE)
                self._reads_samples = False
            self._is_reading = False
            if repr(self._generators) != repr(now := recording.generator_states()):
                self._augmentation.append(hashlib.sha256(repr(now).encode()).digest())
            if count == _KEPT and number not in self._training:
                (self.folder / recording.REFUSED).write_text("it reads more batches before it trains than are kept")
                self.end()
            if batch is not _NO_MORE:
                self._generators = recording.generator_states()
                batch = recording.copied(batch, self.dtype) if self.dtype else batch
                self._reads.append(Read(number, iteration, recording.copied(batch), self._generators))
                self._current, count = number, count + 1
                self._recent.add(number)
                yield batch
            if batch is _NO_MORE or is_over:
                self._reads.append(Read(number, iteration, None, None))
                if self.is_tail:
                    self.write_facts()
                return

    def _note_generators(self) -> None:
        now = recording.generator_states()
        if self._generators is not None:
            self._is_drawn_outside |= repr(now) != repr(self._generators)
        self._generators = now

    def _last_batch(self, loader: DataLoader[Any], count: int) -> Any:
        """Return the last batch of an evaluation whose other batches are left out."""
        indices = _batches_of(loader)
        if indices is None or len(indices) <= count:
            return _NO_MORE
        samples = [loader.dataset[index] for index in indices[-1]]
        batch = loader.collate_fn(samples)
        return recording.copied(batch, self.dtype)

    def _see_order(self, number: int, iteration: int, loader: DataLoader[Any]) -> None:
        """Save the indices that the iteration is about to have, in the data set that others are parts of."""
        self._is_reading = True
        batches = _batches_of(loader)
        self._is_reading = False
        accelerate: Any = sys.modules.get("accelerate")
        if accelerate is not None and not self._is_watching_metrics:
            self._is_watching_metrics = True
            plain = accelerate.Accelerator.gather_for_metrics

            def gathered(*args: Any, **options: Any) -> Any:
                self.facts["gathers"] = True
                return plain(*args, **options)

            accelerate.Accelerator.gather_for_metrics = gathered
        size = len(batches[0]) if batches else 0
        self.facts["loaders"][str(number)] = {"place": users_place(), "batch_size": size}
        if batches is None:
            return
        whole, indices = loader.dataset, torch.tensor([index for batch in batches for index in batch])
        if indices.dtype != torch.int64:
            return
        universe = torch.arange(len(whole))  # type: ignore[arg-type]
        while isinstance(whole, Subset):
            places = torch.tensor([*whole.indices])
            indices, universe, whole = places[indices], places[universe], whole.dataset
        if not any(whole is each for each in self._datasets):
            self._datasets.append(whole)
        dataset = next(place for place, each in enumerate(self._datasets) if each is whole)
        self.facts["loaders"][str(number)] |= {"dataset": dataset, "sampler": type(loader.sampler).__module__}
        recording.save(universe, self._rank_folder / f"universe {number}.pt")
        if iteration == 0 or self.is_tail:
            recording.save(indices, self._rank_folder / f"order {number} {min(iteration, 1)}.pt")

    def length(self, loader: DataLoader[Any], plain: Callable[[], int]) -> int:
        """Return and note the loader's number of batches."""
        length = plain()
        if any(loader is each for each in self.loaders):
            self.facts["lengths"][str(self.number_of(loader))] = length
        return length

    def see_draw(self, result: Tensor, is_new: bool, is_order: bool) -> Tensor:
        """Keep the result, except single numbers, such as seeds; of what a loader draws, a digest."""
        if not result.dim() or self.is_tail:
            return result
        if not self._is_reading:
            self._draws.append(result.detach().clone())
        elif (
            (self._reads_samples or torch.utils.data.get_worker_info() is not None)
            and not is_order
            and len(self._augmentation) < _AUGMENTATION
        ):
            self._augmentation.append(hashlib.sha256(repr(result.tolist()).encode()).digest())
            if torch.utils.data.get_worker_info() is not None:
                with (self._rank_folder / "augmentation").open("ab") as file:
                    file.write(self._augmentation[-1])
        return result

    def see_root(self, number: int) -> None:
        """See `Observer.see_root`: nothing to do."""

    def see_call(self, number: int, root: nn.Module) -> None:
        """Keep a root's weights before its first call in a window."""
        self._training |= self._recent
        self._recent = set()
        if number not in self._weights:
            self._weights[number] = [each.detach().clone() for each in (*root.parameters(), *root.buffers())]

    def see_module(self, module: nn.Module) -> None:
        """Keep the buffers that a module begins the window with, after its wrapper has broadcast them."""
        if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
            self._exchanges.append(module.require_backward_grad_sync)
        own = [*module.named_buffers(recurse=False)]
        if own and not self.is_evaluating and not self.is_tail and id(module) not in self._seen:
            self._seen.add(id(module))
            for name, buffer in own:
                self._buffers[f"{self._name_of(module)}{name}"] = buffer.detach().clone()

    def _name_of(self, module: nn.Module) -> str:
        for root in self.modules.roots:
            for name, each in root.named_modules():
                if each is module:
                    return f"{name}." if name else ""
        return f"{type(module).__name__}."

    def before_step(self, optimizer: Optimizer) -> None:
        """Save a window."""
        number = self.modules.add(optimizer)
        if self.is_tail:
            return
        if not self.modules.roots:
            return
        if any(hasattr(each, "placements") or type(each).__name__ == "FlatParameter" for each in self._parameters()):
            (self.folder / recording.REFUSED).write_text("its parameters are sharded, as by FSDP or DTensor")
            self.end()
        self._note_generators()
        self._counts[number] = self._counts.get(number, 0) + 1
        now = self.modules.tensors()
        window = Window(
            reads=[tuple(read) for read in self._reads],  # type: ignore[misc]
            draws=self._draws,
            augmentation=self._augmentation,
            is_drawn_outside=self._is_drawn_outside,
            weights=[
                self._weights.get(place, [each.detach().clone() for each in now[place]]) for place in range(len(now))
            ],
            gradients=self.modules.gradients(optimizer),
            unclipped=self.modules.gradients(optimizer, self.unclipped),
            names=self.modules.names(),
            buffers=self._buffers,
            has_batchnorm=any(
                isinstance(each, BatchNorm) and each.training and type(each).__name__ != _SYNCHRONISED
                for root in self.modules.roots
                for each in root.modules()
            ),
            is_coarse=self.modules.is_coarse,
            optimizer=number,
            learning_rates=learning_rates(optimizer),
            schedule_steps=self.schedule_steps,
            inputs=self.inputs,
            micro_batches=self.calls,
            exchanges=self._exchanges,
            place=users_place(),
        )
        recording.save(tuple(window), self._rank_folder / f"window{self.step}.pt")
        self.step += 1
        self.write_facts()
        self._augmentation = []
        self._reads, self._draws, self._weights, self._buffers, self._exchanges = [], [], {}, {}, []
        self.unclipped = {}
        self.calls, self.inputs, self._seen, self._is_drawn_outside = 0, [], set(), False

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for root in self.modules.roots for parameter in root.parameters())

    def after_step(self, optimizer: Optimizer) -> None:
        """Begin the tail after the last window."""
        counts = self._counts.values()
        is_enough = len(counts) >= self.made and min(counts, default=0) >= self._steps
        if not self.is_tail and self.step and (is_enough or max(counts) >= 4 * self._steps):
            self.begin_tail()
            recording.save(self.final, self._rank_folder / "final.pt")
            self.write_facts()
        elif self.is_tail:
            self.end_step_of_tail()


def _batches_of(loader: DataLoader[Any]) -> list[list[int]] | None:
    """Return the indices of each batch of the loader's next iteration, which are not consumed; None if unknown."""
    sampler = loader.batch_sampler
    if sampler is None or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return None
    before, generators = torch.get_rng_state(), recording.generator_states()
    try:
        memo = {id(loader.dataset): loader.dataset}
        found, count = list[Any](), 0
        for batch in copy.deepcopy(sampler, memo):
            found.append(batch)
            count += len(batch)
            if count > _ORDER:
                return None
    except Exception:  # a sampler that cannot be copied, or has no end of its own
        return None
    finally:
        torch.set_rng_state(before)
        recording.set_generator_states(generators)
    return found if all(isinstance(batch, list | tuple) for batch in found) else None

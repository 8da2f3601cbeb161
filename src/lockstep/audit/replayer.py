"""Compute the recorded windows again in one process, from the ranks' samples, draws and weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from .._torch import BatchNorm
from . import recording
from .observer import Observer, learning_rates
from .recording import (
    BY_SHARE,
    FIRST,
    REFUSED,
    REVERSED,
    TOGETHER,
    TURNS,
    UNMATCHED,
    UNMATCHED_ROWS,
    Read,
    Recording,
    Window,
)


class _Feed:
    """What a loader yields: the ranks' batches, joined, iteration after iteration and pass after pass."""

    def __init__(self, ranks: list[list[Read]], tails: list[list[Read]], passes: list[str], ahead: int) -> None:
        """`ahead` batches are read before they are needed; those of the last step are of no use before another pass."""
        self._ranks, self._tails, self._passes, self._ahead = ranks, tails, passes, ahead
        self._pass = self._iteration = 0
        self._items = self._joined()
        self.sizes: list[list[int]] = []
        """Samples of each rank in the batches that were yielded last."""

    def _joined(self) -> list[tuple[list[list[Any]], Any, bool]]:
        """Return, by iteration, each batch's parts by rank, the generators' states, and whether it came to its end."""
        name = self._passes[self._pass]
        chosen = [int(name.removeprefix("rank "))] if name.startswith("rank ") else [*range(len(self._ranks))]
        is_last = self._pass == len(self._passes) - 1
        reads = [
            self._ranks[rank] + (self._tails[rank] if is_last and name in (TOGETHER, TURNS) else []) for rank in chosen
        ]
        found = []
        for iteration in sorted({read.iteration for rank in reads for read in rank}):
            ours = [[read for read in rank if read.iteration == iteration] for rank in reads]
            batches = [[read for read in rank if not read.is_end] for rank in ours]
            parts = [
                [rank[number] for rank in batches if number < len(rank)] for number in range(max(map(len, batches)))
            ]
            if name == REVERSED:
                parts = [each[::-1] for each in parts]
            if name == FIRST:
                parts = [parts[0] for _ in parts]
            if name == TURNS:
                parts = [[read] for each in parts for read in each]
            if not is_last and self._ahead and iteration == max(read.iteration for rank in reads for read in rank):
                parts = parts[: -self._ahead]
            is_ended = any(read.is_end for rank in ours for read in rank)
            found.append(
                ([[read.batch for read in each] for each in parts], [each[0].generators for each in parts], is_ended)
            )
        return found

    def next_iteration(self) -> Iterator[tuple[list[Any], Any]]:
        """Yield each batch's parts and the generators' states; of the next pass where the record breaks off."""
        while True:
            if self._iteration >= len(self._items):
                if self._pass + 1 >= len(self._passes):
                    return
                self._pass, self._iteration = self._pass + 1, 0
                self._items = self._joined()
                continue
            parts, states, is_ended = self._items[self._iteration]
            self._iteration += 1
            for part, state in zip(parts, states, strict=True):
                self.sizes = [*self.sizes[-3:], [recording.size_of(batch) for batch in part]]
                yield part, state
            if is_ended or self._iteration < len(self._items):
                return


def _ahead(windows: list[Window], loader: int) -> int:
    """Return how many batches a loop reads before it needs them: those of its first step beyond the second's."""
    counts = [sum(read.loader == loader and not read.is_end for read in window.reads) for window in windows[:2]]
    return max(0, counts[0] - counts[1]) if len(counts) > 1 else 0


class Replayer(Observer):
    """One process, which stands for all ranks."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, passes: list[str]) -> None:
        super().__init__(folder, dtype)
        record = Recording(folder)
        self._windows, self._passes = record.windows, passes
        self._plan = [(step, name) for name in passes for step in range(record.steps)]
        self._has_tail = passes[-1] in (TOGETHER, TURNS)
        self._draw = self._draw_of_pass = 0
        self._draws = [[draw for window in windows for draw in window.draws] for windows in record.windows]
        self._final = record.final()
        self._recorded = record.facts[0]
        self._training = {number for facts in record.facts for number in facts["training"]}
        reads = [[read for window in windows[: record.steps] for read in window.reads] for windows in record.windows]
        tails = record.tails()
        for rank, windows in enumerate(record.windows):  # windows that not all ranks have are no part of it
            if len(windows) > record.steps:
                tails[rank] = []
        numbers = {read.loader for rank in (*reads, *tails) for read in rank}
        self._feeds = {
            number: _Feed(
                [[read for read in rank if read.loader == number] for rank in reads],
                [[read for read in rank if read.loader == number] for rank in tails],
                passes,
                _ahead(record.windows[0], number),
            )
            for number in numbers
        }

    @property
    def _now(self) -> tuple[int, str]:
        return self._plan[min(self.step, len(self._plan) - 1)]

    def install(self) -> None:
        """Set the hooks; make this process a world of its own, also where the script says otherwise."""
        super().install()
        plain = dist.init_process_group

        def init(*args: Any, **options: Any) -> None:
            rank = options.get("rank", -1)
            if (int(os.environ.get("RANK", 0)) if rank is None or rank < 0 else rank) > 0:
                os._exit(0)  # of a script that starts its ranks itself
            self.facts["is_told_ranks"] = (options.get("world_size") or 1) > 1
            plain(*args, **options | {"world_size": 1, "rank": 0})

        dist.init_process_group = init

    def write_facts(self) -> None:
        """See `Observer.write_facts`."""
        if self.step and self._has_tail:
            part = self.folder / f"replay.{os.getpid()}"
            part.write_text(json.dumps(self.facts | {"reached_tail": self.is_tail}))
            part.replace(self.folder / "replay.json")

    def batches(self, number: int, iteration: int, loader: DataLoader[Any], plain: Any) -> Iterator[Any]:
        """Yield the ranks' batches, joined."""
        if self.is_tail and number in self._training:
            self.facts["next_schedule_steps"] = self.schedule_steps
            self.end()
        if number not in self._feeds:
            return
        for parts, states in self._feeds[number].next_iteration():
            try:
                batch = recording.joined(parts)
            except ValueError as error:
                (self.folder / REFUSED).write_text(str(error))
                self.end()
            recording.set_generator_states(states)
            yield recording.copied(batch)

    def length(self, loader: DataLoader[Any], plain: Callable[[], int]) -> int:
        """Return the number of batches that a rank's loader had; for all loaders of the data set that is trained on."""
        if not any(loader is each for each in self.loaders):
            return plain()
        lengths, number = self._recorded["lengths"], self.number_of(loader)
        for other in sorted(self._training):
            if (
                self.loaders[other : other + 1]
                and self.loaders[other].dataset is loader.dataset
                and f"{other}" in lengths
            ):
                return int(lengths[f"{other}"])
        return int(lengths[f"{number}"]) if f"{number}" in lengths else plain()

    def see_root(self, number: int) -> None:
        """Put the recorded weights in place; let BatchNorm compute by share."""
        step, _ = self._now
        self.set_weights(self._windows[0][step].weights, only=number)
        for module in self.modules.roots[number].modules():
            if isinstance(module, BatchNorm):
                module.forward = self._by_share(module)  # type: ignore[method-assign]

    def _by_share(self, module: nn.Module) -> Any:
        plain = module.forward

        def forward(x: Tensor) -> Any:
            if self._now[1] == BY_SHARE and module.training:
                for sizes in (sizes for feed in self._feeds.values() for sizes in reversed(feed.sizes)):
                    if sum(sizes) == len(x):
                        return torch.cat([plain(share) for share in torch.split(x, sizes)])
                (self.folder / UNMATCHED_ROWS).touch()
            return plain(x)

        return forward

    def _chosen(self) -> list[Window]:
        """Return the windows whose samples the present window has: those of all ranks, or of one."""
        step, name = self._now
        if name == FIRST:
            step = 0
        windows = [windows[step] for windows in self._windows][:: -1 if name == REVERSED else 1]
        return [windows[int(name.removeprefix("rank "))]] if name.startswith("rank ") else windows

    def see_draw(self, result: Tensor, is_new: bool, is_order: bool) -> Tensor:
        """Replace a draw by the ranks' recorded ones, one after the other if they are of samples."""
        if self.is_tail or not result.dim():
            return result
        windows = self._chosen()
        draws = [window.draws[self._draw] for window in windows if self._draw < len(window.draws)]
        if self._now[1] == TURNS:
            turn, rank = divmod(self._draw_of_pass, len(self._windows))
            windows, draws = windows[:1], self._draws[rank][turn : turn + 1]
        self._draw, self._draw_of_pass = self._draw + 1, self._draw_of_pass + 1
        if len(draws) < len(windows):
            return result
        is_alike = all(torch.equal(draws[0], draw) for draw in draws[1:])
        sizes = [recording.size_of(window.reads[0].batch) if window.reads else 0 for window in windows]
        of_samples = not any(sizes) or sizes == [len(draw) for draw in draws]  # also where the script asks for fewer
        whole = draws[0]
        if is_order and sum(map(len, draws)) == len(result):  # of a batch's samples, within each rank's
            offsets = [sum(map(len, draws[:rank])) for rank in range(len(draws))]
            whole = torch.cat([draw + offset for draw, offset in zip(draws, offsets, strict=True)])
        elif sum(map(len, draws)) == len(result) or (is_new and of_samples and not is_alike):
            whole = torch.cat(draws)
        elif not is_alike:
            (self.folder / UNMATCHED).touch()
        if not is_new and whole.shape == result.shape:
            return result.copy_(whole)
        if is_new and whole.shape[1:] == result.shape[1:]:
            return whole.to(result)
        (self.folder / UNMATCHED).touch()
        return result

    def before_step(self, optimizer: Optimizer) -> None:
        """Save the gradients of the present window."""
        self.modules.add(optimizer)
        if self.is_tail or not self.modules.roots:
            return
        step, name = self._now
        found = recording.Replayed(
            self.modules.gradients(optimizer),
            self.modules.gradients(optimizer, self.unclipped),
            learning_rates(optimizer),
            self.schedule_steps,
            self.inputs,
            self.calls,
        )
        recording.save(tuple(found), recording.replay_path(self.folder, step, name))

    def after_step(self, optimizer: Optimizer) -> None:
        """Put the next window's weights in place."""
        if self.is_tail:
            self.end_step_of_tail()
            return
        if not self.modules.roots:
            return
        self.step, self._draw, self.inputs, self.calls, self.unclipped = self.step + 1, 0, [], 0, {}
        if self.step < len(self._plan) and not self._now[0]:
            self._draw_of_pass = 0
        if self.step < len(self._plan):
            step, name = self._now
            self.set_weights(self._windows[0][0 if name == FIRST else step].weights)
        elif self._has_tail:
            self.set_weights(self._final)
            self.begin_tail()
        else:
            self.end()

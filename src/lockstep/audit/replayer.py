"""Compute the recorded windows again in one process, from the ranks' samples, draws and weights."""

from __future__ import annotations

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
from ..files import write_json
from . import recording
from .observer import Observer, set_generators
from .patches import users_place, wrap
from .recording import BY_SHARE, FIRST, REVERSED, TOGETHER, TURNS, Alone, Read, Recording, Replayed, Window
from .tensors import are_equal, copy_batch, count_samples, join_batches, join_draws, pads_left


class _Feed:
    """The ranks' batches of a loader, joined, iteration after iteration and pass after pass."""

    def __init__(
        self, ranks: list[list[Read]], tails: list[list[Read]], passes: list[str], ahead: int, micro_batches: int
    ) -> None:
        """`ahead` batches are read before they are needed; those of the last step are of no use before another pass."""
        self._ranks, self._tails, self._passes = ranks, tails, passes
        self._ahead, self._micro_batches = ahead, micro_batches
        self._pass = self._iteration = 0
        self._items = self._join()
        self.sizes: list[list[int]] = []
        """Samples of each rank in the last batches."""

    def _join(self) -> list[tuple[list[list[Read]], bool]]:
        """Return, by iteration, each batch's reads by rank, and whether the iteration is complete."""
        name, is_last = self._passes[self._pass], self._pass == len(self._passes) - 1
        ranks = self._ranks
        if is_last and name in (TOGETHER, TURNS):
            ranks = [reads + tail for reads, tail in zip(ranks, self._tails, strict=True)]
        alone = Alone.parse(name)
        if alone is not None:
            ranks = [ranks[alone.rank]]
        iterations = sorted({read.iteration for reads in ranks for read in reads})
        items = []
        for iteration in iterations:
            reads = [[read for read in rank if read.iteration == iteration] for rank in ranks]
            batches = [[read for read in rank if not read.is_end] for rank in reads]
            longest = max(map(len, batches))
            parts = [[rank[number] for rank in batches if number < len(rank)] for number in range(longest)]
            if name == REVERSED:
                parts = [part[::-1] for part in parts]
            elif name == FIRST:
                parts = parts[:1] * longest
            elif name == TURNS:
                parts = [[read] for part in parts for read in part]
            elif alone is not None and alone.micro_batch is not None:
                begins = [number - number % self._micro_batches for number in range(longest)]
                parts = [parts[min(begin + alone.micro_batch, longest - 1)] for begin in begins]
            if not is_last and self._ahead and iteration == iterations[-1]:
                parts = parts[: -self._ahead]
            items.append((parts, any(read.is_end for rank in reads for read in rank)))
        return items

    def next_iteration(self) -> Iterator[list[Read]]:
        """Yield each batch's reads by rank; of the next pass where the record breaks off."""
        while True:
            if self._iteration >= len(self._items):
                if self._pass + 1 >= len(self._passes):
                    return
                self._pass, self._iteration = self._pass + 1, 0
                self._items = self._join()
                continue
            parts, is_complete = self._items[self._iteration]
            self._iteration += 1
            for part in parts:
                self.sizes = [*self.sizes[-3:], [count_samples(read.batch) for read in part]]
                yield part
            if is_complete or self._iteration < len(self._items):
                return


def _count_ahead(windows: list[Window], loader: int) -> int:
    """Return how many batches a loop reads before it needs them: those of its first step beyond the second's."""
    counts = [sum(read.loader == loader and not read.is_end for read in window.reads) for window in windows[:2]]
    return max(0, counts[0] - counts[1]) if len(counts) > 1 else 0


class Replayer(Observer):
    """One process, which stands for all ranks."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, passes: list[str]) -> None:
        super().__init__(folder, dtype)
        record = Recording(folder)
        self._windows = record.windows
        self._plan = [(step, name) for name in passes for step in range(record.steps)]
        self._has_tail = passes[-1] in (TOGETHER, TURNS)
        self._draw = self._draw_of_pass = 0
        self._draws_of_samples: list[int] = []
        self._pads_left = False
        self._draws = [[draw for window in windows for draw in window.draws] for windows in record.windows]
        self._final = record.read_final_weights()
        self._lengths: dict[str, int] = record.facts[0]["lengths"]
        self._training = {number for facts in record.facts for number in facts["training"]}
        reads = [[read for window in windows[: record.steps] for read in window.reads] for windows in record.windows]
        tails = [
            tail if len(windows) == record.steps else []  # windows that not all ranks have are no part of it
            for windows, tail in zip(record.windows, record.read_tails(), strict=True)
        ]

        def of_loader(ranks: list[list[Read]], number: int) -> list[list[Read]]:
            return [[read for read in rank if read.loader == number] for rank in ranks]

        self._feeds = {
            number: _Feed(
                of_loader(reads, number),
                of_loader(tails, number),
                passes,
                _count_ahead(record.windows[0], number),
                record.windows[0][0].micro_batches,
            )
            for number in {read.loader for rank in (*reads, *tails) for read in rank}
        }

    @property
    def _now(self) -> tuple[int, str]:
        return self._plan[min(self.step, len(self._plan) - 1)]

    def install(self) -> None:
        """Set the hooks; make this process a world of one rank, also where the script says otherwise."""
        super().install()

        def init(plain: Any, *args: Any, **options: Any) -> None:
            rank = options.get("rank", -1)
            if (int(os.environ.get("RANK", 0)) if rank is None or rank < 0 else rank) > 0:
                os._exit(0)  # of a script that starts its ranks itself
            self.facts["has_several_ranks"] = (options.get("world_size") or 1) > 1
            plain(*args, **options | {"world_size": 1, "rank": 0})

        wrap(dist, "init_process_group", init)

    def write_facts(self) -> None:
        """See `Observer.write_facts`."""
        if self.step and self._has_tail:
            write_json(self.folder / "replay.json", self.facts)

    def iterate(self, number: int, iteration: int, loader: DataLoader[Any], plain: Any) -> Iterator[Any]:
        """Yield the ranks' batches, joined."""
        if self.is_tail and number in self._training:
            self.end_next_epoch()
        if number not in self._feeds:
            if not self.is_tail:
                reason = f"in one process it reads a loader that its ranks do not read ({users_place()})"
                (self.folder / recording.UNREAD).write_text(reason)
            return
        for reads in self._feeds[number].next_iteration():
            batches = [read.batch for read in reads]
            with self.refuse_on_error():
                try:
                    batch = join_batches(batches)
                except ValueError as error:
                    self.refuse(str(error))
                self._pads_left = pads_left(batches)
            if (states := reads[0].generators) is not None:
                set_generators(states)
            yield copy_batch(batch)

    def count_batches(self, loader: DataLoader[Any], plain: Callable[[], int]) -> int:
        """Return the number of batches of a rank's loader; for all loaders of the data set that is trained on."""
        number = self.number_of(loader)
        if number is None:
            return plain()
        trained = [other for other in sorted(self._training) if other < len(self.loaders)]
        numbers = [*(other for other in trained if self.loaders[other].dataset is loader.dataset), number]
        lengths = [self._lengths[f"{number}"] for number in numbers if f"{number}" in self._lengths]
        return lengths[0] if lengths else plain()

    def see_root(self, number: int) -> None:
        """Set the recorded weights; let BatchNorm compute by share."""
        self.set_weights(self._windows[0][self._now[0]].weights, only=number)
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
                (self.folder / recording.UNMATCHED_ROWS).touch()
            return plain(x)

        return forward

    def _present_windows(self) -> list[Window]:
        """Return the windows whose samples the present window has: those of all ranks, or of one."""
        step, name = self._now
        windows = [windows[0 if name == FIRST else step] for windows in self._windows]
        if (alone := Alone.parse(name)) is not None:
            window = windows[alone.rank]
            if alone.micro_batch is None:
                return [window]
            count = len(window.draws) // window.micro_batches
            draws = window.draws[alone.micro_batch * count :][:count] * window.micro_batches
            return [window._replace(draws=draws)]
        return windows[::-1] if name == REVERSED else windows

    def see_draw(self, result: Tensor, is_new: bool, is_order: bool) -> Tensor:
        """Replace a draw by the ranks' recorded ones, one after the other if they are of samples."""
        if self.is_tail or not result.dim():
            return result
        windows = self._present_windows()
        draws = [window.draws[self._draw] for window in windows if self._draw < len(window.draws)]
        if self._now[1] == TURNS:
            turn, rank = divmod(self._draw_of_pass, len(self._windows))
            windows, draws = windows[:1], self._draws[rank][turn : turn + 1]
        self._draw, self._draw_of_pass = self._draw + 1, self._draw_of_pass + 1
        if len(draws) < len(windows):
            return result
        is_alike = are_equal(draws)
        sizes = [count_samples(window.batches[0]) if window.batches else 0 for window in windows]
        of_samples = not any(sizes) or sizes == [len(draw) for draw in draws]  # also where the script asks for fewer
        has_lengths = len({draw.shape[1:] for draw in draws}) > 1  # of token batches
        joint, rows = draws[0], sum(map(len, draws))
        if is_order and rows == len(result):  # of a batch's samples, within each rank's
            offsets = [sum(map(len, draws[:rank])) for rank in range(len(draws))]
            joint = torch.cat([draw + offset for draw, offset in zip(draws, offsets, strict=True)])
        elif rows == len(result) and has_lengths:
            joint = join_draws(draws, result, self._pads_left)
        elif not has_lengths and (rows == len(result) or (is_new and of_samples and not is_alike)):
            joint = torch.cat(draws)
        elif not is_alike:
            (self.folder / recording.UNMATCHED).touch()
        if rows == len(result) and len(windows) > 1:
            self._draws_of_samples.append(self._draw - 1)
        if not is_new and joint.shape == result.shape:
            return result.copy_(joint)
        if is_new and joint.shape[1:] == result.shape[1:]:
            return joint.to(result)
        (self.folder / recording.UNMATCHED).touch()
        return result

    def before_step(self, optimizer: Optimizer) -> None:
        """Save the gradients of the present window."""
        self.modules.add_optimizer(optimizer)
        if self.is_tail or not self.modules.roots:
            return
        replayed = Replayed(
            self.modules.gradients(optimizer, {}),
            self.modules.gradients(optimizer, self.unclipped),
            self.schedule_steps,
            self.inputs,
            self.calls,
            self._draws_of_samples,
        )
        recording.save(replayed, recording.replay_path(self.folder, *self._now))

    def after_step(self, optimizer: Optimizer) -> None:
        """Set the next window's weights."""
        if self.is_tail:
            self.end_step_of_tail()
            return
        if not self.modules.roots:
            return
        self.step, self._draw, self.inputs, self.calls, self.unclipped = self.step + 1, 0, [], 0, {}
        self._draws_of_samples = []
        if self.step < len(self._plan):
            step, name = self._now
            self._draw_of_pass = self._draw_of_pass if step else 0
            self.set_weights(self._windows[0][0 if name == FIRST else step].weights)
        elif self._has_tail:
            self.set_weights(self._final)
            self.begin_tail()
        else:
            self.end()

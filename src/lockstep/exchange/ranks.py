"""Several ranks, which compare in every pass and call whether all do the same."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RequestError
from ..world.world import World, new_group
from .base import MOST_PARTS, Call, Exchange, Header, Pass, check_details, check_match, on_device


class Ranks(Exchange):
    """Exchange of headers among several ranks; subclasses exchange gradients or weights."""

    checks_first = False
    """Whether backward passes contain collectives, whose sizes differ where ranks train other batches."""

    def __init__(self, world: World, *, shares_memory: bool = True) -> None:
        """`shares_memory`: ranks of one host without GPUs exchange through shared memory, if they can."""
        super().__init__(world)
        self._memory = world.memory if shares_memory and world.device.type == "cpu" else None
        self._group: dist.ProcessGroup | None = None  # from the first header on
        self._doubt: Tensor | None = None  # on a GPU: whether a header has differed, not yet read by the host

    def backward(self, backward_pass: Pass) -> Tensor | None:
        """See `Exchange.backward`: the gradients remain this rank's."""
        if not backward_pass.is_last:
            return super().backward(backward_pass)
        receive = self._start_header(self._header(backward_pass), backward_pass.weight)
        if self.checks_first and self.world.device.type == "cpu":
            self._check(receive(), is_read=True)
        super().backward(backward_pass)
        with self.world.progress.during("all-gather"):
            rows = receive()
        self._check(rows, is_read=False)
        return rows[:, 4]

    def meet(self, call: Call, number: int, details: Sequence[str] = ()) -> None:
        """See `Exchange.meet`."""
        receive = self._start_header(Header(call.kind, number, zlib.crc32(repr([*details]).encode())))
        with self.world.progress.during("all-gather"):
            rows = receive()
        calls = rows[:, :2].tolist()
        if calls.count(calls[0]) == len(calls) and len(set(rows[:, 2].tolist())) > 1:
            check_details(call, self.world.gather([*details]), self.world.progress.step)
        self._check(rows, is_read=True)

    def _header(self, backward_pass: Pass) -> Header:
        """Return the header of a pass. Ranks that train different parameters would mix their gradients."""
        trained = zlib.crc32(bytes(parameter.requires_grad for parameter in self.parameters))
        header = backward_pass.header
        return header._replace(part=header.part + MOST_PARTS * trained)

    def _start_header(self, header: Header, weight: float | Tensor = 0.0) -> Callable[[], Tensor]:
        """Begin to gather all ranks' (kind, number, part, asks, weight); return a function that waits for them.

        It returns (ranks, 5), float64.
        """
        device = self.world.device
        row = torch.cat(
            [
                torch.tensor([*header, self.asks()], dtype=torch.float64).to(device, non_blocking=True),
                on_device(weight, device)[None],
            ]
        )
        if self._memory is not None:
            with self.world.progress.during("all-reduce"):
                rows = self._memory.stack(row)
            return lambda: rows
        rows = row.new_empty(self.world.size, len(row))
        if self._group is None:
            self._group = new_group()
        work = dist.all_gather_into_tensor(rows.view(-1), row, group=self._group, async_op=True)

        def receive() -> Tensor:
            assert work is not None
            work.wait()
            return rows

        return receive

    def _check(self, rows: Tensor, *, is_read: bool) -> None:
        """Raise `RunError` for ranks with different headers. On a GPU the host waits only if `is_read`."""
        kinds = rows[:, :3]
        if not kinds.is_cpu:
            differs = (kinds != kinds[0]).any()
            self._doubt = differs if self._doubt is None else self._doubt | differs
            if not is_read:
                return
            if self._doubt.item():
                self._doubt = None
                check_match([*kinds.tolist(), [-0.5, 0, 0]], self.world.progress.step)
        read = rows.tolist()
        check_match([row[:3] for row in read], self.world.progress.step)
        self.is_asked = self.is_asked or any(row[3] for row in read)

    def _refuse_part(self, owner: str) -> None:
        """Raise `RequestError` for a `state_dict` of a part that the user would take for the whole."""
        if not self._is_whole:
            raise RequestError(f"{owner} would have this rank's part alone; the run's checkpoints have all of it.")

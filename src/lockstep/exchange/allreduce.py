"""Gradients summed over the ranks while the backward pass still runs.

As soon as a bucket's gradients are complete, its asynchronous all-reduce begins, in a separate process group, so that
collectives of the user and of synchronised BatchNorm may run in between. Buckets leave in one order on all ranks. The
first backward pass of a part only records which parameters have gradients on any rank, and how many times each
receives one (several with re-entrant checkpointing). In later passes, buckets whose parameters all have gradients leave
early, buckets with an unused parameter leave after the pass, and buckets of unused models do not leave. Buckets do not
depend on when they leave, and so neither do the bits of their sums.

No module is wrapped: the model keeps its class, methods and `state_dict`. Ranks of one host without GPUs sum through
shared memory after the pass, since there is no network to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RequestError
from ..world.world import World
from .base import Part, Pass
from .buckets import Bucket, lay_out
from .compress import CompressedSum
from .powersgd import LowRankSum, PowerSGD
from .ranks import Ranks

_BUCKET_BYTES = {"cpu": 4 << 20, "accelerator": 25 << 20}
"""On a network of 1 Gbit/s, a step with buckets of 4 MiB took three quarters of one with 25 MiB; NCCL needs more to be
busy."""

_MOST_LAYOUTS = 4  # of a loop that freezes and thaws in each step


@dataclass
class _Plan:
    """Plan from the last backward pass of a part. Only `counts` differ between ranks."""

    early: list[int]
    """Buckets whose parameters all had gradients."""
    idle: list[int]
    """Buckets without any gradient."""
    counts: list[int]
    """Gradients that this rank's parameters received per bucket; 0 if one received none."""


class AllReduce(Ranks):
    """Sums of gradients in buckets."""

    def __init__(self, world: World, *, overlap: bool = True, wire: torch.dtype | PowerSGD | None = None) -> None:
        """`wire` is the type in which gradients travel (see `CompressedSum`), or `PowerSGD`; None for their own."""
        super().__init__(world, shares_memory=wire is None)
        self._wire, self._low_rank = wire, wire if isinstance(wire, PowerSGD) else None
        if self._low_rank is not None:
            self.settings = self._low_rank.settings
        self._overlap = overlap
        self._bucket_bytes = _BUCKET_BYTES["cpu" if world.device.type == "cpu" else "accelerator"]
        self._trained = b""  # which parameters the buckets cover
        self._sparse: dict[int, nn.Parameter] = {}
        self._buckets: list[Bucket] = []
        self._place: dict[int, tuple[int, int]] = {}  # of each parameter: its bucket, and its number there
        self._plans: dict[int, _Plan] = {}  # by the number of the part
        self._layouts: dict[bytes, tuple[Any, Any, Any]] = {}  # those three, by which parameters train
        # State of the current backward pass:
        self._pass: Pass | None = None
        self._clear: Callable[[Tensor], None] | None = (
            None  # for whole buckets, if they have this pass's gradients alone
        )
        self._works: dict[int, dist.Work | CompressedSum | LowRankSum | None] = {}  # by bucket, once it has left
        self._queue: list[int] = []  # buckets that leave early, in order
        self._missing: list[int] = []  # gradients that each bucket waits for; below 0: it leaves after the pass
        self._counts: list[int] = []  # gradients that each parameter received

    def attach(self, model: nn.Module) -> None:
        """Add a model's parameters (*collective*)."""
        super().attach(model)
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                self._sparse |= {
                    index: parameter for index, parameter in enumerate(self.parameters) if parameter is module.weight
                }

    def backward(self, backward_pass: Pass) -> Tensor | None:
        """See `Exchange.backward`."""
        self._lay_out()
        part, header = backward_pass.part, self._header(backward_pass)
        if not part.flats:
            part.flats = [bucket.allocate() for bucket in self._buckets]
            part.present = bytearray(len(self.parameters))
        plan = self._plans.get(part.number)
        self._counts = [0] * len(self.parameters)
        self._works, self._queue = {}, []
        receive: Callable[[], Tensor] | None = None
        if backward_pass.is_last and self._memory is None:
            receive = self._start_header(header, backward_pass.weight)
            if plan is not None and self._overlap:
                self._queue, self._missing = list(plan.early), [count or -1 for count in plan.counts]
        self._pass = backward_pass
        self._clear = backward_pass.clear_ if backward_pass.is_last and not any(part.present) else None
        try:
            with self._user_hooks.removed(self.parameters, self._hooks) as part.hooks:
                backward_pass.run()
        finally:
            self._pass = None
        if not backward_pass.is_last:
            return None
        return self._finish(part, plan, receive or self._start_header(header, backward_pass.weight))

    def divide(self, part: Part, divisor: Tensor) -> None:
        """See `Exchange.divide`."""
        for flat in part.flats:
            flat.div_(divisor)
        for gradient in part.sparse.values():
            gradient.div_(divisor)

    def state(self) -> dict[str, Tensor]:
        """See `Exchange.state`."""
        return {} if self._low_rank is None else self._low_rank.state(self.names())

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Exchange.load_state`."""
        if self._low_rank is not None:
            self._low_rank.load_state(tensors, self.names())

    def _lay_out(self) -> None:
        self._trained = bytes(parameter.requires_grad for parameter in self.parameters)
        if self._trained not in self._layouts:
            numbered = [(index, parameter) for index, parameter in enumerate(self.parameters) if self._trained[index]]
            if self._low_rank is not None and not self._layouts:
                self._low_rank.check([parameter for _, parameter in numbered])
            while len(self._layouts) >= _MOST_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            buckets = lay_out([pair for pair in numbered if pair[0] not in self._sparse], self._bucket_bytes)
            place = {
                index: (position, number)
                for position, bucket in enumerate(buckets)
                for number, index in enumerate(bucket.indices)
            }
            self._layouts[self._trained] = buckets, place, {}
            for index, parameter in numbered:
                if parameter not in self._hooks:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._hooks[parameter] = register(partial(self._take, index))
        self._buckets, self._place, self._plans = self._layouts[self._trained]

    def _take(self, index: int, parameter: Tensor) -> None:
        """Move a gradient that the backward pass has computed into its bucket."""
        backward_pass, gradient = self._pass, parameter.grad
        if backward_pass is None or gradient is None:  # a backward pass outside of the session
            return
        parameter.grad = None
        if backward_pass.zeroed is True:
            return
        part = backward_pass.part
        self._counts[index] += 1
        if self._clear is None or index in self._sparse:
            backward_pass.clear_(gradient)
        if index in self._sparse:
            total = part.sparse.get(index)
            part.sparse[index] = gradient if total is None else total + gradient
            part.present[index] = True
            return
        position, number = self._place[index]
        if position in self._works:
            raise RequestError(
                f"A parameter of shape {tuple(parameter.shape)} got a gradient after its exchange had begun, as when "
                "re-entrant checkpointing uses it a different number of times from step to step; use checkpoint(…, "
                "use_reentrant=False)."
            )
        view = self._buckets[position].view(part.flats[position], number)
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if part.present[index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            part.present[index] = True
        if self._queue:
            self._missing[position] -= 1
            while self._queue and self._missing[self._queue[0]] == 0:
                self._launch(part, self._queue.pop(0))

    def _launch(self, part: Part, position: int) -> None:
        """Begin the sum of a bucket. Missing gradients of this rank are zero."""
        bucket, flat = self._buckets[position], part.flats[position]
        flags = bucket.flags(flat)
        flags.fill_(1)
        for number, index in enumerate(bucket.indices):
            if not part.present[index]:
                bucket.view(flat, number).zero_()
                flags[number] = 0
        if self._clear is not None:
            self._clear(flat[: bucket.elements])
        self._works[position] = None
        if self._memory is not None:
            self._memory.sum_(flat)
        elif isinstance(self._wire, torch.dtype) and self._group is not None:
            self._works[position] = CompressedSum(flat, self._wire, self._group)
        elif self._low_rank is not None and self._group is not None and self._low_rank.applies(bucket):
            self._works[position] = LowRankSum(self._low_rank, bucket, flat, part.number, self._group)
        else:
            self._works[position] = dist.all_reduce(flat, group=self._group, async_op=True)

    def _finish(self, part: Part, plan: _Plan | None, receive: Callable[[], Tensor]) -> Tensor:
        """Sum the remaining buckets, wait for all sums, set each `.grad`; return all ranks' weights (ranks,)."""
        progress = self.world.progress
        with progress.during("all-reduce"):
            rows = receive()
            self._check(rows, is_read=plan is None)  # the host then waits in any case
            idle = [] if plan is None else self._still_idle(part, plan)
            for position in (*(() if plan is None else plan.early), *range(len(self._buckets))):
                if position not in self._works and position not in idle:
                    self._launch(part, position)
            for pending in self._works.values():
                if isinstance(pending, CompressedSum | LowRankSum):
                    pending.send_sum()
            for pending in self._works.values():
                if pending is not None:
                    pending.wait()
            sparse = [self._sum_sparse(index, part) for index in self._sparse if self._trained[index]]
        gradients = [item for item in sparse if item is not None]
        next_plan = _Plan([], [], [])
        for position, bucket in enumerate(self._buckets):
            counts = [self._counts[index] for index in bucket.indices]
            next_plan.counts.append(0 if 0 in counts else sum(counts))
            flat = part.flats[position]
            bucket.release(flat)
            if position not in self._works:
                next_plan.idle.append(position)
                continue
            has = [bool(part.present[index]) for index in bucket.indices]
            if plan is None or not all(has):  # only then the host waits for the flags
                has = (bucket.flags(flat) > 0).tolist()
            if all(has) or not any(has):
                (next_plan.early if all(has) else next_plan.idle).append(position)
            gradients += [
                (parameter, bucket.view(flat, number).detach())  # else autograd records a change of one view in all
                for number, parameter in enumerate(bucket.parameters)
                if has[number]
            ]
        if plan is None or idle != plan.idle:
            self._plans[part.number] = next_plan
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return rows[:, 4]

    def _still_idle(self, part: Part, plan: _Plan) -> list[int]:
        """Return the plan's idle buckets without a gradient on any rank in this pass (*collective*)."""
        if not plan.idle:
            return []
        used_here = [any(part.present[index] for index in self._buckets[position].indices) for position in plan.idle]
        used = self.world.max(torch.tensor(used_here, dtype=torch.int32)).tolist()
        return [position for position, is_used in zip(plan.idle, used, strict=True) if not is_used]

    def _sum_sparse(self, index: int, part: Part) -> tuple[nn.Parameter, Tensor] | None:
        """Sum a sparse gradient over the ranks; None if no rank has one (*collective*)."""
        parameter, gradient = self._sparse[index], part.sparse.get(index)
        has_gradient = self.world.max(torch.tensor(int(gradient is not None))).item()
        if not has_gradient:
            return None
        if gradient is None:
            gradient = torch.sparse_coo_tensor(
                torch.zeros(1, 0, dtype=torch.int64, device=parameter.device),
                parameter.detach().new_zeros(0, *parameter.shape[1:]),
                parameter.shape,
            )
        gradient = gradient.coalesce()
        rows = torch.cat(self.world.gather_variable_length(gradient.indices().t().contiguous()))
        values = torch.cat(self.world.gather_variable_length(gradient.values()))
        total = torch.sparse_coo_tensor(rows.t(), values, parameter.shape).coalesce()
        part.sparse[index] = total
        return parameter, total

"""Gradients as matrices of low rank: PowerSGD (Vogels et al. 2019, arXiv 1905.13727).

A gradient of shape (n, …) is a matrix M (n, m). The ranks sum P = M Q (n, r), with Q (m, r) of the last step, make its
columns orthonormal, and sum Q = Mᵀ P. All of them take P Qᵀ for the sum of their matrices: r (n + m) numbers travel in
place of n m. The remainder, a rank's M minus its part of P Qᵀ, is added to its gradient of the next step: the ranks
together owe what they have not sent. The mathematics are those of torch's `powerSGD_hook`, per parameter, with sums in
place of means.

Gradients that this would shorten by less than half, such as vectors, are summed as they are. Errors are in the units of
the sums that travel: under `session.backward(loss, weight=tokens)`, the gradients of tokens, before they are divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RequestError
from ..world.world import World
from .buckets import Bucket

_LEAST_RATE = 2  # times fewer numbers than the matrix has; torch's default


class _Key(NamedTuple):
    """Gradients with separate state: each loss of a batch has its errors, since a loop may drop those of one loss."""

    part: int
    parameter: nn.Parameter


class PowerSGD:
    """Errors and factors of all matrices, from step to step."""

    def __init__(self, world: World, *, rank: int, start: int) -> None:
        """Compress to `rank`, from step `start` on."""
        self.errors: dict[_Key, Tensor] = {}
        """What this rank has not sent: (n, m)."""
        self.factors: dict[_Key, Tensor] = {}
        """The last Q of each matrix: (m, r), the same on all ranks."""
        self.world, self._rank, self._start = world, rank, start
        self.settings: dict[str, int | str] = {"powersgd-rank": rank, "powersgd-start": start}

    def check(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise `RequestError` if nothing of the gradients of `parameters` is compressed."""
        if not any(map(self.rank_of, parameters)):
            raise RequestError(
                f"--exchange powersgd has nothing to compress: no trained parameter is a matrix that rank {self._rank} "
                "shortens by half; give a smaller --powersgd-rank, or leave --exchange out."
            )

    def rank_of(self, parameter: nn.Parameter) -> int:
        """Return the rank r of a parameter's matrices; 0 for gradients that are summed as they are."""
        if parameter.dim() < 2 or parameter.is_complex() or not parameter.numel():
            return 0
        n, m = len(parameter), parameter.numel() // len(parameter)
        rank = min(n, m, self._rank)
        return rank if rank * (n + m) * _LEAST_RATE < n * m else 0

    def applies(self, bucket: Bucket) -> bool:
        """Return whether the bucket's sum is compressed in this step."""
        return self.world.progress.step >= self._start and any(map(self.rank_of, bucket.parameters))

    def state(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """See `Exchange.state`: errors are (ranks, n, m), in rank order."""
        state: dict[str, Tensor] = {}
        for key, error in self.errors.items():
            by_rank, name = self.world.stack(error), f"{key.part}/{names[key.parameter]}"
            if self.world.is_main:  # in host memory: a device need not have room for all ranks' errors
                state |= {f"errors/{name}": by_rank.cpu(), f"factors/{name}": self.factors[key]}
        return state

    def load_state(self, tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]) -> None:
        """See `Exchange.load_state`. Another number of ranks divides all errors evenly, so that their sum remains."""
        self.errors, self.factors = {}, {}
        by_name = {name: parameter for parameter, name in names.items()}
        ranks = self.world.size
        for text, tensor in tensors.items():
            kind, part, name = text.split("/", 2)
            key = _Key(int(part), by_name[name])
            like = torch.empty(0, device=key.parameter.device, dtype=_dtype(key.parameter))
            if kind == "errors":
                error = tensor[self.world.rank] if len(tensor) == ranks else tensor.sum(0) / ranks
                self.errors[key] = error.to(like, copy=True)
            elif tensor.shape[1] == self.rank_of(key.parameter):  # else another --powersgd-rank begins with a new one
                self.factors[key] = tensor.to(like, copy=True)


class _Matrix(NamedTuple):
    key: _Key
    gradient: Tensor
    """The view in the bucket: (n, …)."""
    flag: Tensor
    """After the sum: the number of ranks with a gradient (0-dim)."""
    matrix: Tensor
    """The gradient and this rank's error: M (n, m)."""
    factor: Tensor
    """The last step's Q (m, r), with orthonormal columns."""


class LowRankSum:
    """Sum of a bucket of part number `part`, in place. Begins when it is made (*collective*)."""

    def __init__(self, codec: PowerSGD, bucket: Bucket, flat: Tensor, part: int, group: dist.ProcessGroup) -> None:
        self._codec, self._group = codec, group
        self._matrices: list[_Matrix] = []
        self._exact = [bucket.flags(flat)]  # the tensors that are summed as they are
        bounds = [*bucket.offsets, bucket.elements]
        for number, parameter in enumerate(bucket.parameters):
            if not (rank := codec.rank_of(parameter)):
                self._exact.append(flat[bounds[number] : bounds[number + 1]])
                continue
            key, gradient = _Key(part, parameter), bucket.view(flat, number)
            matrix = gradient.reshape(len(gradient), -1).to(_dtype(parameter), copy=True)
            if key in codec.errors:
                matrix += codec.errors[key]
            factor = codec.factors.get(key)
            if factor is None:
                factor = first_factor(matrix.shape[1], rank).to(matrix)
            self._matrices.append(_Matrix(key, gradient, bucket.flags(flat)[number], matrix, torch.linalg.qr(factor).Q))
        self._start([*self._exact, *(item.matrix @ item.factor for item in self._matrices)], flat.dtype)

    def send_sum(self) -> None:
        """Make the bases, and begin to sum the factors (*collective*): in one order on all ranks."""
        shapes = [tensor.shape for tensor in self._exact]
        sums = self._finish([*shapes, *((len(item.matrix), item.factor.shape[1]) for item in self._matrices)])
        for tensor in self._exact:
            tensor.copy_(next(sums))
        self._bases = [torch.linalg.qr(next(sums).to(item.matrix)).Q for item in self._matrices]
        factors = [item.matrix.T @ basis for item, basis in zip(self._matrices, self._bases, strict=True)]
        self._start(factors, self._exact[0].dtype)

    def wait(self) -> None:
        """Return once the bucket has the sum. Gradients that no rank has, or that are not finite, leave the errors."""
        codec = self._codec
        factors = self._finish([item.factor.shape for item in self._matrices])
        for item, basis, total in zip(self._matrices, self._bases, factors, strict=True):
            factor = total.to(item.matrix)
            approximation = basis @ factor.T
            item.gradient.copy_(approximation.view(item.gradient.shape))
            is_sent = (item.flag > 0) & factor.isfinite().all()
            error = item.matrix - approximation / codec.world.size
            last_error = codec.errors.get(item.key)
            codec.errors[item.key] = torch.where(is_sent, error, 0.0 if last_error is None else last_error)
            codec.factors[item.key] = torch.where(is_sent, factor, item.factor)
        del self._matrices, self._exact, self._bases, self._message

    def _start(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._message = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
        self._work = dist.all_reduce(self._message, group=self._group, async_op=True)

    def _finish(self, shapes: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Wait for the message; yield its tensors, of these shapes."""
        assert self._work is not None
        self._work.wait()
        parts = torch.split(self._message, [math.prod(shape) for shape in shapes])
        return (part.view(*shape) for part, shape in zip(parts, shapes, strict=True))


def first_factor(columns: int, rank: int) -> Tensor:
    """Return the first Q (columns, rank), a function of its shape, so that it is the same on all ranks.

    By NumPy: torch's draws within a loop are taken to be the loop's.
    """
    return torch.from_numpy(np.random.default_rng(columns).standard_normal((columns, rank)))


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the type of a parameter's matrices: float32 for 16 bits, in which nothing can be orthogonalised."""
    return torch.promote_types(parameter.dtype, torch.float32)

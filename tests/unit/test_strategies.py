"""Replicas in threads: their arithmetic, statistics and exceptions; the laws hold their curves to one process's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import RequestError
from lockstep.exchange.replicas import ThreadReplicas, replicate


def test_autocast_holds_in_every_replica() -> None:
    model, x = nn.Linear(4, 2), torch.randn(9, 4)
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert ThreadReplicas(model, 3)(x).dtype == dtype
    assert ThreadReplicas(model, 3)(x).dtype == torch.float32
    assert seen == [torch.bfloat16] * 3 + [torch.float16] * 3 + [torch.float32] * 3


def test_the_first_replicas_statistics_are_kept() -> None:
    torch.manual_seed(1)
    model, alone = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    ThreadReplicas(model, 2)(x)
    alone(x[:4])
    torch.testing.assert_close(dict(model.named_buffers()), dict(alone.named_buffers()))


def test_a_copy_of_a_compiled_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    devices = [torch.device("cpu")] * 2
    replicate(model, devices, "dp")
    model.compile()
    with pytest.raises(RequestError, match="--compile cannot work under --strategy dp on 2 devices"):
        replicate(model, devices, "dp")


class _Moody(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if (x < 0).any():
            raise ValueError("a negative sample")
        return super().forward(x)


def test_an_exception_in_a_replica_is_raised() -> None:
    for at in (0, 5):
        with pytest.raises(ValueError, match="a negative sample"):
            ThreadReplicas(_Moody(1, 1), 3)(torch.ones(6, 1).index_fill(0, torch.tensor([at]), -1))

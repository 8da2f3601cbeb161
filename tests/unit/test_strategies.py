"""Replicas in threads are the plain module: outputs, gradients and running statistics, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.batching import BatchPlan
from lockstep.strategies.data_parallel import ThreadReplicas


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).double()


def _pass(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    out = module(x)
    module.zero_grad()
    (out**2).sum().backward()
    return out.detach(), [item.grad.clone() for item in module.parameters() if item.grad is not None]


@pytest.mark.parametrize(("samples", "replicas"), [(29, 2), (64, 3), (3, 4), (0, 2)])
def test_replicas_are_the_plain_module_in_the_shares_of_ranks(samples: int, replicas: int) -> None:
    model = _net()
    x = torch.randn(samples, 1, 8, 8, dtype=torch.float64)  # a batch without a sample passes, too
    expected, gradients = _pass(model, x)
    sizes: list[int] = []
    model.get_submodule("0").register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
    found, theirs = _pass(ThreadReplicas(model, replicas), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert len(theirs) == len(gradients) == 4
    torch.testing.assert_close(theirs, gradients, rtol=1e-12, atol=1e-12)
    plan = BatchPlan(global_size=max(samples, replicas), ranks=replicas, accumulation=1)
    shares = [sum(map(len, plan.split(0, samples, rank))) for rank in range(replicas)]
    assert sorted(sizes) == (sorted(share for share in shares if share) or [0])


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


class _Moody(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if (x < 0).any():
            raise ValueError("a negative sample")
        return super().forward(x)


def test_an_exception_in_a_replica_is_raised() -> None:
    for at in (0, 5):
        with pytest.raises(ValueError, match="a negative sample"):
            ThreadReplicas(_Moody(1, 1), 3)(torch.ones(6, 1).index_fill(0, torch.tensor([at]), -1))

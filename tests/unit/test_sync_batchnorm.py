"""What conversion to synchronous BatchNorm keeps, and what it refuses; equality with one process is tested on ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.errors import RequestError
from lockstep.models import table
from lockstep.nn.sync_batchnorm import SyncBatchNorm, convert, has_batchnorm
from lockstep.topology import Topology
from lockstep.world import World

# Two ranks by name; without a process group their sums are this rank's.
PAIR = World(Topology(size=2, local_size=2), torch.device("cpu"))


def _norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("name", ["resnet8", "pyramidnet-20-48", "convnet-small", "mlp", "shufflenet_v2_x0_5"])
def test_conversion_keeps_the_parameters_and_the_state(name: str) -> None:
    model = table.build(name, classes=10, in_channels=3, image_size=32)
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    norms = len(_norms(model))
    converted = convert(model, PAIR)
    assert [(key, id(value)) for key, value in converted.named_parameters()] == [(k, id(v)) for k, v in before.items()]
    assert list(converted.state_dict()) == keys
    assert [type(norm) for norm in _norms(converted)] == [SyncBatchNorm] * norms
    assert has_batchnorm(converted) == (norms > 0)


def test_a_world_of_one_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    assert convert(model, World.alone()) is model
    assert type(model[0]) is nn.BatchNorm1d


def test_a_model_that_is_a_batchnorm() -> None:
    assert isinstance(convert(nn.BatchNorm3d(3), PAIR), SyncBatchNorm)


def test_a_shared_layer_stays_one_layer() -> None:
    norm = nn.BatchNorm1d(3)
    model = convert(nn.Sequential(norm, nn.Linear(3, 3), norm), PAIR)
    assert isinstance(model, nn.Sequential)
    assert model[0] is model[2]


def test_hooks_and_mode_are_kept() -> None:
    norm = nn.BatchNorm1d(3).eval()
    called = []
    norm.register_forward_hook(lambda *_: called.append(True))
    converted = convert(norm, PAIR)
    converted(torch.randn(2, 3))
    assert called == [True]
    assert not converted.training


def test_converting_twice_changes_nothing() -> None:
    once = convert(nn.Sequential(nn.BatchNorm1d(3)), PAIR)
    assert isinstance(once, nn.Sequential)
    first = once[0]
    again = convert(once, PAIR)
    assert isinstance(again, nn.Sequential)
    assert again[0] is first


class _WithActivation(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_a_batchnorm_with_its_own_behaviour_is_refused() -> None:
    with pytest.raises(RequestError, match=r"Layer '0' is a _WithActivation.*--batchnorm local"):
        convert(nn.Sequential(_WithActivation(3)), PAIR)


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2), (3, 3, 2, 2)])
def test_the_gradient_is_that_of_the_function(shape: tuple[int, ...]) -> None:
    layer = SyncBatchNorm.of(nn.BatchNorm1d(3, track_running_stats=False).double(), World.alone())
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.tensor([0.5, -2.0, 1.5], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        return y

    assert torch.autograd.gradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_gives_torchs_numbers(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(5)
    x, dy = (
        (torch.randn((6, 3, 4, 4), generator=generator) + 2).to(dtype).to(memory_format=memory_format) for _ in range(2)
    )
    results = []
    for layer in (nn.BatchNorm2d(3), SyncBatchNorm.of(nn.BatchNorm2d(3), World.alone())):
        mine = x.clone().requires_grad_()
        y = layer(mine)
        y.backward(dy)
        assert y.is_contiguous(memory_format=memory_format)
        results.append(
            (y.detach(), mine.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var)
        )
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(results[0], results[1], **tolerance)


def test_torchs_own_synchronous_layer_is_replaced_too() -> None:
    assert type(convert(nn.SyncBatchNorm(3), PAIR)) is SyncBatchNorm


def test_a_layer_with_a_group_of_its_own_is_refused() -> None:
    layer = nn.SyncBatchNorm(3, process_group=object())
    with pytest.raises(RequestError, match="is a SyncBatchNorm, a BatchNorm of its own kind"):
        convert(layer, PAIR)


def test_a_gpu_has_the_same_layer() -> None:
    world = World(PAIR.topology, torch.device("cuda", 0))
    assert type(convert(nn.BatchNorm2d(3), world)) is SyncBatchNorm

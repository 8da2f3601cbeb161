"""What conversion to synchronous BatchNorm keeps, and what it refuses; equality with one process is tested on ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import RequestError
from lockstep.models import table
from lockstep.nn.sync_batchnorm import FoldedBatchNorm2d, SyncBatchNorm, convert, fold, has_batchnorm
from lockstep.strategies.data_parallel import ThreadReplicas
from lockstep.topology import Topology
from lockstep.world import World

from ..models import Normed

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


@pytest.mark.parametrize("shape", [(6, 3, 4, 4), (4, 21, 8, 8), (3, 5, 3, 3), (2, 32, 5, 7), (5, 7, 1, 1)], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_rank_gives_torchs_numbers(
    dtype: torch.dtype, memory_format: torch.memory_format, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(5)
    x, dy = ((torch.randn(shape, generator=generator) + 2).to(dtype) for _ in range(2))
    mine = SyncBatchNorm.of(nn.BatchNorm2d(shape[1]), World.alone())
    results = []
    # torch's answer in float64, from the contiguous order: in float32 with channels last it is the less exact one.
    for layer, exact in ((nn.BatchNorm2d(shape[1]).double(), torch.float64), (mine, dtype)):
        layer.weight.data.copy_(torch.linspace(0.5, 2, shape[1]))
        if dtype == torch.float64:
            layer.double()
        order = memory_format if layer is mine else torch.contiguous_format
        given = x.to(exact).to(memory_format=order, copy=True).requires_grad_()
        y = layer(given)
        assert y.is_contiguous(memory_format=order)
        y.relu_().backward(dy.to(exact))  # in place, as the layers after it do
        found = [y.detach(), given.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]
        known = [each for each in found if each is not None]
        assert len(known) == len(found)
        results.append([each.double() for each in known])
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


def test_images_that_are_not_dense_are_read_right() -> None:
    generator = torch.Generator().manual_seed(6)
    wide = torch.randn(4, 21, 8, 16, generator=generator).to(memory_format=torch.channels_last)
    found = []
    for layer in (nn.BatchNorm2d(21), SyncBatchNorm.of(nn.BatchNorm2d(21), World.alone())):
        x = wide.clone(memory_format=torch.preserve_format).requires_grad_()
        y = layer(x[..., ::2])
        y.sin().sum().backward()  # the gradient comes in the order of y
        found.append((y.detach(), x.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 21, 16, 1), (16, 21, 1, 1), (1, 21, 4, 4), (2, 16, 1, 8), (3, 1, 4, 4)], ids=str)
@pytest.mark.parametrize("spread", [False, True])
def test_sides_of_one_and_gradients_that_are_spread(shape: tuple[int, ...], spread: bool) -> None:
    # A sum's gradient is one number for all elements, whatever their number: no dense tensor.
    generator = torch.Generator().manual_seed(11)
    x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
    dy = dy[:, :1, :1, :1].expand(shape) if spread else dy
    found = []
    for layer in (nn.BatchNorm2d(shape[1]), SyncBatchNorm.of(nn.BatchNorm2d(shape[1]), World.alone())):
        given = x.to(memory_format=torch.channels_last, copy=True).requires_grad_()
        layer(given).backward(dy)
        found.append((given.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_no_sample_is_to_one_rank_what_it_is_to_torch(options: dict[str, Any]) -> None:
    # A rank whose share is empty, under statistics of each rank's own.
    found = []
    for layer in (nn.BatchNorm2d(21, **options), fold(nn.Sequential(nn.BatchNorm2d(21, **options)))):
        for count in (4, 0, 4):
            x = torch.randn(count, 21, 4, 4, generator=torch.Generator().manual_seed(count)).requires_grad_()
            y = layer(x)
            y.sum().backward()
            assert x.grad is not None
        found.append([y.detach(), *(item.grad for item in layer.parameters()), *layer.buffers()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_too_few_values_are_told_with_where_they_were_counted() -> None:
    x = torch.zeros(1, 21, 1, 1)
    for world, where in ((World.alone(), "on this rank"), (PAIR, "on all ranks")):
        with pytest.raises(ValueError, match=f"more than 1 value per channel in training, found 1 {where}"):
            SyncBatchNorm.of(nn.BatchNorm2d(21), world)(x)


@pytest.mark.parametrize("shape", [(4, 16, 2, 2), (4, 32, 2, 2), (21,)])
@pytest.mark.parametrize("training", [True, False])
def test_other_channels_are_refused(shape: tuple[int, ...], training: bool) -> None:
    layer = SyncBatchNorm.of(nn.BatchNorm2d(21, track_running_stats=False), World.alone()).train(training)
    with pytest.raises(ValueError, match="BatchNorm of 21 channels takes"):
        layer(torch.zeros(shape))


def test_a_copy_computes_the_same_apart_from_the_original() -> None:
    model = fold(nn.Sequential(nn.BatchNorm2d(21)))
    copied = copy.deepcopy(model)
    x = torch.randn(4, 21, 4, 4, generator=torch.Generator().manual_seed(12))
    assert torch.equal(copied(x), model(x))
    copied(x)
    assert copied.get_buffer("0.num_batches_tracked") == 2
    assert model.get_buffer("0.num_batches_tracked") == 1
    model.load_state_dict(copied.state_dict())
    assert torch.equal(model.get_buffer("0.running_var"), copied.get_buffer("0.running_var"))


def test_replicas_in_threads_have_statistics_of_their_own() -> None:
    x = torch.randn(6, 21, 4, 4, generator=torch.Generator().manual_seed(13)).to(memory_format=torch.channels_last)
    found = []
    for model in (nn.Sequential(nn.BatchNorm2d(21)), fold(nn.Sequential(nn.BatchNorm2d(21)))):
        y = ThreadReplicas(model, 3)(x)
        y.sin().sum().backward()
        found.append([y.detach(), *(item.grad for item in model.parameters()), *model.buffers()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_gradient_in_another_order_of_memory() -> None:
    x = torch.randn(4, 21, 8, 8, generator=torch.Generator().manual_seed(7))
    dy = torch.randn(4, 21, 8, 8, generator=torch.Generator().manual_seed(8))
    grads = []
    for order in (torch.contiguous_format, torch.channels_last):
        given = x.to(memory_format=order, copy=True).requires_grad_()
        SyncBatchNorm.of(nn.BatchNorm2d(21), World.alone())(given).backward(dy)
        grads.append(given.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


def test_only_layers_that_are_slow_on_a_cpu_are_folded() -> None:
    class Own(nn.BatchNorm2d):
        """Whatever it does, it stays."""

    model = nn.Sequential(nn.BatchNorm2d(21), nn.BatchNorm2d(32), nn.BatchNorm1d(21), Own(21))
    keys, parameters = list(model.state_dict()), [id(each) for each in model.parameters()]
    quick = fold(model)
    assert [type(each) for each in quick.children()] == [FoldedBatchNorm2d, nn.BatchNorm2d, nn.BatchNorm1d, Own]
    assert (list(quick.state_dict()), [id(each) for each in quick.parameters()]) == (keys, parameters)


def test_torchs_own_synchronous_layer_is_replaced_too() -> None:
    assert type(convert(nn.SyncBatchNorm(3), PAIR)) is SyncBatchNorm


def test_a_layer_with_a_group_of_its_own_is_refused() -> None:
    layer = nn.SyncBatchNorm(3, process_group=object())
    with pytest.raises(RequestError, match="is a SyncBatchNorm, a BatchNorm of its own kind"):
        convert(layer, PAIR)


def test_a_compiler_leaves_the_exchange_alone(caplog: pytest.LogCaptureFixture) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = convert(Normed(classes=3, in_channels=1, image_size=8), PAIR)
    plain = copy.deepcopy(model)
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    try:
        torch.compile(model, backend=backend)(x).sin().sum().backward()
    finally:
        torch.compiler.reset()
    plain(x).sin().sum().backward()
    assert len(graphs) == 2, "what comes before it, and what comes after"
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert not told, "else a page of text for each layer"
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)

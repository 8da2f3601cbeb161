"""What conversion to synchronous BatchNorm keeps, and one rank's numbers; those of several are in tests/ranks."""

from __future__ import annotations

import copy
import logging
import pickletools
import weakref
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import fuse_conv_bn_eval
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import RequestError
from lockstep.models import table
from lockstep.nn import cuda_kernels, sync_batchnorm
from lockstep.nn.sync_batchnorm import SyncBatchNorm, convert, has_batchnorm, restore, synchronous
from lockstep.world.topology import Topology
from lockstep.world.world import World

from ..kernels import KERNELS
from ..models import Normed

# Two ranks by name; without a process group their sums are this rank's.
PAIR = World(Topology(size=2, local_size=2), torch.device("cpu"))


def _drawn(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _alone(channels: int = 21, **options: Any) -> Any:
    return SyncBatchNorm.of(nn.BatchNorm2d(channels, **options), World.alone())


@pytest.mark.parametrize("name", ["pyramidnet-20-48", "mlp", "shufflenet_v2_x0_5"])
def test_conversion_keeps_layers_parameters_and_state(name: str) -> None:
    model = table.build_for(name, classes=10, shape=(3, 32, 32))
    before, keys = [(key, id(value)) for key, value in model.named_parameters()], list(model.state_dict())
    # The very objects, and still of their kind: a user's own code may hold them, or look for them by that.
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    assert convert(convert(model, PAIR), PAIR) is model
    assert [(key, id(value)) for key, value in model.named_parameters()] == before
    assert list(model.state_dict()) == keys
    found = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    assert all(now is then and synchronous(now) for now, then in zip(found, norms, strict=True))
    assert has_batchnorm(model) == bool(norms)


def test_every_kind_of_torchs_is_converted_and_others_are_refused() -> None:
    class WithActivation(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm3d(3), nn.SyncBatchNorm(3))
    kinds = [type(each) for each in model]
    assert not any(synchronous(each) for each in convert(model, World.alone()).children())
    assert all(synchronous(each) for each in convert(model, PAIR).children())
    assert [type(each) for each in model] == kinds
    restore(model)
    assert not any("forward" in vars(each) for each in model)
    for layer in (WithActivation(3), nn.SyncBatchNorm(3, process_group=object())):
        with pytest.raises(RequestError, match=rf"Layer '0' is a {type(layer).__name__}.*--batchnorm local"):
            convert(nn.Sequential(layer), PAIR)


SHAPES = [(6, 3, 4, 4), (4, 21, 8, 8), (3, 5, 3, 3), (2, 32, 5, 7), (5, 7, 1, 1)]
FLAT = [(1, 21, 16, 1), (16, 21, 1, 1), (1, 21, 4, 4), (2, 16, 1, 8), (3, 1, 4, 4)]
ORDERS = (torch.contiguous_format, torch.channels_last)


def _pass(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return the output, the gradients and the statistics, in float64; what follows works in place."""
    given = x.detach().requires_grad_()
    y = layer(given)
    y.relu_().backward(dy)
    assert given.grad is not None
    found = [y.detach(), given.grad, *(each.grad for each in layer.parameters()), *layer.buffers()]
    return [each.double() for each in found if each is not None]


@pytest.mark.parametrize("affine", [True, False])
def test_operators_agree_with_their_rules_for_the_compiler(affine: bool) -> None:
    layer = SyncBatchNorm.of(nn.BatchNorm2d(3, affine=affine), PAIR)
    forward: Any = synchronous(layer)
    x, dy, statistics, order = _drawn(4, 3, 2, 2), _drawn(4, 3, 2, 2), (torch.zeros(3), torch.ones(3)), torch.zeros(())
    shared = order, 1e-5, False, forward.key
    moments = [torch.zeros(3), torch.ones(3), torch.tensor([16], dtype=torch.int32)]
    operators = torch.ops.lockstep
    torch.library.opcheck(operators.batch_norm_statistics.default, (x, *statistics, None, order, 0.1, *shared[1:]))
    inputs = (x.clone().requires_grad_(), layer.weight, layer.bias, moments, *shared)
    torch.library.opcheck(operators.batch_norm_normalise.default, inputs)
    weight = layer.weight.detach() if affine else None
    for exchanges in (True, False):
        torch.library.opcheck(operators.batch_norm_gradients.default, (dy, x, weight, moments, *shared, exchanges))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_rank_gives_torchs_numbers(dtype: torch.dtype, order: torch.memory_format) -> None:
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    for shape in [*SHAPES, *(FLAT if dtype != torch.bfloat16 else [])]:
        x, dy = (_drawn(*shape) + 2).to(dtype), _drawn(*shape, seed=6).to(dtype)
        gradients = {
            "dense": dy.to(memory_format=order),
            "in another order": dy.to(memory_format=ORDERS[order is ORDERS[0]]),
            "one number for all": dy[:1, :1, :1, :1].expand(shape),  # as a sum's is: no dense tensor
        }
        for name, gradient in gradients.items():
            # torch's answer in float64, from the contiguous order: in float32 with channels last it is less exact.
            exact, mine = nn.BatchNorm2d(shape[1]).double(), _alone(shape[1])
            for layer in (exact, mine):
                layer.weight.data.copy_(torch.linspace(0.5, 2, shape[1]))
            mine = mine.double() if dtype == torch.float64 else mine
            given = x.to(memory_format=order)
            expected, found = _pass(exact, x.double(), gradient.double()), _pass(mine, given, gradient)
            said = partial("{}: {}".format, name)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=said)
            assert mine(given).is_contiguous(memory_format=order)


def test_pickles_and_what_torch_makes_of_a_model_are_plain(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    expected, x = copy.deepcopy(model), _drawn(4, 3, 6, 6)
    expected(x)
    convert(model, PAIR)
    model(x)
    torch.save(model, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        named = [argument for _, argument, _ in pickletools.genops(archive.read("model/data.pkl"))]
    assert "torch.nn.modules.batchnorm BatchNorm2d" in named
    assert not [name for name in named if "lockstep" in str(name)]
    read = torch.load(tmp_path / "model.pt", weights_only=False)
    assert synchronous(read[1]) is None
    torch.testing.assert_close(read.eval()(x), expected.eval()(x))
    fused = fuse_conv_bn_eval(*model.eval())
    torch.testing.assert_close(fused(x), expected(x))
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), expected(x))


def test_a_model_is_freed_without_the_garbage_collector() -> None:
    model = convert(nn.Sequential(nn.BatchNorm2d(4)), PAIR)
    norm = weakref.ref(model[0])  # type: ignore[index]
    model(_drawn(4, 4, 2, 2))
    del model
    assert norm() is None


def test_too_few_values_and_other_channels_are_told() -> None:
    for world in (World.alone(), PAIR):
        with pytest.raises(ValueError, match="more than 1 value per channel in training, found 1"):
            SyncBatchNorm.of(nn.BatchNorm2d(21), world)(torch.zeros(1, 21, 1, 1))
    for shape in ((4, 32, 2, 2), (21,)):
        with pytest.raises(ValueError, match="BatchNorm of 21 channels takes"):
            _alone(track_running_stats=False)(torch.zeros(shape))


def test_a_compiled_model_is_one_graph(caplog: pytest.LogCaptureFixture) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = convert(Normed(classes=3, in_channels=1, image_size=8), PAIR)
    plain = copy.deepcopy(model)
    x = _drawn(5, 1, 8, 8)
    try:
        torch.compile(model, backend=backend)(x).sin().sum().backward()
        evaluated = torch.compile(copy.deepcopy(model).eval(), backend="eager", fullgraph=True)(x)
    finally:
        torch.compiler.reset()
    plain(x).sin().sum().backward()
    torch.testing.assert_close(evaluated, copy.deepcopy(plain).eval()(x))
    assert len(graphs) == 1
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert not told, "else a page of text for each layer"
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class _Counted(TorchDispatchMode):
    """Counts operations. GPUs' kernels are emulated; a fake group's collectives count, and exchange nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name.split("::")[1]
        # Fake tensors ask for their device, and autograd detaches gradients: neither runs a kernel.
        self.count += name not in ("device", "detach")
        return KERNELS[name](*args) if name in KERNELS else operator(*args, **kwargs or {})


def test_operations_of_a_step_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # On fake tensors of a CPU: without CUDA, autograd refuses fake tensors of a GPU.
    monkeypatch.setattr(sync_batchnorm, "_kernels", lambda x: cuda_kernels)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    counts = {}
    try:
        world = World(Topology(size=2, local_size=2), torch.device("cpu"), dist.group.WORLD)
        for is_synchronous in (False, True):
            with FakeTensorMode(allow_non_fake_inputs=True), _Counted() as counted:
                model = torchvision.models.resnet18()
                if is_synchronous:
                    convert(model, world)
                counted.count = 0
                model(torch.empty(2, 3, 64, 64)).sum().backward()
                counts[is_synchronous] = counted.count
    finally:
        cuda_kernels.rows_of.cache_clear()  # of fake tensors
        dist.destroy_process_group()
    assert counts[True] <= 400, counts

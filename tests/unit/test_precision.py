"""The arithmetic: what is computed in which dtype, and gradients that are unscaled before they are clipped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import hardware, optim
from lockstep.config import OptimConfig, PrecisionConfig
from lockstep.precision import Precision, resolve
from lockstep.state import model_tensors, optimizer_state

from ..reading import NoReading

CPU = torch.device("cpu")


def _precision(name: str, channels_last: str = "auto") -> Precision:
    return Precision.of(PrecisionConfig(name=name, channels_last=channels_last), CPU)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 2))


@pytest.mark.parametrize(
    ("name", "weights", "products"),
    [
        ("fp32", torch.float32, torch.float32),
        ("fp64", torch.float64, torch.float64),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
    ],
)
def test_weights_and_products_have_their_dtypes(name: str, weights: torch.dtype, products: torch.dtype) -> None:
    precision = _precision(name)
    model = precision.place(_net(), CPU)
    for _ in range(2):  # the context is entered again and again
        with precision.autocast():
            out = model(torch.randn(5, 3, 5, 5, dtype=precision.dtype))
        assert out.dtype == products
    assert precision.dtype == weights
    assert {item.dtype for item in model.parameters()} == {weights}
    precision.backward(out.float().sum())
    assert {item.grad.dtype for item in model.parameters() if item.grad is not None} == {weights}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [("fp32", "auto", True), ("fp64", "auto", False), ("fp64", "on", True), ("fp32", "off", False)],
)
def test_memory_order(name: str, asked: str, expected: bool) -> None:
    precision = _precision(name, asked)
    weight = precision.place(_net(), CPU).get_parameter("0.weight")
    assert precision.channels_last is expected
    assert weight.is_contiguous(memory_format=torch.channels_last) is expected


def test_auto_follows_the_hardware() -> None:
    assert resolve("auto", CPU) == ("bf16" if hardware.has_bf16_units() else "fp32")
    assert resolve("fp16", CPU) == "fp16"


def test_torch_still_knows_whether_tf32_is_on() -> None:
    # Setting it needs no GPU. Asked through the switches that torch's own parts ask, which raise if set by halves.
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        Precision.of(PrecisionConfig(name="fp32"), torch.device("cuda"))
        assert not torch.backends.cuda.matmul.allow_tf32
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            assert not torch.backends.cudnn.allow_tf32
        cudnn: Any = torch.backends.cudnn  # whose annotations lack `conv`
        assert cudnn.conv.fp32_precision != "tf32"
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("name", ["fp64", "fp32", "fp16"])
def test_the_norm_is_the_whole_models_unscaled(name: str) -> None:
    precision = _precision(name)
    model = precision.place(nn.Linear(2, 2, bias=False), CPU)
    other = precision.place(nn.Linear(1, 1, bias=False), CPU)
    assert isinstance(model, nn.Linear)
    assert isinstance(other, nn.Linear)
    before = model.weight.detach().clone()
    optimizers = [torch.optim.SGD([each.weight], lr=1.0) for each in (model, other)]  # several, as under muon
    # Gradients of 3 in four places and 8 in one: a norm of 10.
    loss = 3 * model.weight.sum() + 8 * other.weight.sum()
    precision.backward(loss)
    norm = precision.step(optimizers, clip=5.0)
    assert norm is not None
    assert norm.item() == pytest.approx(10.0, rel=1e-6)
    assert (before - model.weight).detach().flatten().tolist() == pytest.approx([1.5] * 4, rel=1e-5)


def _mixed() -> nn.Module:
    """A net whose matrices and vectors have optimizers of their own under muon."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def _stepped(precision: Precision, optimizers: optim.Optimizers, gradients: list[Tensor]) -> None:
    loss = sum((item * each).sum() for item, each in zip(optimizers.parameters, gradients, strict=True))
    assert isinstance(loss, Tensor)
    precision.backward(loss)
    precision.step(optimizers.each, clip=None)
    optimizers.zero_grad()


def _gradients(model: nn.Module, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(item.shape, generator=generator) for item in model.parameters()]


def _bits(model: nn.Module, optimizers: optim.Optimizers) -> dict[str, bytes]:
    tensors = model_tensors(model) | optimizer_state(model, optimizers.each).tensors
    return {name: held.detach().numpy().tobytes() for name, held in tensors.items()}


OPTIMIZERS = [OptimConfig(name="sgd"), OptimConfig(name="sgd", momentum=0.0), OptimConfig(name="adamw")]
OPTIMIZERS += [OptimConfig(name="muon"), OptimConfig(name="muon", nesterov=True)]


@pytest.mark.parametrize("config", OPTIMIZERS, ids=lambda config: f"{config.name}-{config.momentum}-{config.nesterov}")
@pytest.mark.parametrize(("at", "steps_before"), [(0, 0), (3, 0), (1, 2), (2, 2)])
def test_under_fp16_an_overflow_anywhere_changes_the_scale_alone(
    config: OptimConfig, at: int, steps_before: int
) -> None:
    found = []
    for overflows in (True, False):
        precision, model = _precision("fp16"), _mixed()
        optimizers = optim.build(model, config)
        for step in range(steps_before):
            _stepped(precision, optimizers, _gradients(model, step))
        before, scale = _bits(model, optimizers), precision.state().get("scale", 65536.0)
        if overflows:
            bad = _gradients(model, 9)
            bad[at].view(-1)[0] = math.inf
            _stepped(precision, optimizers, bad)
            after = _bits(model, optimizers)
            assert {name: after[name] for name in before} == before
            assert precision.state()["scale"] == scale / 2
        _stepped(precision, optimizers, _gradients(model, 10))
        found.append(_bits(model, optimizers))
    assert found[0] == found[1], "the next step is that of a run without the overflow"


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("clip", [1.0, None])
def test_under_fp16_the_host_waits_for_nothing(name: str, clip: float | None) -> None:
    precision, model = _precision("fp16"), _mixed()
    optimizers = optim.build(model, OptimConfig(name=name))
    for step in range(2):
        for item, gradient in zip(optimizers.parameters, _gradients(model, step), strict=True):
            precision.backward((item * gradient).sum())
        with NoReading():
            precision.step(optimizers.each, clip=clip)


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_without_an_overflow_fp16_steps_as_fp32(name: str) -> None:
    found = []
    for precision in (_precision("fp16"), _precision("fp32")):
        model = _mixed()
        optimizers = optim.build(model, OptimConfig(name=name))
        for step in range(3):
            _stepped(precision, optimizers, _gradients(model, step))
        found.append(_bits(model, optimizers))
    assert found[0] == found[1], "a scale that is a power of two leaves no trace"


def test_a_continued_run_keeps_the_scale() -> None:
    precision, model = _precision("fp16"), nn.Linear(2, 1, bias=False)
    optimizers = optim.build(model, OptimConfig())
    _stepped(precision, optimizers, [torch.full((1, 2), math.inf)])
    other = _precision("fp16")
    other.load_state(precision.state())
    assert other.state() == precision.state()
    assert _precision("bf16").state() == {}
    _precision("bf16").load_state({})
    _precision("fp32").load_state(precision.state())  # a run that is continued in another precision

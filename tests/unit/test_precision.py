"""The arithmetic: what is computed in which dtype, and gradients that are unscaled before they are clipped."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep import hardware, optim
from lockstep.config import OptimConfig, PrecisionConfig
from lockstep.errors import RequestError
from lockstep.precision import Precision, resolve

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
    weight = precision.place(_net(), CPU)[0].weight  # type: ignore[index]
    assert precision.channels_last is expected
    assert weight.is_contiguous(memory_format=torch.channels_last) is expected


def test_what_has_other_dimensions_keeps_its_order() -> None:
    model = nn.ModuleList([nn.Conv2d(2, 3, 3), nn.Conv3d(2, 3, 3), nn.Conv1d(2, 3, 3)])
    strides = [model[index].weight.stride() for index in (1, 2)]  # type: ignore[union-attr,operator]
    held = [id(item) for item in model.parameters()]
    placed = _precision("fp32", "on").place(model, CPU)
    assert placed[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]
    assert [placed[index].weight.stride() for index in (1, 2)] == strides  # type: ignore[index]
    assert [id(item) for item in placed.parameters()] == held


def test_auto_follows_the_hardware() -> None:
    assert resolve("auto", CPU) == ("bf16" if hardware.has_bf16_units() else "fp32")
    assert resolve("fp16", CPU) == "fp16"


def test_what_the_device_lacks_is_refused() -> None:
    with pytest.raises(RequestError, match="needs an NVIDIA GPU of Ampere or newer, found cpu"):
        _precision("tf32")


@pytest.mark.parametrize("name", ["fp64", "fp32", "fp16"])
def test_the_norm_is_the_whole_models_unscaled(name: str) -> None:
    precision = _precision(name)
    model = precision.place(nn.Linear(2, 2, bias=False), CPU)
    other = precision.place(nn.Linear(1, 1, bias=False), CPU)
    before = model.weight.detach().clone()
    both = nn.ModuleList([model, other])
    optimizer = optim.build(both, OptimConfig(lr=1.0, momentum=0.0, weight_decay=0.0))
    # Gradients of 3 in four places and 8 in one: a norm of 10.
    loss = 3 * model.weight.sum() + 8 * other.weight.sum()
    precision.backward(loss)
    norm = precision.step(optimizer.each, clip=5.0)
    assert norm is not None
    assert norm.item() == pytest.approx(10.0, rel=1e-6)
    assert (before - model.weight).detach().flatten().tolist() == pytest.approx([1.5] * 4, rel=1e-5)


def test_without_a_limit_nothing_is_measured() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    assert _precision("fp32").step(optim.build(model, OptimConfig()).each, clip=None) is None


def test_under_fp16_an_overflow_changes_the_scale_alone() -> None:
    precision = _precision("fp16")
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = optim.build(model, OptimConfig())
    precision.backward(model.weight.sum() * math.inf)
    precision.step(optimizer.each, clip=None)
    assert torch.equal(model.weight.detach(), before)
    scale = precision.state()["scale"]
    assert scale < _precision("fp16").state().get("scale", 65536.0)

    other = _precision("fp16")
    other.load_state(precision.state())
    assert other.state() == precision.state()


def test_without_scaling_there_is_no_state() -> None:
    assert _precision("bf16").state() == {}
    _precision("bf16").load_state({})
    _precision("fp32").load_state(_precision("fp16").state())  # a run that is continued in another precision

"""The arithmetic: what is computed in which dtype, and gradients that are unscaled before they are clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep import hardware
from lockstep.checkpoint.state import model_state, optimizer_tensors
from lockstep.cli.main import main
from lockstep.config.schema import OptimConfig, PrecisionConfig
from lockstep.training import optim
from lockstep.training.precision import Precision

from ..reading import NoReading

CPU = torch.device("cpu")


def _precision(name: str, channels_last: str = "auto") -> Precision:
    return Precision.of(PrecisionConfig(name=name, channels_last=channels_last), CPU)


@pytest.mark.parametrize(
    ("name", "weights", "products", "channels_last"),
    [
        ("fp32", torch.float32, torch.float32, {"auto": True, "off": False}),
        ("fp64", torch.float64, torch.float64, {"auto": False, "on": True}),
        ("auto", torch.float32, torch.bfloat16 if hardware.bf16_units() else torch.float32, {}),
        ("bf16", torch.float32, torch.bfloat16, {}),
        ("fp16", torch.float32, torch.float16, {}),
    ],
)
def test_weights_products_and_memory_are_as_asked(
    name: str, weights: torch.dtype, products: torch.dtype, channels_last: dict[str, bool]
) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 2))

    precision = _precision(name)
    model = precision.place(net(), CPU)
    for _ in range(2):  # the context is entered again and again
        with precision.autocast():
            out = model(torch.randn(5, 3, 5, 5, dtype=precision.dtype))
        assert out.dtype == products
    precision.backward(out.float().sum())
    found = {item.dtype for item in model.parameters()} | {
        item.grad.dtype for item in model.parameters() if item.grad is not None
    }
    assert found == {weights} == {precision.dtype}
    for asked, expected in channels_last.items():
        weight = _precision(name, asked).place(net(), CPU).get_parameter("0.weight")
        assert weight.is_contiguous(memory_format=torch.channels_last) is expected


@pytest.mark.parametrize(
    ("flag", "precision", "units"),
    [
        ("avx512_bf16 amx_bf16", "fp32", "AMX"),
        ("avx512_bf16", "fp32", "AVX-512"),
        ("avx512_bf16", "fp64", ""),
        ("", "fp32", ""),
    ],
)
def test_units_that_the_default_precision_leaves_idle_are_told(
    flag: str,
    precision: str,
    units: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "_cpuinfo", lambda field: f"fpu avx2 {flag}")
    train = ("train", "--data", "digits", "--model", "mlp", "--accelerator", "cpu", "--max-steps", "1")
    assert main([*train, "--precision", precision]) == 0
    reported = capsys.readouterr().out.replace("\n", " ")
    sentence = f"this processor has bfloat16 units ({units}), which fp32 does not use: --precision bf16 may be faster"
    assert (sentence in reported) == bool(units)
    assert ("bfloat16 units" in reported) == bool(units)


def test_torch_still_knows_whether_tf32_is_on() -> None:
    # Setting it needs no GPU. Asked through the switches that torch's own parts ask, which raise if set by halves.
    Precision.of(PrecisionConfig(name="fp32"), torch.device("cuda")).set_up_recipe(deterministic=True)
    assert not torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("name", ["fp64", "fp32", "fp16"])
def test_the_norm_is_the_whole_models_unscaled(name: str) -> None:
    precision = _precision(name)
    weight, other = (nn.Parameter(torch.ones(size, dtype=precision.dtype)) for size in (4, 1))
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in (weight, other)]  # several, as under muon
    # Gradients of 3 in four places and 8 in one: a norm of 10.
    precision.backward(3 * weight.sum() + 8 * other.sum())
    precision.unscale(optimizers)
    norm = optim.gradient_norm(optimizers, clip=5.0)
    _step(precision, optimizers)
    assert norm.item() == pytest.approx(10.0, rel=1e-6)
    assert (1 - weight).tolist() == pytest.approx([1.5] * 4, rel=1e-5)


def _step(precision: Precision, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for each in optimizers:
        precision.step_one(each, each.step)


class _Training:
    """A net whose matrices and vectors have optimizers of their own under muon, given gradients step by step."""

    def __init__(self, precision: str, config: OptimConfig) -> None:
        torch.manual_seed(0)
        self.precision = _precision(precision)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.optimizers = optim.build(self.model, config)

    def gradients(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(item.shape, generator=generator) for item in self.model.parameters()]

    def step(self, gradients: list[Tensor]) -> None:
        pairs = zip(self.model.parameters(), gradients, strict=True)
        self.precision.backward(torch.stack([(item * each).sum() for item, each in pairs]).sum())
        with NoReading():
            self.precision.unscale(self.optimizers)
            optim.gradient_norm(self.optimizers, clip=1e9)
            _step(self.precision, self.optimizers)
            self.precision.update()
        for each in self.optimizers:
            optim.zero_grad(each)

    def bits(self) -> dict[str, bytes]:
        tensors = model_state(self.model)[0] | optimizer_tensors(self.model, self.optimizers)
        return {name: held.detach().numpy().tobytes() for name, held in tensors.items()}


def test_a_loss_in_half_precision_is_scaled_before_it_is_weighed() -> None:
    """The first scale, 65,536, is more than float16 holds: by itself it would cost the run's first step."""
    weights = nn.Parameter(torch.ones(4))
    _precision("fp16").backward(weights.half().sum(), 1 / 64)
    assert weights.grad is not None
    assert weights.grad.tolist() == [65536 / 64] * 4


@pytest.mark.parametrize("config", [OptimConfig(name=name) for name in ("sgd", "adamw")])
@pytest.mark.parametrize(("at", "steps_before"), [(0, 0), (3, 0), (1, 2)])
def test_under_fp16_an_overflow_anywhere_changes_the_scale_alone(
    config: OptimConfig, at: int, steps_before: int
) -> None:
    """And the host waits for nothing; without one the steps are those of fp32."""
    overflowed, clean, single = _Training("fp16", config), _Training("fp16", config), _Training("fp32", config)
    for each in (overflowed, clean, single):
        for seed in range(steps_before):
            each.step(each.gradients(seed))
        if each is overflowed:
            before, scale = each.bits(), each.precision.state().get("scale", 65536.0)
            bad = each.gradients(9)
            bad[at].view(-1)[0] = math.inf
            each.step(bad)
            after = each.bits()
            assert {name: after[name] for name in before} == before
            assert each.precision.state()["scale"] == scale / 2
        each.step(each.gradients(10))
    assert overflowed.bits() == clean.bits() == single.bits()


def test_a_continued_run_keeps_the_scale() -> None:
    training = _Training("fp16", OptimConfig())
    training.step([gradient * math.inf for gradient in training.gradients(0)])
    kept = training.precision.state()
    other = _precision("fp16")
    other.load_state(kept)
    assert other.state() == kept
    _precision("fp32").load_state(kept)  # a run that is continued in another precision

"""The laws where the tensors lie on a GPU: one GPU is enough, and NCCL with it, as a world of one rank."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import checkpoint
from lockstep.config.options import override
from lockstep.config.registry import KINDS
from lockstep.config.schema import OptimConfig, PrecisionConfig, RunConfig
from lockstep.data import sets
from lockstep.data.source import Fetched
from lockstep.jobs.job import assemble
from lockstep.runs.meter import Meter
from lockstep.trainer import train
from lockstep.training import optim
from lockstep.training.precision import Precision
from lockstep.world.world import World

from ..command import COLD, end, start
from ..curves import Curve, Losses, apart, same_bits
from ..stepping import steps
from .conftest import DEVICE, IS_REHEARSAL, joined, needs_cuda, never_waits

LAW = 1e-9
ON_ONE = [name for name, kind in KINDS.items() if not kind.divides_weights]
"""Strategies that one rank can have."""
NET = {
    "model": "resnet8",
    "data": "digits",
    "augment": ["crop", "flip"],
    "batch": 48,
    "lr": 0.05,
    "epochs": 1000,
    "max_steps": 20,
    "precision": "fp64",
    "strategy": "single",
}


@pytest.fixture
def cuda() -> World:
    """One process, one GPU, no process group."""
    return World.alone(DEVICE)


@pytest.fixture
def nccl() -> Iterator[World]:
    """One rank in a process group of NCCL and gloo."""
    with joined() as world:
        yield world


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Leave torch as it was after a run with --deterministic."""
    yield
    torch.use_deterministic_algorithms(False)


def curve(world: World, folder: Path, **values: Any) -> Curve:
    """Return ({step: loss}, weights and optimizer state) of a run."""
    losses = Losses()
    train(override(RunConfig(), **NET | values, output=folder), world, losses)
    return losses.by_step, {name: held.numpy() for name, held in checkpoint.load(folder).tensors.items()}


@pytest.mark.parametrize(
    "options",
    [
        # One device each: dp then runs on cuda:0, ddp exchanges with itself over NCCL.
        *({"strategy": name} | ({"devices": 1} if KINDS[name].drives_all else {}) for name in ON_ONE),
        {"strategy": "ddp", "model": "pyramidnet-20-48"},
        {"accumulate": 3, "model": "mlp"},
        {"optimizer": "adamw", "lr": 1e-3},
        {"ema": 0.9, "clip": 0.5},
        {"compile": True, "max_steps": 8},
    ],
    ids=str,
)
def test_a_gpu_trains_the_model_that_a_cpu_trains(nccl: World, tmp_path: Path, options: dict[str, Any]) -> None:
    plain = {"strategy": "single", "devices": None, "compile": False}
    on_cpu = curve(World.alone(), tmp_path / "cpu", **options | plain)
    assert apart(curve(nccl, tmp_path / "gpu", **options | {"accelerator": DEVICE.type}), on_cpu) < LAW


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "fp64"])
def test_every_precision_learns(cuda: World, tmp_path: Path, precision: str) -> None:
    if IS_REHEARSAL and precision in ("tf32", "fp16"):
        pytest.skip("a CPU refuses it")
    if precision == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("tf32 needs Ampere or newer")
    if precision == "bf16" and not (IS_REHEARSAL or torch.cuda.is_bf16_supported(including_emulation=False)):
        pytest.skip("this GPU has no bf16")
    exact = curve(World.alone(), tmp_path / "exact", max_steps=1)[0]
    losses, weights = curve(cuda, tmp_path / "run", precision=precision, max_steps=100)
    assert losses[1] == pytest.approx(exact[1], rel=0.02)
    assert np.mean([losses[step] for step in range(91, 101)]) < 0.5 * losses[1]
    # Whatever the products run in, weights are kept whole.
    whole = np.float64 if precision == "fp64" else np.float32
    assert weights["model/classifier.weight"].dtype == whole


@needs_cuda
def test_fp32_is_not_tf32_in_disguise(cuda: World) -> None:
    a = torch.randn(512, 512, device=cuda.device)
    exact = a.double() @ a.double()

    def error(name: str) -> float:
        Precision.of(PrecisionConfig(name=name), cuda.device)
        return float(((a @ a).double() - exact).abs().max())

    assert error("fp32") < 1e-3
    if torch.cuda.get_device_capability() >= (8, 0):
        assert error("tf32") > 5 * error("fp32")


@needs_cuda
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon", "lamb", "lars"])
def test_a_first_step_whose_fp16_gradients_overflow_changes_nothing(cuda: World, optimizer: str) -> None:
    precision = Precision.of(PrecisionConfig(name="fp16"), cuda.device)
    model = torch.nn.Linear(1000, 1, bias=False).to(cuda.device)
    optimizers = optim.build(model, OptimConfig(name=optimizer, lr=0.01, weight_decay=0.0))
    freed = torch.full((64, 1000), 1e20, device=cuda.device)
    del freed  # what an optimizer that does not clear its memory would find in it

    def step(factor: float) -> None:
        precision.backward((model.weight * factor).sum())
        precision.unscale(optimizers)
        optim.gradient_norm(optimizers, clip=1.0)
        for each in optimizers:
            precision.step_one(each, each.step)
        precision.update()
        for each in optimizers:
            optim.zero_grad(each)

    held = model.weight.detach().clone()
    step(3e38)
    assert torch.equal(model.weight, held)
    step(1.0)
    moved = (model.weight.detach() - held).abs()
    assert 0 < float(moved.min()) <= float(moved.max()) < 0.1


@pytest.mark.parametrize("on_device", ["on", "off"] if not IS_REHEARSAL else ["off"])
@pytest.mark.parametrize("augment", [[], ["crop", "flip", "cutout"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_are_the_same_bits_on_a_gpu(cuda: World, on_device: str, augment: list[str], dtype: torch.dtype) -> None:
    def images(world: World, mode: str) -> list[Fetched]:
        config = override(RunConfig(), data="digits", augment=augment, on_device=mode).data
        before_bytes = 0 if IS_REHEARSAL else torch.cuda.memory_allocated()
        data = sets.build(config, seed=3, world=world, dtype=dtype, channels_last=True)
        if not IS_REHEARSAL:  # images of 8 × 8 bytes
            assert (torch.cuda.memory_allocated() - before_bytes > len(data.train) * 64) == (mode == "on")
        shares = [np.array([5, 3, 1000, 3]), np.array([], np.int64), np.arange(200, 500)]
        return list(data.train.stream(shares, epoch=7))

    for (x, y, _), (expected_x, expected_y, _) in zip(
        images(cuda, on_device), images(World.alone(), "auto"), strict=True
    ):
        assert x.device.type == y.device.type == cuda.device.type
        assert torch.equal(x.cpu(), expected_x)
        assert torch.equal(y.cpu(), expected_y)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16", "model": "pyramidnet-20-48"},
        {"precision": "bf16", "model": "convnet-small"},
        {"model": "tests.models:Dropped"},
        # Each GPU draws from a generator of its own.
        {"model": "tests.models:Dropped", "strategy": "dp", "devices": max(1, torch.cuda.device_count())},
    ],
)
def test_a_continued_run_ends_with_the_same_bits(cuda: World, tmp_path: Path, options: dict[str, Any]) -> None:
    # 30 steps an epoch: stopped within the second one, and continued past its end.
    values = {"deterministic": True, "schedule": "cosine", "epochs": 3, "max_steps": 70, "ema": 0.9} | options
    whole = curve(cuda, tmp_path / "whole", **values)
    curve(cuda, tmp_path / "parts", **values | {"max_steps": 37})
    parts = curve(cuda, tmp_path / "parts", **values, resume="auto")
    assert min(parts[0]) == 38
    assert same_bits(parts, whole)


@pytest.mark.parametrize("gpu_first", [True, False])
def test_a_run_moves_between_gpu_and_cpu(cuda: World, tmp_path: Path, gpu_first: bool) -> None:
    worlds = [cuda, World.alone()] if gpu_first else [World.alone(), cuda]
    first = curve(worlds[0], tmp_path / "moved", max_steps=9)
    second = curve(worlds[1], tmp_path / "moved", resume="auto")
    assert apart((first[0] | second[0], second[1]), curve(World.alone(), tmp_path / "stayed")) < LAW


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "fp16", "optimizer": "adamw", "lr": 1e-3},
        {"precision": "fp16", "optimizer": "muon", "lr": 1e-3},
        {"precision": "fp16", "optimizer": "lamb", "lr": 1e-3},
        {"precision": "fp16", "optimizer": "lars", "lr": 1.0},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_a_step_never_makes_the_host_wait(cuda: World, options: dict[str, Any]) -> None:
    options = options | {"accumulate": 2, "augment": ["crop", "flip", "cutout"], "clip": 1.0, "ema": 0.9}
    job = assemble(override(RunConfig(), **NET | options), cuda)
    with contextlib.closing(steps(job)) as each, pytest.MonkeyPatch.context() as patch:
        for _ in range(3):  # the first steps may allocate and choose algorithms
            next(each)
        patch.setattr(Meter, "due", lambda meter, stop: False)
        with never_waits():
            for _ in range(5):
                next(each)


@needs_cuda
@pytest.mark.parametrize("strategy", ON_ONE)
@pytest.mark.parametrize("launcher", ["auto", "torchrun"])
def test_the_command_trains_on_the_gpu(
    tmp_path: Path, strategy: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    words = ("--strategy", strategy, "--gpus", 0, "--precision", "bf16", "--deterministic", "--max-steps", 5)
    through = torchrun if launcher == "torchrun" else COLD
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # which the command has to set by itself
    started = start(tmp_path, "train", "digits", *words, "--output", "run", through=through, CUDA_VISIBLE_DEVICES="0")
    ended = end(started, 200)
    assert ended.code == 0, ended
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["peak_memory_bytes"]["device"] > 0

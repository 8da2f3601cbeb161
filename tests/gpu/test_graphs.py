"""CUDA graphs have the bits of the eager model, next to the watchdogs that query events meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.jobs.job import assemble
from lockstep.training.graphs import Graphs
from lockstep.world.world import World

from ..curves import same_bits
from ..ranks.test_graphs import Masking, Waiting
from .conftest import DEVICE, IS_REHEARSAL, joined, needs_cuda
from .test_training import curve

DROPPING = {"model": "tests.ranks.test_graphs:Dropping", "data": "fake", "image_size": 8, "samples": 61, "batch": 20}
MODE = "off" if IS_REHEARSAL else "on"


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32", "accumulate": 3},
        {"precision": "bf16", "optimizer": "adamw", "clip": 0.5},
        {"precision": "fp16"},
        {"precision": "fp32", "compile": True},
        DROPPING | {"precision": "fp32", "augment": [], "max_steps": 8},
    ],
    ids=["accumulated", "bf16", "fp16", "compiled", "dropout"],
)
def test_graphs_have_the_bits_of_the_eager_model(tmp_path: Path, options: dict[str, Any]) -> None:
    if IS_REHEARSAL and options.get("compile"):
        pytest.skip("compiles for minutes")
    try:
        eager, graphs = (
            curve(World.alone(DEVICE), tmp_path / mode, **options, deterministic=True, cuda_graphs=mode)
            for mode in ("off", MODE)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert same_bits(eager, graphs)


def test_synchronised_statistics_are_exchanged_within_a_graph(tmp_path: Path) -> None:
    by_mode = []
    for mode in ("off", MODE):
        with joined() as world:
            options = {"strategy": "ddp", "precision": "fp32", "deterministic": True, "cuda_graphs": mode}
            by_mode.append(curve(world, tmp_path / mode, **options))
    torch.use_deterministic_algorithms(False)
    assert same_bits(*by_mode)


@needs_cuda
@pytest.mark.parametrize("model", [Waiting, Masking])
def test_torch_refuses_what_a_graph_cannot_repeat(model: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """After that refusal, as under auto, the GPU computes on."""
    config = override(RunConfig(), **DROPPING, cuda_graphs="on")
    graphs = Graphs(model().to(DEVICE), None, DEVICE)
    x = torch.zeros(4, 3, 8, 8, device=DEVICE)
    monkeypatch.setattr("lockstep.training.graphs._check", lambda forward, x: None)
    with pytest.raises(RequestError, match="cannot record"):
        graphs.record(x)
    monkeypatch.undo()
    job = assemble(config, World.alone(DEVICE))
    assert torch.isfinite(job.replica(torch.zeros(20, 3, 8, 8, device=DEVICE))).all()

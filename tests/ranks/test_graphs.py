"""A model by CUDA graphs, which a tape stands for here (see `tests.graphed`), trains with the bits of the eager one."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.jobs.job import assemble
from lockstep.training.graphs import Graphs
from lockstep.world.world import World

from .. import graphed
from ..curves import _train
from ..pool import RankPool
from .test_sync_batchnorm import _as_on_a_gpu

NET = {"model": "tests.models:Normed", "data": "fake", "samples": 61, "image_size": 8, "batch": 20, "max_steps": 8}
PLAIN = NET | {"model": "mlp"}


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.3), nn.Linear(16, 10))


class Waiting(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y / 2 if y.mean().item() > 0 else y


class Masking(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + y[y > 0].sum()


class Deep(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y if random.random() < 0.5 else 2 * y


class Replacing(Dropping):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        z: Tensor = y - self.average
        return z


class Warming(Dropping):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = super().forward(x)
        return y * min(1.0, self.calls / 100)


def _emulate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lockstep.cuda.has_graphs", lambda device: True)
    patch.setattr(torch.cuda, "make_graphed_callables", graphed.make_graphed_callables)


def _both(world: World, values: dict[str, Any]) -> tuple[Any, Any, int]:
    asked = {"precision": "fp64", "epochs": 1000, "output": None} | values
    eager = _train(world, asked)
    graphed.replays.clear()
    with pytest.MonkeyPatch.context() as patch:
        _emulate(patch)
        return eager, _train(world, asked | {"cuda_graphs": "on"}), len(graphed.replays)


@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (1, PLAIN | {"accumulate": 3, "clip": 0.2, "ema": 0.9}),
        (1, NET | {"precision": "bf16"}),
        (1, NET | {"model": "resnet8", "freeze": ("stem.*",)}),  # whose BatchNorm keeps its statistics
        (2, NET | {"batch": 19, "accumulate": 2}),  # shares of 5 and 4, or of 5; the last batch has 4 samples
        (2, PLAIN | {"model": f"{__name__}:Dropping", "strategy": "zero1"}),
        (2, PLAIN | {"exchange": "local-sgd", "exchange_every": 3, "accumulate": 2}),
    ],
)
def test_graphs_have_the_bits_of_the_eager_model(pool: RankPool, ranks: int, values: dict[str, Any]) -> None:
    for eager, by_graphs, replays in pool.run(ranks, _as_on_a_gpu, _both, values, collectives="gloo"):
        assert by_graphs == eager
        assert replays >= 4


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("Waiting", r"test_graphs.py:\d+ \(aten._local_scalar_dense"),
        ("Masking", r"test_graphs.py:\d+ \(aten.index.Tensor"),
        ("Deep", "draws on the host"),
        ("Warming", "changes numbers of its modules"),
        ("Replacing", "replaces their buffers"),
    ],
)
def test_what_a_graph_cannot_repeat_is_refused(model: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _emulate(monkeypatch)
    config = override(RunConfig(), **PLAIN, cuda_graphs="on")
    config = override(config, model=f"{__name__}:{model}")
    with contextlib.closing(World.alone()) as world:
        with pytest.raises(RequestError, match=sentence):
            assemble(config, world)
        job = assemble(override(config, cuda_graphs="auto"), world)
    assert not isinstance(job.replica, Graphs)
    assert any(caution.startswith("no CUDA graphs: ") for caution in job.cautions)

"""Micro-batches by memory: found before the first step, halved later, alike on all ranks."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lockstep import hardware
from lockstep.batching import BatchPlan
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.trainer import run
from lockstep.training import memory
from lockstep.world.world import World

from ..command import events
from ..curves import alone, apart, of_run
from ..pool import RankPool

_TOO_MUCH = 2**60  # bytes, which no allocator grants
_USUAL = {"data": "digits", "batch": 64, "max_steps": 8, "epochs": 1000, "precision": "fp64", "lr": 0.05}
_CALLS = {"forward": 0}


class _Exhausting(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.empty(_TOO_MUCH, dtype=torch.uint8)


class Hungry(nn.Module):
    """An MLP that runs out of memory on a rank, for more than `most` samples, once it has run `after` times."""

    most, after, rank, where = 1000, 0, 0, "forward"

    def __init__(self, classes: int, **_: object) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, classes))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._scores(x)
        _CALLS["forward"] += 1
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if len(x) > self.most and rank == self.rank and _CALLS["forward"] > self.after:
            if self.where == "backward":
                return self._scores(_Exhausting.apply(x.requires_grad_()))
            torch.empty(_TOO_MUCH, dtype=torch.uint8)
        return self._scores(x)

    def _scores(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x)
        return scores


def _run(world: World, values: dict[str, Any], limits: dict[str, Any]) -> str:
    torch.set_num_threads(1)
    _CALLS["forward"] = 0
    for name, value in ({"after": 0, "where": "forward"} | limits).items():
        setattr(Hungry, name, value)
    config = override(RunConfig(), model="tests.ranks.test_memory:Hungry", micro_batch="auto", **values)
    try:
        run(config, world)
    except RequestError as error:
        return str(error)
    return ""


def _plans(folder: Path) -> list[int]:
    return [event["plan"]["accumulation"] for event in events(folder, "start")]


def test_the_largest_micro_batch_is_found_by_all_ranks_before_the_first_step(pool: RankPool, tmp_path: Path) -> None:
    values = _USUAL | {"strategy": "ddp", "output": tmp_path / "run"}
    pool.run(2, _run, values, {"most": 10, "rank": 1})
    assert _plans(tmp_path / "run") == [4], "32 and 16 samples do not fit on rank 1"
    assert apart(of_run(tmp_path / "run"), alone(pool, **_USUAL, model="tests.ranks.test_memory:Hungry")) <= 1e-9


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_runs_out_of_memory_later_goes_on_with_smaller_ones(
    pool: RankPool, tmp_path: Path, where: str
) -> None:
    values = _USUAL | {"strategy": "ddp", "output": tmp_path / "run"}
    pool.run(2, _run, values, {"most": 16, "after": 4, "rank": 1, "where": where})
    losses, weights = of_run(tmp_path / "run")
    assert [*losses] == [*range(1, 9)]
    assert _plans(tmp_path / "run") == [1, 2]
    (warned,) = [event["text"] for event in events(tmp_path / "run", "warning") if "memory" in event["text"]]
    assert warned.startswith("Rank 1 ran out of memory at step 4 ")
    assert apart((losses, weights), alone(pool, **_USUAL, model="tests.ranks.test_memory:Hungry")) <= 1e-9


def _compute(samples: int) -> None:
    torch.ones(samples, 2**18)  # 1 MiB each


def _limits(world: World) -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_DATA)


def _fitted(world: World, size: int) -> int:
    """Return the samples of a rank's largest share, where each rank's part of the free memory is 100 MiB."""
    with mock.patch.object(hardware, "free_memory_bytes", return_value=100 * 2**20 * world.size):
        return memory.fitted(BatchPlan.solve(size, world.size, accumulation=1), world, _compute).largest_share


def test_what_fits_on_a_cpu_is_a_part_of_the_free_memory(pool: RankPool) -> None:
    before = pool.run(2, _limits)
    assert pool.run(2, _fitted, 600) == [75, 75], "of 300, 150 and 75 MiB, in 100"
    assert pool.run(2, _limits) == before


def test_a_sample_that_does_not_fit_is_refused(pool: RankPool, tmp_path: Path) -> None:
    values = _USUAL | {"strategy": "ddp", "output": tmp_path}
    for sentence in pool.run(2, _run, values, {"most": 0, "rank": 0}):
        assert "micro-batches of 1 sample per rank do not fit into memory" in sentence


def test_free_memory_is_within_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    for name, text in {"max": "5000", "current": "3000", "stat": "anon 1000\ninactive_file 700\n"}.items():
        (tmp_path / "job" / f"memory.{name}").write_text(text)
    (tmp_path / "memory.max").write_text("max")
    assert hardware.free_memory_bytes(tmp_path / "cgroup", tmp_path) == 2700

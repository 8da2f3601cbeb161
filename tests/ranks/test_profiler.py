"""Traces of some steps: a file for each rank, the slowest rank by name, and a run with the bits that it has without."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import DeviceType
from torch.utils.data import DataLoader

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.record.base import Recorder
from lockstep.record.console import profile_lines
from lockstep.runs.profiler import device_wait_s
from lockstep.sessions.hooks import Hooks
from lockstep.trainer import train
from lockstep.world.world import World

from ..command import weights
from ..loops import images, session
from ..pool import RankPool

OPTIONS = {"data": "digits", "model": "mlp", "batch": 60, "max_steps": 8, "epochs": 1, "accelerator": "cpu"}


class _Events(Recorder):
    def __init__(self) -> None:
        self.profiles: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.losses: list[float] = []

    def record(self, event: str, **fields: Any) -> None:
        if event == "profile":
            self.profiles.append(fields)
        elif event == "warning":
            self.warnings.append(fields["text"])
        self.losses += [row["loss"] for row in fields.get("rows", [])]


class _Late(Hooks):
    """Rank 1 has other work in each step."""

    def ended_step(self, session: Any) -> None:
        if session.rank == 1:
            time.sleep(0.05)


class _Broken(Hooks):
    def ended_step(self, session: Any) -> None:
        if session.step == 3:
            raise ValueError("broken")


def _run(world: World, folder: Path, *, hooks: Hooks | None = None, **options: Any) -> _Events:
    events = _Events()
    train(override(RunConfig(), **OPTIONS, **options, output=folder), world, events, hooks=hooks or Hooks())
    assert world.progress.traced is None
    return events


def _trace(folder: Path, rank: int) -> list[str]:
    """Return the names of the events in a rank's trace."""
    content = json.loads(gzip.decompress((folder / "profile" / f"rank_{rank}.json.gz").read_bytes()))
    return [event.get("name", "") for event in content["traceEvents"]]


def test_each_rank_writes_a_trace_and_the_slowest_is_named(pool: RankPool, tmp_path: Path) -> None:
    asked = {"strategy": "ddp", "hooks": _Late()}
    events, _ = pool.run(2, _with, tmp_path / "traced", asked | {"profile": "3:6"})
    plain, _ = pool.run(2, _with, tmp_path / "plain", asked)
    assert events.losses == plain.losses
    assert weights(tmp_path / "traced") == weights(tmp_path / "plain")
    for rank in range(2):
        names = _trace(tmp_path / "traced", rank)
        assert sum(name.startswith("ProfilerStep#") for name in names) == 4
        assert {"aten::addmm", "lockstep: all-reduce"} <= {*names}
    (profile,) = events.profiles
    assert (profile["first_step"], profile["step"], profile["slowest"]) == (3, 6, 1)
    first, second = profile["wait_s"]
    assert first > second
    assert all(step_s > 0.05 for step_s in profile["step_s"])
    assert sum(item["share"] for item in profile["operations"]) <= 1 + 1e-9
    assert "rank 1 is the slowest" in [*profile_lines(profile)][-1]
    assert not plain.profiles


def _with(world: World, folder: Path, options: dict[str, Any]) -> _Events:
    torch.set_num_threads(1)
    return _run(world, folder, **options)


@pytest.mark.parametrize("span", ["1:2", "2:2", "8:8", "7:9", "9:9"])
def test_the_steps_asked_for_are_traced_or_the_run_says_that_it_has_not_made_them(tmp_path: Path, span: str) -> None:
    events, (first, last) = _run(World.alone(), tmp_path / "run", profile=span), map(int, span.split(":"))
    warned = [text for text in events.warnings if "--profile" in text]
    if last <= 8:
        (fields,) = events.profiles
        assert (fields["first_step"], fields["step"], warned) == (first, last, [])
        names = _trace(tmp_path / "run", 0)
        assert sum(name.startswith("ProfilerStep#") for name in names) == last - first + 1
    else:
        assert not events.profiles
        assert warned == [f"--profile {span}: this start has not made all of these steps: no trace."]
        assert not (tmp_path / "run" / "profile").exists()


def test_a_failed_run_leaves_no_trace_under_way(tmp_path: Path) -> None:
    world = World.alone()
    with pytest.raises(ValueError, match="broken"):
        _run(world, tmp_path / "first", profile="2:6", hooks=_Broken())
    assert world.progress.traced is None
    assert not (tmp_path / "first" / "profile").exists()
    assert _run(world, tmp_path / "second", profile="2:3").profiles  # torch has one profiler at a time


def test_a_session_traces_the_steps_of_a_loop(tmp_path: Path) -> None:
    ours = session(World.alone(), profile="2:3", output=tmp_path / "run")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 4))
    made = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(images(), batch_size=20))
    with ours:
        model, optimizer, loader = made
        for _ in ours.epochs(1):
            for x, y in loader:
                ours.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    assert sum(name.startswith("ProfilerStep#") for name in _trace(tmp_path / "run", 0)) == 2


def test_a_trace_needs_a_folder() -> None:
    config = override(RunConfig(), **OPTIONS, profile="1:2")
    with pytest.raises(RequestError, match="give --output"):
        train(config, World.alone(), _Events())


def test_a_device_waits_in_its_communication_kernels_alone() -> None:
    def event(name: str, us: float, device: DeviceType, *, is_annotation: bool = False) -> Any:
        span = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, device_type=device, is_user_annotation=is_annotation, time_range=span)

    events = [
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 300.0, DeviceType.CUDA),
        event("nccl:all_reduce", 310.0, DeviceType.CUDA, is_annotation=True),
        event("nccl:all_reduce", 20.0, DeviceType.CPU),
        event("ampere_sgemm_64x32", 500.0, DeviceType.CUDA),
    ]
    assert device_wait_s(events) == pytest.approx(300e-6)

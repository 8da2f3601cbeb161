"""Clocks, telemetry and checkpoints where the tensors lie on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import Checkpoints, load
from lockstep.checkpoint.state import State
from lockstep.record.telemetry import StepClock, Telemetry

from .conftest import DEVICE, needs_cuda


@needs_cuda
def test_the_clock_and_telemetry_are_the_gpus() -> None:
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    clock = StepClock(device)
    clock.start()
    for count in (1, 20):
        for _ in range(count):
            a @ a
        clock.tick()
    short_s, long_s = clock.flush()
    assert long_s > 5 * short_s > 0
    clock.tick()  # events are used again
    assert [len(clock.flush()) for _ in range(2)] == [1, 0]
    telemetry = Telemetry([device])
    held = torch.zeros(64_000_000, device=device)
    sample = telemetry.sample()
    assert sample["device_memory_bytes"] >= held.nbytes
    del held
    peak = telemetry.peak_memory_bytes()["device"]
    assert peak is not None
    assert peak >= 256_000_000


def test_a_checkpoint_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    """Work queued before the save counts, work queued after it does not."""
    value = torch.zeros(10_000_000, device=DEVICE)
    for _ in range(100):
        value += 1
    saver = Checkpoints(tmp_path, warn=pytest.fail)
    saver.save(State({"model/value": value, "model/scalar": value[0]}, {"step": 1}), step=1, best=False)
    value += 1
    saver.wait()
    loaded = load(tmp_path / "last").tensors
    assert loaded["model/value"].unique().tolist() == [100.0]
    assert loaded["model/scalar"].item() == 100.0

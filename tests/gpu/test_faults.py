"""What a real GPU does when something fails: a wait for another rank is seen, and causes keep their names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import hardware
from lockstep.checkpoint import Checkpoints
from lockstep.checkpoint.state import State
from lockstep.config.schema import OptimConfig, PrecisionConfig
from lockstep.monitor import failures
from lockstep.monitor.progress import Progress
from lockstep.training import optim
from lockstep.training.precision import Precision

from ..command import CODE, command, until
from ..unit.test_watch import _store, _watched
from .conftest import DEVICE, joined, needs_cuda, synchronize

pytestmark = needs_cuda

_CYCLES = 6_000_000_000  # of a GPU's clock: three seconds or so
_STAGE_BYTES = 64 << 20


def test_the_event_behind_an_exchange_shows_that_the_gpu_waits() -> None:
    with joined() as world:
        world.sum_(torch.ones(1, device=DEVICE))  # the first exchange sets up NCCL
        synchronize()
        assert not world.progress.device_waits()
        torch.cuda._sleep(_CYCLES)
        world.sum_(torch.ones(1, device=DEVICE))
        assert world.progress.phase == ""
        assert world.progress.device_waits()
        synchronize()
        assert not world.progress.device_waits()


def test_a_loop_that_waits_for_its_gpu_and_that_for_a_rank_is_judged() -> None:
    first, second = Progress(), Progress()
    first.event = torch.Event(DEVICE)
    torch.cuda._sleep(_CYCLES)
    with _watched(_store(), first, second, stalls_s=(0.8, 3600.0)) as ends:
        with first.during("all-reduce"):  # the host leaves it at once
            pass
        until(lambda: len(ends) == 4, 20)
    sentence = min(ends[2:], key=lambda failure: failure.rank).sentence
    assert sentence.startswith("Rank 1 (node b) stopped ")
    assert "; rank 0 waits in all-reduce at step 0" in sentence
    synchronize()


def test_a_failed_assertion_of_a_kernel_is_the_cause(tmp_path: Path) -> None:
    words = "train digits --model tests.models:Asserting --strategy ddp --devices 1 --accelerator cuda --batch 32"
    done = command(tmp_path, *words.split(), "--output", "run", CUDA_VISIBLE_DEVICES="0")
    assert done.code == 1, done
    assert "CUDA error: device-side assert triggered" in done.err
    assert "lost another rank" not in done.err


def test_deterministic_algorithms_name_the_operation_that_has_none() -> None:
    x = torch.rand(8, 8, device=DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as raised:
            x.kthvalue(2)
    finally:
        torch.use_deterministic_algorithms(False)
    error = failures.describe(raised.value, 0).error()
    assert error.exit_code == 2
    assert "kthvalue CUDA has no deterministic implementation on this device" in str(error)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_scaled_step_copies_no_weights(optimizer: str) -> None:
    precision = Precision.of(PrecisionConfig(name="fp16"), DEVICE)
    model = nn.Linear(4096, 4096, bias=False).to(DEVICE)
    optimizers = optim.build(model, OptimConfig(name=optimizer, lr=1e-3))
    peaks_bytes = []
    for _ in range(2):  # the first step makes the state
        precision.backward((model.weight * 1e-3).sum())
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        precision.unscale(optimizers)
        for each in optimizers:
            precision.step_one(each, each.step)
        precision.update()
        synchronize()
        peaks_bytes.append(torch.cuda.max_memory_allocated() - before_bytes)
        for each in optimizers:
            optim.zero_grad(each)
    assert peaks_bytes[1] < model.weight.nbytes / 8


def test_a_snapshot_pins_one_buffer(tmp_path: Path) -> None:
    def pinned_bytes() -> int:
        return max(
            int(value) for name, value in torch.cuda.host_memory_stats().items() if name.endswith("bytes.current")
        )

    value = torch.arange(75_000_000, device=DEVICE, dtype=torch.float32)  # 300 MB
    before_bytes = pinned_bytes()
    saver = Checkpoints(tmp_path, warn=pytest.fail)
    saver.save(State({"model/value": value}, {"step": 1}), step=1, best=False)
    saver.wait()
    assert pinned_bytes() - before_bytes <= _STAGE_BYTES


def test_ranks_number_gpus_as_the_driver_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import json, os, torch, lockstep\n"
        "lockstep.session()\n"
        "uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]\n"
        "print(json.dumps([os.environ['CUDA_DEVICE_ORDER'], uuids]))\n"
    )
    visible = ",".join(map(str, range(torch.cuda.device_count())))
    paths = {"PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": visible}
    done = command(tmp_path, "run", "--devices", 1, "--accelerator", "cuda", "script.py", **paths)
    assert done.code == 0, done
    order, uuids = json.loads(next(line for line in done.out.splitlines() if line.startswith("[")))
    assert order == os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [f"GPU-{uuid}" for uuid in uuids] == [gpu.uuid for gpu in hardware.survey(None).gpus]

"""Commands that look at GPUs: the doctor and its parts, gradients of several, and a GPU that hangs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from lockstep import hardware
from lockstep.doctor import alone

from ..command import ROOT, command, end, start
from .conftest import needs_cuda, several

pytestmark = needs_cuda

STALL_S = 5
COMPARED_S = 240


def test_the_driver_tells_of_every_gpu() -> None:
    assert not hardware.driver_trouble()
    gpus = hardware.survey(None).gpus
    assert len(gpus) == torch.cuda.device_count()
    for index, gpu in enumerate(gpus):
        assert f"GPU-{torch.cuda.get_device_properties(index).uuid}" == gpu.uuid
        assert 0 < (alone.judge_gpu(index, gpu).value or 0) <= gpu.memory_bytes


@pytest.mark.parametrize("gpus", ["0", pytest.param("0,1", marks=several)])
def test_the_doctor_examines_gpus(tmp_path: Path, gpus: str) -> None:
    words = ("doctor", "--json", "--devices", len(gpus.split(",")))
    done = command(tmp_path, *words, CUDA_VISIBLE_DEVICES=gpus)
    told = json.loads(done.out)
    found = {each["name"]: each for each in told["findings"]}
    assert (done.code == 0) == (told["verdict"] != "red"), done
    assert told["accelerator"] == "cuda"
    if gpus == "0":
        assert "GPU 0" in found
    else:
        assert found["bytes sent"]["state"] == "green"
        assert "by NCCL" in found["all-reduce"]["words"]
        assert found["all-reduce 512 MiB"]["state"] in ("green", "yellow")


@several
@pytest.mark.parametrize("model", ["resnet8", "tests.judged:Transformer"])
def test_gpus_compute_one_gpus_gradient(tmp_path: Path, model: str) -> None:
    data = "tests.judged:texts" if "Transformer" in model else "digits"
    words = ("--model", model, "--data", data, "--batch", 32, "--devices", 2, "--output", "proof")
    done = command(tmp_path, "verify", "gradients", *words, CUDA_VISIBLE_DEVICES="0,1")
    assert done.code == 0, done
    check = json.loads((tmp_path / "proof" / "summary.json").read_text())["proof"]["gradients"]
    assert check["outcome"] == "holds"
    assert "ddp agrees" in check["found"]


def test_a_rank_whose_gpu_hangs_is_named_and_ends(tmp_path: Path) -> None:
    """The host waits in C code, for work that does not end."""
    words = "train digits --model tests.models:Busy --accelerator cuda --devices 1 --batch 32 --output run"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with start(tmp_path, *words.split(), "--stall-timeout", STALL_S, PYTHONPATH=paths, CUDA_VISIBLE_DEVICES="0") as run:
        ended = end(run)
    assert ended.code == 1, ended.err
    found = re.search(r"^lockstep: Rank 0 stopped (\d+) s ago in .+ \(step \d+\)", ended.err, re.MULTILINE)
    assert found, ended.err
    assert STALL_S - 1 <= int(found[1]) <= STALL_S + 2
    assert (tmp_path / "run" / "failures" / "rank_0.txt").read_text().startswith("Rank 0 stopped ")


def test_variants_are_compared_with_what_a_gpu_tells(tmp_path: Path) -> None:
    words = ("--accelerator", "cuda", "--devices", 1, "--batch", 1024, "--vary", "precision=fp32,bf16")
    told = ("--budget", "2m", "--output", "found")
    done = end(start(tmp_path, "compare", "digits", *words, *told, CUDA_VISIBLE_DEVICES="0"), COMPARED_S)
    assert done.code == 0, done
    for row in json.loads((tmp_path / "found" / "report.json").read_text())["rows"]:
        assert row["failed"] == ""
        assert row["device_memory_bytes"] > 0
        assert 0 < row["busy_gpus"] <= 1
        assert row["joules_a_step"] > 0
        assert abs(row["parts_s"]["rest"]) < 0.05 * sum(row["parts_s"].values())


def test_more_gpus_are_forecast_from_one(tmp_path: Path) -> None:
    words = ("--accelerator", "cuda", "--batch", 4096, "--devices", "1:8", "--network", "100GbE", "--within", "NVLink4")
    done = end(start(tmp_path, "forecast", "digits", *words, "--output", "found", CUDA_VISIBLE_DEVICES="0"), COMPARED_S)
    assert done.code == 0, done
    rows = json.loads((tmp_path / "found" / "forecast.json").read_text())["rows"]
    assert {row["devices"] for row in rows} == {1, 2, 4, 8}
    assert all(row["step_s"]["middle"] > 0 for row in rows)

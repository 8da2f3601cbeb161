"""`lockstep doctor` on GPUs: they are there, their copies keep their bits, and NCCL is held against their links."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lockstep.doctor import copies, devices, nvml

from ..command import command
from .conftest import several


def test_the_driver_tells_of_every_gpu() -> None:
    driver = nvml.ask(None)
    assert driver.version
    assert not driver.trouble
    assert len(driver.gpus) == torch.cuda.device_count()
    for gpu in driver.gpus:
        assert f"GPU-{torch.cuda.get_device_properties(gpu.index).uuid}" == gpu.uuid
        assert gpu.free_bytes is None or 0 < gpu.free_bytes <= gpu.memory_bytes
        assert devices.link(driver, gpu) is None or devices.link(driver, gpu)[1] > 1e9  # type: ignore[index]
    assert len(driver.links) == len(driver.gpus) * (len(driver.gpus) - 1) // 2


def test_bytes_come_back_from_every_gpu() -> None:
    found = list(copies.host_and_devices([torch.device("cuda", i) for i in range(torch.cuda.device_count())], 1, 60.0))
    assert [each.state for each in found] == ["green"], found
    assert 1e8 < (found[0].value or 0) < 1e12


def test_one_gpu_is_examined(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--json", "--devices", 1, CUDA_VISIBLE_DEVICES="0")
    told = json.loads(done.out)
    found = {each["name"]: each for each in told["findings"]}
    assert (done.code == 0) == (told["verdict"] != "red"), done
    assert told["accelerator"] == "cuda"
    assert found["copies"]["state"] == "green"
    assert "GPU 0" in found


@several
def test_gpus_are_examined_together(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--json", "--devices", 2, CUDA_VISIBLE_DEVICES="0,1")
    found = {each["name"]: each for each in json.loads(done.out)["findings"]}
    assert found["device to device"]["state"] == "green"
    assert found["all-reduce 512 MiB"]["state"] in ("green", "yellow")
    assert found["links"]["state"] in ("green", "yellow")

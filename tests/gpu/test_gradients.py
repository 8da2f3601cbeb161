"""Gradients of GPUs against one GPU's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ..command import command
from .conftest import several


@several
@pytest.mark.parametrize("model", ["resnet8", "mlp", "tests.judged:Transformer"])
def test_gpus_compute_one_gpus_gradient(tmp_path: Path, model: str) -> None:
    data = "tests.judged:texts" if "Transformer" in model else "digits"
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    words = ("--model", model, "--data", data, "--batch", 32, "--devices", 2, "--output", "proof")
    done = command(tmp_path, "verify", "gradients", *words, CUDA_VISIBLE_DEVICES=gpus)
    assert done.code == 0, done
    check = json.loads((tmp_path / "proof" / "summary.json").read_text())["proof"]["gradients"]
    assert check["outcome"] == "holds"
    assert "ddp agrees" in check["found"]

"""An example, started in each of the ways that its README names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..command import CODE, ROOT

CONVNET = (str(ROOT / "examples" / "convnet.py"), "--epochs", "2")
SINGLE = 1e-4
"""Of losses computed in float32."""


def _lines(folder: Path, *words: str) -> list[str]:
    """Return the lines of the epochs that `python WORDS` prints."""
    env = {**os.environ, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stdout.splitlines() if line.startswith("epoch ")]


def _losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"loss (\S+)", line))]


@pytest.mark.long
def test_an_example_gives_the_same_losses_however_it_is_started(tmp_path: Path) -> None:
    alone = _lines(tmp_path, *CONVNET)
    assert len(alone) == 2
    run = _lines(tmp_path, "-m", "lockstep", "run", "--devices", "2", *CONVNET)
    torchrun = _lines(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *CONVNET)
    assert (tmp_path / "runs" / "convnet" / "summary.json").exists()
    for lines in (run, sorted(torchrun)[::2], sorted(torchrun)[1::2]):  # of torchrun's, each rank's
        assert _losses(lines) == pytest.approx(_losses(alone), rel=SINGLE)

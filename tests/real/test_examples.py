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


def _losses(folder: Path, *words: str) -> list[float]:
    """Return the losses of the epochs that `python WORDS` prints, the largest first; ranks may share a line."""
    env = {**os.environ, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return sorted(map(float, re.findall(r"loss ([0-9.]+)", ended.stdout)), reverse=True)


@pytest.mark.long
def test_an_example_gives_the_same_losses_however_it_is_started(tmp_path: Path) -> None:
    alone = _losses(tmp_path, *CONVNET)
    assert len(alone) == 2
    run = _losses(tmp_path, "-m", "lockstep", "run", "--devices", "2", *CONVNET)
    torchrun = _losses(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *CONVNET)
    assert (tmp_path / "runs" / "convnet" / "summary.json").exists()
    for losses in (run, torchrun[::2], torchrun[1::2]):  # of torchrun's, each rank's
        assert losses == pytest.approx(alone, rel=SINGLE)

"""The examples run, and do what they say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ..command import CODE, ROOT


def _own_loop(*words: str, through: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *through, str(ROOT / "examples" / "own_loop.py"), *words]
    env = {**os.environ, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_a_loop_of_ones_own_gives_the_same_loss_on_each_world() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    runs = [
        _own_loop("--strategy", "single"),
        _own_loop("--strategy", "ddp", "--devices", "2"),
        _own_loop("--strategy", "ddp", through=torchrun),
    ]
    assert [run.returncode for run in runs] == [0] * len(runs), [run.stderr for run in runs]
    (last,) = {run.stdout.splitlines()[-1] for run in runs}
    assert last.startswith("loss ")

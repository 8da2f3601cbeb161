"""The examples run, and do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"


def _run(*arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *start, str(OWN_LOOP), *arguments]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_a_loop_of_ones_own_gives_the_same_loss_on_each_world() -> None:
    runs = [
        _run("--strategy", "single"),
        _run("--strategy", "ddp", "--devices", "2"),
        _run("--strategy", "ddp", "--devices", "3"),
        _run("--strategy", "dp", "--devices", "2"),
        _run("--strategy", "ddp", ranks=2),
    ]
    assert [run.returncode for run in runs] == [0] * 5, [run.stderr for run in runs]
    last = {run.stdout.splitlines()[-1] for run in runs}
    assert len(last) == 1
    assert last.pop().startswith("loss ")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--devices", "two"], "it takes a whole number."),
        (["--strategy", "dpp"], "own_loop: Unknown strategy 'dpp': did you mean"),
        (["--bogus", "1"], "unrecognized arguments: --bogus 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_a_sentence(flags: list[str], sentence: str) -> None:
    refused = _run(*flags)
    assert refused.returncode == 2
    assert sentence in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr

"""What a run says, on terminals that cannot show all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..command import command


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_a_terminal_of_plain_ascii_trains(tmp_path: Path, ranks: int) -> None:
    words = ("train", "digits", "--model", "mlp", "--max-steps", 1, "--strategy", "ddp", "--devices", ranks)
    ended = command(tmp_path, *words, PYTHONIOENCODING="ascii")
    assert (ended.code, ended.err) == (0, "")
    assert f"global batch 64 = {ranks} rank" in ended.out
    assert "? 1 micro-batch ?" in ended.out


def test_results_that_cannot_be_written_are_told_of_on_stderr(tmp_path: Path) -> None:
    words = ["train", "digits", "--model", "mlp", "--max-steps", "1", "--output", "run"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *words],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    (told,) = done.stderr.splitlines()
    assert told.startswith("warning: results cannot be written to the output (No space left on device)")
    assert done.returncode == 0
    assert (tmp_path / "run" / "summary.json").exists()

"""The examples run, and do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"


def _last_line(*arguments: str) -> str:
    command = [sys.executable, str(OWN_LOOP), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.splitlines()[-1]


def test_a_loop_of_ones_own_gives_the_same_loss_on_each_world() -> None:
    alone = _last_line("--strategy", "single")
    assert alone.startswith("loss ")
    assert _last_line("--strategy", "ddp", "--devices", "3") == alone
    assert _last_line("--strategy", "dp", "--devices", "2") == alone

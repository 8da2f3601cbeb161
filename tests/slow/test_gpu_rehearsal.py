"""The tests of a GPU hold by themselves: on a CPU, those that do not need CUDA pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from ..command import ROOT

_LEAST = 30  # of about 70


def test_the_tests_of_a_gpu_pass_on_a_cpu() -> None:
    words = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-n", "1", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"LOCKSTEP_REHEARSAL": "1"}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    passed = re.findall(r"^([.s]+)\s+\[", ended.stdout, re.MULTILINE)
    assert sum(line.count(".") for line in passed) >= _LEAST, ended.stdout

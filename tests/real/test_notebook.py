"""A function that is typed in, as into a notebook's cell, on several ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..command import CODE
from ..needs import need

CELL = """
import torch, lockstep
torch.randn(2000, 2000) @ torch.randn(2000, 2000)  # whose threads a fork would lack
FACTOR = 2
class Answer:
    def __init__(self, value):
        self.value = value
def main():
    session = lockstep.session()
    return Answer(FACTOR * session.sum(session.rank + 1))
answer = lockstep.launch(main, devices=2, accelerator="cpu", output="run")
print("answer", answer.value, type(answer) is Answer)
def broken():
    lockstep.session()
    raise ValueError("labels reach 10")
try:
    lockstep.launch(broken, devices=2, accelerator="cpu", output="broken")
except lockstep.RunError as error:
    print("error", error, *error.__notes__)
"""


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.long) for way in ("stdin", "ipython")])
def test_a_function_of_a_notebook_runs_on_several_ranks(way: str, tmp_path: Path) -> None:
    asked = ("cloudpickle", "IPython")[: 2 if way == "ipython" else 1]
    need([name for name in asked if importlib.util.find_spec(name) is None])
    words = ["-"] if way == "stdin" else ["-m", "IPython", "--no-banner", "--colors=NoColor", "-c", CELL]
    path = os.pathsep.join(filter(None, (CODE, os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, *words],
        input=CELL if way == "stdin" else "",
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "answer 6 True" in ended.stdout, ended
    assert "error Rank " in ended.stdout, ended
    assert "ValueError: labels reach 10" in ended.stdout

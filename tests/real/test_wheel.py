"""The wheel that the checkout builds has all that it needs: it trains in a place where there is no checkout."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ..command import ROOT, events
from ..needs import need


@pytest.mark.long
def test_an_installed_wheel_trains_two_ranks_outside_the_checkout(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, words)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    isolated = () if importlib.util.find_spec("hatchling") is None else ("--no-build-isolation",)
    built = run(*pip, "wheel", "--no-deps", *isolated, "--wheel-dir", ".", ROOT)
    need(["hatchling, here or from a registry"] if "hatchling" in built.stderr and built.returncode else [])
    assert built.returncode == 0, built.stderr
    assert run(sys.executable, "-m", "venv", "--without-pip", "venv").returncode == 0
    programs = tmp_path / "venv" / "bin"
    installed = run(
        *pip, "--python", programs / "python", "install", "--no-deps", "--no-index", *tmp_path.glob("*.whl")
    )
    assert installed.returncode == 0, installed.stderr
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # all but the wheel is this environment's

    where = run(programs / "python", "-c", "import lockstep; print(lockstep.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(packages)
    ended = run(programs / "lockstep", "train", "digits", "--devices", 2, "--max-steps", 2, "--output", "run")
    assert ended.returncode == 0, ended.stderr
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 2]

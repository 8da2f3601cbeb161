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


def _run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_an_installed_wheel_trains_two_ranks_outside_the_checkout(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    isolated = [] if importlib.util.find_spec("hatchling") is None else ["--no-build-isolation"]
    built = _run(*pip, "wheel", "--no-deps", *isolated, "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    need(["hatchling, here or from a registry"] if "hatchling" in built.stderr and built.returncode else [])
    assert built.returncode == 0, built.stderr
    assert _run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path).returncode == 0
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = tmp_path.glob("*.whl")
    done = _run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # all but the wheel is this environment's

    where = _run(python, "-c", "import lockstep; print(lockstep.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(packages)
    command = python.with_name("lockstep")
    ended = _run(command, "train", "digits", "--devices", 2, "--max-steps", 2, "--output", "run", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 2]

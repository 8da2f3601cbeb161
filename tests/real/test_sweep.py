"""Optuna's trials over `lockstep.launch`: the same search with one rank a trial and with two."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..command import ROOT
from ..needs import need


@pytest.mark.slow
def test_a_search_has_the_same_trials_on_one_rank_and_on_two(tmp_path: Path) -> None:
    need([] if importlib.util.find_spec("optuna") else ["optuna"])
    words = [sys.executable, str(ROOT / "examples" / "sweep.py"), "--trials", "2", "--epochs", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    best = []
    for devices in ("1", "2"):
        storage = f"sqlite:///{tmp_path / devices}.db"
        done = subprocess.run(
            [*words, "--devices", devices, "--storage", storage],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        )
        best.append(done.stdout.splitlines()[-1])
    assert best[0].startswith("best of 2 trials: accuracy 0.")
    assert best[0] == best[1]
    assert len(list((tmp_path / "runs").iterdir())) == 4

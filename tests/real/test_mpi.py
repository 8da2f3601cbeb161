"""Ranks that a real mpirun has started, Open MPI's and MPICH's: they meet without an address."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..command import LIMIT_S, weights
from ..needs import need
from .conftest import CODE, RUN

# Ranks that are bound to one core each would compute in fewer threads, and so with other bits.
STARTERS = {"mpirun.openmpi": ("--oversubscribe", "--bind-to", "none", "-n", "2"), "mpirun.mpich": ("-n", "2")}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.long
@pytest.mark.parametrize("starter", STARTERS)
def test_ranks_of_mpirun_meet_without_an_address(starter: str, spawned: dict[str, bytes], tmp_path: Path) -> None:
    need([starter] if shutil.which(starter) is None else [])
    words = [starter, *STARTERS[starter], sys.executable, "-m", "lockstep", *map(str, RUN), "--output", "run"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path), **CODE, **_AS_ROOT}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["chosen"]["launcher"], manifest["topology"]["size"]) == ("environment", 2)
    assert weights(tmp_path / "run") == spawned
    assert not list(tmp_path.rglob("mpi-*"))

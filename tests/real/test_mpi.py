"""Ranks that a real mpirun has started, Open MPI's and MPICH's: they meet without an address, and with one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..command import end, weights
from ..needs import need
from ..ports import free_port
from .conftest import CODE, RUN

STARTERS = {
    # Ranks that are bound to one core each would compute in fewer threads, and so with other bits.
    "mpirun.openmpi": ("--oversubscribe", "--bind-to", "none", "-n", "2"),
    "mpirun.mpich": ("-n", "2"),
}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.long
@pytest.mark.parametrize("starter", STARTERS)
def test_ranks_of_mpiruns_at_once_meet_their_own(starter: str, spawned: dict[str, bytes], tmp_path: Path) -> None:
    need([starter] if shutil.which(starter) is None else [])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    runs: dict[str, tuple[str, ...]] = {"first": (), "other": ()}
    if starter == "mpirun.openmpi":
        runs["at an address"] = ("-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}")
    started = []
    for run, flags in runs.items():
        words = (*RUN, "--seed", int(run == "other"), "--output", run)
        started.append(
            subprocess.Popen(
                [starter, *STARTERS[starter], *flags, sys.executable, "-m", "lockstep", *map(str, words)],
                cwd=tmp_path,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary), **CODE, **_AS_ROOT},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in started:
        ended = end(process)
        assert ended.code == 0, ended.err
    for run in runs:
        manifest = json.loads((tmp_path / run / "manifest.json").read_text())
        assert (manifest["chosen"]["launcher"], manifest["topology"]["size"]) == ("environment", 2)
        assert (weights(tmp_path / run) == spawned) == (run != "other")
    assert not list(temporary.rglob("lockstep*"))

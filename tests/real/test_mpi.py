"""Ranks that a real mpirun has started, Open MPI's and MPICH's: they meet without being told where, and apart."""

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

pytestmark = pytest.mark.long

STARTERS = {
    # Ranks that are bound to one core each would compute in fewer threads, and so with other bits.
    "mpirun.openmpi": ("--oversubscribe", "--bind-to", "none", "-n", "2"),
    "mpirun.mpich": ("-n", "2"),
}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _command(starter: str, *flags: str) -> list[str]:
    need([starter] if shutil.which(starter) is None else [])
    return [starter, *STARTERS[starter], *flags, sys.executable, "-m", "lockstep", *map(str, RUN)]


def _start(folder: Path, words: list[str], **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **CODE, **_AS_ROOT, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("starter", STARTERS)
def test_ranks_of_two_mpiruns_at_once_meet_their_own(starter: str, spawned: dict[str, bytes], tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    runs = [tmp_path / f"seed-{seed}" for seed in range(2)]
    started = [
        _start(tmp_path, [*_command(starter), "--seed", str(seed), "--output", str(run)], TMPDIR=str(temporary))
        for seed, run in enumerate(runs)
    ]
    for process in started:
        ended = end(process)
        assert ended.code == 0, ended.err
    for run in runs:
        manifest = json.loads((run / "manifest.json").read_text())
        assert (manifest["chosen"]["launcher"], manifest["topology"]["size"]) == ("environment", 2)
    assert weights(runs[0]) == spawned
    assert weights(runs[1]) != spawned
    assert not list(temporary.rglob("lockstep*"))


def test_ranks_of_mpirun_meet_at_the_address_that_they_are_given(spawned: dict[str, bytes], tmp_path: Path) -> None:
    at = ("-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}")
    ended = end(_start(tmp_path, [*_command("mpirun.openmpi", *at), "--output", "run"]))
    assert ended.code == 0, ended.err
    assert weights(tmp_path / "run") == spawned


def test_what_mpirun_and_flags_say_differently_is_one_sentence(tmp_path: Path) -> None:
    ended = end(_start(tmp_path, [*_command("mpirun.openmpi"), "--devices", "4"]))
    assert ended.code != 0
    words = "lockstep: --devices 4 disagrees with the environment, where OMPI_COMM_WORLD_LOCAL_SIZE is 2;"
    assert words in ended.err

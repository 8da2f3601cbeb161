"""Runs under a real Slurm: submitted, by a script of the user's own; stopped and requeued."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import hardware
from lockstep.data import digits
from lockstep.monitor.signals import STOPPING

from ..command import GATED, OPEN, command, gate, losses, sentence, until, weights
from .conftest import CODE, RUN
from .slurm import Cluster, running_cluster
from .test_script import are_alike, check_failed_once, looped

pytestmark = pytest.mark.long
SLOW = pytest.mark.slow

_SUBMIT = ("submit", "slurm", "--time", "20:00")
_PYTHON = f"{sys.executable} -m lockstep"
_TRAIN = " ".join(map(str, RUN))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A controller and the nodes n1 and n2."""
    with running_cluster() as running:
        yield running


def _topology(folder: Path) -> tuple[Any, ...]:
    found = json.loads((folder / "manifest.json").read_text())
    return found["chosen"]["launcher"], found["topology"]["size"], found["topology"]["nodes"]


def _log(folder: Path) -> Path:
    """Return the log of the job whose run is in the folder, once there is one."""
    until(lambda: any(folder.glob("slurm-*.out")))
    return next(folder.glob("slurm-*.out"))


def _submitted(cluster: Cluster, folder: Path, *words: Any) -> int:
    """Submit a run from the folder; return the job's number."""
    ended = command(folder, *_SUBMIT, *words, **cluster.env)
    assert ended.code == 0, ended.err
    found = re.match(
        r"lockstep: submitted as job (\d+): tail -F \S.* follows its log, and scancel \1 ends it", ended.err
    )
    assert found, ended.err
    return int(found[1])


def test_a_submitted_run_has_the_bits_of_spawned_ranks(
    cluster: Cluster, spawned: dict[str, bytes], tmp_path: Path
) -> None:
    run = tmp_path / "with space & 100%j"
    job = _submitted(cluster, tmp_path, "--nodes", 2, *RUN[1:], "--output", run)
    assert cluster.ended(job) == "COMPLETED"
    assert f"done after {RUN[-1]} steps" in _log(run).read_text()
    assert _topology(run) == ("environment", 2, 2)
    assert weights(run) == spawned


def test_a_script_of_the_users_own_starts_ranks_by_srun_or_torchrun(
    cluster: Cluster, spawned: dict[str, bytes], tmp_path: Path
) -> None:
    path, alone = looped(tmp_path)
    script = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks=2 --exclusive --output={tmp_path}/log
srun --nodes=1 {_PYTHON} {_TRAIN} --output srun; echo "exit $?"
{sys.executable} -m torch.distributed.run --nproc-per-node 2 -m lockstep {_TRAIN} --output torchrun; echo "exit $?"
srun {sys.executable} train.py two; echo "exit $?"
srun --error=told {_PYTHON} run --output failed train.py - broken; echo "exit $?"
"""
    cluster.ended(cluster.submit(script, tmp_path, CUDA_VISIBLE_DEVICES="", **CODE))
    assert re.findall(r"exit (\d+)", log := (tmp_path / "log").read_text()) == ["0", "0", "0", "1"], log
    job = _submitted(cluster, tmp_path, "--nodes", 2, "train.py", "submitted")
    assert cluster.ended(job) == "COMPLETED"
    assert are_alike(losses(tmp_path / "runs" / "train"), alone)
    for name in ("srun", "torchrun"):
        assert _topology(tmp_path / name) == ("environment", 2, 1)
        assert weights(tmp_path / name) == spawned
    assert _topology(tmp_path / "two")[1:] == (2, 2)
    assert are_alike(losses(tmp_path / "two"), alone)
    check_failed_once((tmp_path / "told").read_text(), path)


def test_an_ejected_file_reads_slurms_variables(cluster: Cluster, tmp_path: Path) -> None:
    words = ("digits", "--strategy", "ddp", "--accelerator", "cpu", "--precision", "fp64", "--max-steps", 5)
    ended = command(tmp_path, "eject", *words, "--log-every", 1, "--slurm", "--output", "train.py")
    assert ended.code == 0, ended
    shutil.copy(Path(digits.__file__).with_name("digits.npz"), tmp_path)
    script = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks=2 --exclusive --output={tmp_path}/log
srun {sys.executable} train.py; echo "exit $?"
"""
    cluster.ended(cluster.submit(script, tmp_path, CUDA_VISIBLE_DEVICES="", **CODE))
    log = (tmp_path / "log").read_text()
    assert "exit 0" in log, log
    assert command(tmp_path, "train", *words, "--log-every", 1, "--strategy", "single", "--output", "run").code == 0
    found = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", log, re.MULTILINE)]
    assert found == pytest.approx([loss for _, loss in losses(tmp_path / "run")], rel=1e-9)
    assert len(found) == 5


@pytest.mark.parametrize(
    "why", ["signalled", *(pytest.param(why, marks=SLOW) for why in ("pre-empted", "near its limit"))]
)
def test_a_run_that_is_stopped_saves_requeues_itself_and_ends_with_the_same_bits(
    why: str, cluster: Cluster, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    gate(tmp_path, 10)
    job, preempting = _submitted(cluster, tmp_path, "--time", "10:00", "--nodes", 2, *GATED[1:]), 0
    until(lambda: len(losses(run)) >= 10)
    if why == "signalled":
        cluster.ask("scancel", "--signal=USR1", str(job))
    elif why == "pre-empted":
        flags = ("--partition=urgent", "--nodes=2", "--exclusive")
        preempting = cluster.submit("#!/bin/bash\n", tmp_path, *flags)
    else:
        cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=2")  # the warning comes 90 s before
    until(lambda: STOPPING in _log(run).read_text())
    gate(tmp_path, OPEN)
    assert not preempting or cluster.ended(preempting) == "COMPLETED"
    cluster.start_again(job)
    assert cluster.ended(job) == "COMPLETED"
    log = _log(run).read_text()
    assert "lockstep: the job requeues itself" in log
    assert re.search(r"continuing at step \d+ of 60", log), log
    assert cluster.about(job)["Restarts"] == "1"
    assert losses(run) == losses(undisturbed)
    assert weights(run) == weights(undisturbed)
    assert not list(run.glob(".slurm-*"))


def test_what_is_told_of_a_job_that_is_refused_fails_or_is_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    told = sentence(command(tmp_path, *_SUBMIT, "--partition", "none-such", "digits", **cluster.env))
    assert "sbatch refused the job: invalid partition specified: none-such;" in told
    assert not any((tmp_path / "runs").iterdir())
    if not hardware.gpus(None):  # else the nodes have the GPUs that they claim to have
        job = _submitted(cluster, tmp_path, "--gpus-per-node", 2, "digits", "--output", "failed")
        assert cluster.ended(job) == "FAILED"
        assert "--accelerator cuda: this machine shows no GPU" in _log(tmp_path / "failed").read_text()
        assert cluster.about(job)["ExitCode"] == "2:0"
    gate(tmp_path, 3)
    job = _submitted(cluster, tmp_path, *GATED[1:])
    until(lambda: len(losses(tmp_path / "run")) >= 3)
    cluster.ask("scancel", str(job))
    until(lambda: STOPPING in _log(tmp_path / "run").read_text())
    gate(tmp_path, OPEN)
    assert cluster.ended(job) == "CANCELLED"
    until(lambda: "and saved; continue with" in _log(tmp_path / "run").read_text())

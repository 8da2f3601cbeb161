"""Runs under a real Slurm: submitted by us, by a script of the user's own, as an array; stopped and requeued."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import hardware

from ..command import command, end, events, gone, losses, sentence, start, until, weights
from .conftest import CODE, RUN
from .slurm import Cluster

pytestmark = pytest.mark.long

_SUBMIT = ("submit", "slurm", "--time", "20:00")
_PYTHON = f"{sys.executable} -m lockstep"
_TRAIN = f"{_PYTHON} {' '.join(map(str, RUN))}"


def _topology(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return {"launcher": found["chosen"]["launcher"], **{name: found["topology"][name] for name in ("size", "nodes")}}


def _job_of(folder: Path) -> int:
    """Return the number of the job whose log lies in the run's folder, once there is one."""
    until(lambda: any(folder.glob("slurm-*.out")))
    return int(next(folder.glob("slurm-*.out")).stem.partition("-")[2])


def test_a_submitted_run_has_the_bits_of_spawned_ranks(
    cluster: Cluster, spawned: dict[str, bytes], tmp_path: Path
) -> None:
    run = tmp_path / "with space & 100%j"
    ended = command(tmp_path, *_SUBMIT, "--nodes", 2, *RUN[1:], "--output", run, **cluster.env, **CODE)
    assert ended.code == 0, ended.err
    assert "global batch 64 = 2 ranks" in ended.out
    assert f"done after {RUN[-1]} steps" in ended.out
    assert _topology(run) == {"launcher": "environment", "size": 2, "nodes": 2}
    assert weights(run) == spawned
    job = _job_of(run)
    assert ended.out == (run / f"slurm-{job}.out").read_text()
    # The same script once more, by hand: the run is complete, and stays as it is.
    again = int(cluster.ask("sbatch", "--parsable", str(run / "submit.sh")))
    assert cluster.ended(again) == "COMPLETED"
    assert weights(run) == spawned


def test_a_script_of_the_users_own_starts_ranks_by_srun_or_torchrun(
    cluster: Cluster, spawned: dict[str, bytes], tmp_path: Path
) -> None:
    torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --standalone -m lockstep"
    script = f"""#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --output={tmp_path}/log
srun {_TRAIN} --output {tmp_path}/by-srun
{torchrun} {" ".join(map(str, RUN))} --output {tmp_path}/by-torchrun
"""
    job = cluster.submit(script, tmp_path, **CODE)
    assert cluster.ended(job) == "COMPLETED", (tmp_path / "log").read_text()
    for run in ("by-srun", "by-torchrun"):
        assert _topology(tmp_path / run) == {"launcher": "environment", "size": 2, "nodes": 1}
        assert weights(tmp_path / run) == spawned


def test_an_array_is_a_world_once_it_is_told_where_to_meet(
    cluster: Cluster, spawned: dict[str, bytes], tmp_path: Path
) -> None:
    script = f"#!/bin/bash\n{_TRAIN} --init-method file://{tmp_path}/meeting --output {tmp_path}/run --timeout 100\n"
    job = cluster.submit(script, tmp_path, "--array=4-6:2", f"--output={tmp_path}/log-%a", **CODE)
    logs = [tmp_path / f"log-{index}" for index in (4, 6)]
    assert cluster.ended(job) == "COMPLETED", [log.read_text() for log in logs]
    assert _topology(tmp_path / "run")["size"] == 2
    assert weights(tmp_path / "run") == spawned
    assert not (tmp_path / "meeting").exists()


def test_a_run_that_is_signalled_saves_requeues_itself_and_ends_with_the_same_bits(
    cluster: Cluster, tmp_path: Path
) -> None:
    steps = 40
    flags = (*RUN[1:-1], steps, "--log-every", 1)
    whole = command(tmp_path, "train", *flags, "--devices", 2, "--output", tmp_path / "whole", **CODE)
    assert whole.code == 0, whole.err
    run = tmp_path / "run"
    with start(tmp_path, *_SUBMIT, "--nodes", 2, *flags, "--output", run, **cluster.env, **CODE) as submitted:
        until(lambda: len(losses(run)) > 5)
        job = _job_of(run)
        cluster.ask("scancel", "--signal=USR1", str(job))
        cluster.start_again(job)
        ended = end(submitted)
    assert ended.code == 0, ended
    assert "lockstep: the job requeues itself" in ended.out
    assert (found := re.search(rf"continuing at step (\d+) of {steps}", ended.out))
    assert 5 < int(found[1]) < steps
    assert cluster.about(job)["Restarts"] == "1"
    assert losses(run) == losses(tmp_path / "whole")
    assert weights(run) == weights(tmp_path / "whole")
    assert not list(run.glob(".slurm-*"))


@pytest.mark.slow
@pytest.mark.parametrize("why", ["pre-empted", "near its limit"])
def test_a_run_that_slurm_itself_stops_saves_requeues_itself_and_goes_on(
    why: str, cluster: Cluster, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = (*RUN[1:-1], 10**6, "--epochs", 10**5, "--log-every", 1, "--time", "10:00", "--output", run)
    with start(tmp_path, "submit", "slurm", "--nodes", 2, *flags, **cluster.env, **CODE) as submitted:
        until(lambda: len(losses(run)) > 5)
        job = _job_of(run)
        if why == "pre-empted":
            urgent = cluster.submit(
                "#!/bin/bash\nsleep 1\n", tmp_path, "--partition=urgent", "--nodes=2", "--exclusive"
            )
            assert cluster.ended(urgent) == "COMPLETED"
        else:
            cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=2")  # the warning comes 90 s before
        cluster.start_again(job)
        until(lambda: len(events(run, "start")) == 2)
        second = events(run, "start")[1]["first_step"]
        until(lambda: losses(run)[-1][0] > second + 5)
        cluster.ask("scancel", str(job))
        ended = end(submitted)
    assert "lockstep: the job requeues itself" in ended.out, ended
    assert f"continuing at step {second} of 1000000" in ended.out.replace(",", "")
    assert second > 5
    made = [step for step, _ in losses(run)]
    assert made == list(range(1, len(made) + 1))  # saved when it was told, and nothing made twice


def test_a_job_that_is_cancelled_saves_and_stays_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start(tmp_path, *_SUBMIT, *RUN[1:-1], 10**6, "--output", run, **cluster.env, **CODE) as submitted:
        until(lambda: len(events(run, "step")) > 0)
        cluster.ask("scancel", str(job := _job_of(run)))
        ended = end(submitted)
    assert ended.code == 1
    assert f"Job {job} ended because it was cancelled; submit it again with --resume auto" in ended.err
    assert "and saved; continue with" in ended.out
    assert "so that it does not requeue itself" in ended.out
    assert (run / "checkpoints" / "last").exists()
    assert cluster.about(job)["JobState"] == "CANCELLED"


def _ranks(run: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:4] == ["-m", "lockstep", "train"] and str(run) in words:
            found.append(process)
    return found


def test_a_job_that_never_reaches_a_checkpoint_stops_requeuing_itself(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start(tmp_path, *_SUBMIT, *RUN[1:], "--output", run, **cluster.env, **CODE) as submitted:
        job = _job_of(run)
        for attempt in range(3):
            until(lambda: len(_ranks(run)) == 1)
            ranks = _ranks(run)
            cluster.ask("scancel", "--signal=USR1", str(job))
            until(lambda: gone(ranks))  # noqa: B023  # called here
            if attempt < 2:
                cluster.start_again(job)
        ended = end(submitted)
    assert ended.code == 75, ended
    assert ended.out.count("lockstep: the job requeues itself") == 2
    assert "stopped 3 times without a new checkpoint" in ended.out


def test_a_job_that_can_never_start_is_told(cluster: Cluster, tmp_path: Path) -> None:
    with start(tmp_path, *_SUBMIT, "--nodes", 9, "digits", **cluster.env, **CODE) as submitted:
        submitted.says("(PartitionConfig), and will not start as it was asked for: end it with scancel")
        submitted.send_signal(signal.SIGINT)
        job = re.findall(r"scancel (\d+)", end(submitted).err)[-1]
    cluster.ask("scancel", job)


def test_ctrl_c_ends_the_following_and_not_the_job(cluster: Cluster, tmp_path: Path) -> None:
    held = ("--sbatch=--hold", "--job-name", "held")
    with start(tmp_path, *_SUBMIT, *held, *RUN[1:], **cluster.env, **CODE) as submitted:
        submitted.says("waits (JobHeldUser)")
        submitted.send_signal(signal.SIGINT)
        ended = end(submitted)
    job = next(line.split()[0] for line in cluster.ask("squeue", "--noheader", "--name=held").splitlines())
    log = tmp_path / "runs" / "digits-resnet8" / f"slurm-{job}.out"
    said = f"Job {job} goes on, no longer followed: tail -F {log} follows it again, and scancel {job} ends it."
    assert sentence(ended, code=75) == said
    assert cluster.about(int(job))["JobState"] == "PENDING"
    cluster.ask("scancel", job)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--partition", "none-such"), "sbatch refused the job: invalid partition specified: none-such;"),
        (("--sbatch=--none-such",), "sbatch refused the job: "),
        (("--mem", "99T"), "sbatch refused the job: Memory specification can not be satisfied;"),
    ],
)
def test_what_sbatch_refuses_is_told_in_its_words(
    flags: tuple[object, ...], words: str, cluster: Cluster, tmp_path: Path
) -> None:
    told = sentence(command(tmp_path, *_SUBMIT, *flags, "digits", **cluster.env, **CODE))
    assert words in told
    assert told.endswith("; nothing was submitted.")
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.skipif(bool(hardware.gpus(None)), reason="the nodes then have the GPU that they claim to have")
def test_the_jobs_exit_code_is_the_commands(cluster: Cluster, tmp_path: Path) -> None:
    ended = command(tmp_path, *_SUBMIT, "--gpus-per-node", 2, "digits", **cluster.env, **CODE)
    assert ended.code == 2
    assert "--accelerator cuda: this machine shows no GPU" in ended.out
    assert re.search(r"job \d+ ended with exit code 2; its log is ", ended.err)


@pytest.mark.parametrize(
    ("through", "flags", "words"),
    [
        (
            ("srun", "--nodes=1", "--ntasks=2"),
            ("--devices", "4"),
            "--devices 4 disagrees with the environment, where SLURM_STEP_TASKS_PER_NODE of this node is 2;",
        ),
        (
            ("srun", "--nodes=1", "--ntasks=2"),
            ("--nodes", "2"),
            "--nodes 2 disagrees with the environment, where SLURM_STEP_NUM_NODES is 1;",
        ),
        (
            ("srun", "--nodes=2", "--ntasks=2"),
            ("--strategy", "dp"),
            "--strategy dp is one process, but 2 ranks were asked for (by --nodes, --world-size or the environment's "
            "SLURM_STEP_NUM_TASKS)",
        ),
        (
            ("salloc", "--quiet", "--ntasks=2"),
            (),
            "SLURM_NTASKS is 2, but SLURM_STEP_ID is not set: the job has 2 tasks, and srun did not start this process",
        ),
    ],
)
def test_what_slurm_and_flags_say_differently_is_one_sentence(
    through: tuple[str, ...], flags: tuple[str, ...], words: str, cluster: Cluster, tmp_path: Path
) -> None:
    done = cluster.run(*through, *_TRAIN.split(), *flags, folder=tmp_path, **CODE)
    told = [line for line in done.stderr.splitlines() if line.startswith("lockstep: ")]
    assert done.returncode == 2, done.stderr
    assert told
    assert all(words in line for line in told)


def test_a_step_of_one_task_is_no_world(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run("srun", "--ntasks=1", *_TRAIN.split(), "--output", "run", folder=tmp_path, **CODE)
    assert done.returncode == 0, done.stderr
    assert _topology(tmp_path / "run") == {"launcher": "inline", "size": 1, "nodes": 1}


def test_a_step_of_two_nodes_is_examined(cluster: Cluster, tmp_path: Path) -> None:
    through = ("srun", "--nodes=2", "--ntasks=2")
    done = cluster.run(*through, *_PYTHON.split(), "doctor", "--accelerator", "cpu", "--json", folder=tmp_path, **CODE)
    told = json.loads(done.stdout)
    assert told["ranks"] == 2, done
    found = {each["name"]: each["state"] for each in told["findings"]}
    assert (found["ports"], found["rank to rank"]) == ("green", "green")
    assert done.returncode == 0, done

"""What is asked of Slurm: laid out and written as a script, which bash runs; no Slurm is needed."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from lockstep.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")


def _script(capsys: Capture, *words: str) -> str:
    assert main(["submit", "slurm", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_a_dry_run_prints_a_script_that_bash_reads_and_makes_nothing(capsys: Capture, tmp_path: Path) -> None:
    flags = ("--nodes", "2", "--gpus-per-node", "a100:4", "--time", "20:00", "--sbatch=--exclusive", "--mem", "8G")
    asked = ("digits", "--lr", "0.2", "--output", str(tmp_path / "it's 100% mine"))
    script = _script(capsys, *flags, *asked)
    subprocess.run(["/bin/bash", "-n"], input=script, text=True, check=True)
    directives = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}
    wanted = "--job-name=digits-resnet8 --nodes=2 --ntasks-per-node=4 --gpus-per-node=a100:4 --mem=8G --time=20:00"
    assert {*wanted.split(), "--requeue", "--signal=USR1@90", "--open-mode=append", "--exclusive"} < directives
    assert f'--output="{tmp_path}/it\'s 100%% mine/slurm-%j.out"' in directives
    command = script[script.index("srun --kill") : script.index("\ncode=$?\n")]
    words = shlex.split(command.replace("\\\n", ""))
    started = [*asked, "--resume", "auto", "--nodes", "2", "--accelerator", "cuda"]
    assert words[words.index("train") + 1 :] == started
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_name_gets_the_next_default_folder(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "runs" / "digits-resnet8").mkdir(parents=True)
    assert f"folder={tmp_path}/runs/digits-resnet8-2\n" in _script(capsys, "digits")
    # One that is to be continued keeps its own, where it holds a run too.
    (tmp_path / "runs" / "digits-resnet8" / "manifest.json").touch()
    assert f"folder={tmp_path}/runs/digits-resnet8\n" in _script(capsys, "digits", "--resume", "auto")


def test_a_job_is_copied_to_its_store(capsys: Capture, tmp_path: Path) -> None:
    script = _script(capsys, "digits", "--output", "s3://bucket/run")
    assert f"folder={tmp_path}/runs/s3.bucket.run\n" in script
    assert " train digits --remote s3://bucket/run \\\n" in script


@pytest.mark.parametrize(
    ("words", "tasks", "more"),
    [
        ("--nodes 2 --gpus-per-node 2 digits", 2, "4 ranks on 2 nodes, strategy ddp"),
        ("--tasks-per-node 3 digits --strategy ddp", 3, ""),
        ("digits", 1, "strategy single"),
        ("--gpus-per-node 4 digits --strategy dp", 1, " --devices 4 "),
        ("--nodes 2 --gpus-per-node 4 digits --strategy hybrid", 1, " --nodes 2 --devices 4 "),
    ],
)
def test_there_is_one_task_a_gpu_or_one_a_node(words: str, tasks: int, more: str, capsys: Capture) -> None:
    script = _script(capsys, *words.split())
    assert f"#SBATCH --ntasks-per-node={tasks}\n" in script
    assert more in script


def test_short_limits_get_no_warning(capfd: Capture) -> None:
    for time, is_warned in (("5", True), ("4:59", False), ("1-0", True), ("UNLIMITED", True)):
        assert main(["submit", "slurm", "--dry-run", "--time", time, "digits"]) == 0
        told = capfd.readouterr()
        assert ("#SBATCH --signal" in told.out) == is_warned
        assert (f"--time {time}: too short for a warning" in told.err) != is_warned


_FAKES = {
    # Of its words, the fourth is what each rank runs in bash, and the fifth is that one's note.
    "srun": '[ -z "$SAVED" ] || ln -sfn "$SAVED" run/checkpoints/last; bash -c "$4" "$5" sh -c "exit $CODE"',
    "squeue": 'echo "$STATE"',
    "scontrol": 'echo "asked to $1"',
}
_STARTS = (
    # the ranks' exit code, the job's state, the checkpoint that they save; the job's exit code, whether it is requeued
    (0, "RUNNING", "", 0, False),
    (1, "RUNNING", "", 1, False),
    (75, "COMPLETING", "", 75, False),
    (143, "RUNNING", "step-20", 75, True),
    (75, "RUNNING", "", 75, True),
    (75, "RUNNING", "step-30", 75, True),
    (75, "RUNNING", "", 75, True),
    (75, "RUNNING", "", 75, True),
    (75, "RUNNING", "", 75, False),
)


def test_a_job_requeues_itself_unless_it_is_done_cancelled_or_never_reaches_a_checkpoint(
    tmp_path: Path, capsys: Capture
) -> None:
    script = _script(capsys, "digits", "--output", "run")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name, text in _FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for row in _STARTS:
        code, state, saved, exits, is_requeued = row
        env = {
            "CODE": f"{code}",
            "STATE": state,
            "SAVED": saved,
            "SLURM_JOB_ID": "7",
            "PATH": f"{tmp_path}:/usr/bin:/bin",
        }
        done = subprocess.run(["/bin/bash", "-c", script], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, "asked to requeue" in done.stdout) == (exits, is_requeued), (row, done)
    assert "stopped 3 times without a new checkpoint" in done.stdout


def test_a_script_stands_in_place_of_a_recipe(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import lockstep\n")
    script = _script(capsys, "--nodes", "2", "--time", "20:00", "--precision", "bf16", "train.py", "--time", "3")
    assert "#SBATCH --time=20:00\n" in script
    command = script[script.index("srun --kill") : script.index("\ncode=$?\n")]
    words = shlex.split(command.replace("\\\n", ""))
    settled = ["--output", str(tmp_path / "runs" / "train"), "--resume", "auto", "--nodes", "2"]
    assert words[words.index("run") + 1 :] == ["--precision", "bf16", *settled, "train.py", "--time", "3"]

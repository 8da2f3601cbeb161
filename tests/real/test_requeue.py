"""The sbatch script decides whether its job goes on; programs stand in for Slurm's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lockstep.cli.main import main

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
    (75, "RUNNING", "step-20", 75, True),
    (143, "RUNNING", "", 75, True),
    (75, "RUNNING", "", 75, True),
    (75, "RUNNING", "step-30", 75, True),
    (75, "RUNNING", "", 75, True),
    (75, "RUNNING", "", 75, True),
    (75, "RUNNING", "", 75, False),
)


def test_a_job_requeues_itself_unless_it_is_done_cancelled_or_never_reaches_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "slurm", "--dry-run", "digits", "--output", "run"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name, text in _FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    for row in _STARTS:
        code, state, saved, exits, is_requeued = row
        given = {**env, "CODE": str(code), "STATE": state, "SAVED": saved}
        done = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True, check=False)
        assert (done.returncode, "asked to requeue" in done.stdout) == (exits, is_requeued), (row, done)
    assert "stopped 3 times without a new checkpoint" in done.stdout

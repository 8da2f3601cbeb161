"""A job from its submission to its end: its number, its log as it grows, and its exit code."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import RequestError, RunError

_LOOK_S = 1.0
_ASK_S = 60.0
_UNKNOWN_LIMIT = 30
"""Looks in a row at which the controller does not answer, before we give up."""
_ENDED = frozenset(
    {
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("PREEMPTED", "DEADLINE", "BOOT_FAIL"),
    }
)
_NEVER = frozenset({"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"})
"""Reasons to wait that go only when somebody changes the job or the cluster."""


def check_there() -> None:
    """Raise `RequestError` on a machine without Slurm's commands."""
    if missing := [name for name in ("sbatch", "scontrol") if shutil.which(name) is None]:
        raise RequestError(
            f"{missing[0]} is not on PATH: submit from a machine that has Slurm's commands, or add --dry-run, which "
            "prints the script anywhere."
        )


def submit(script: Path) -> int:
    """Hand a script to sbatch; return the job's number. Raises `RequestError`, in sbatch's words, where it refuses."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"sbatch gave no answer within {_ASK_S:g} s; look with squeue --me whether the job is there."
        ) from error
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        raise RequestError(f"sbatch refused the job: {_words(done.stderr)}; nothing was submitted.")
    return int(number)


def follow(job: int, log: Path, show: Callable[[bytes], None], say: Callable[[str], None]) -> int:
    """Show the job's log until the job has ended; return its exit code.

    `show` gets what the log has grown by, `say` a line when the job begins to wait. Raises `RunError` for a job that
    ended in another way than by an exit code of its own.
    """
    shown, told, silent = 0, "", 0
    while True:
        about = _about(job)
        silent = 0 if about else silent + 1
        if silent > _UNKNOWN_LIMIT:
            raise RunError(f"Slurm no longer tells of job {job}; its log is {log}, and sacct -j {job} may know more.")
        state = about.get("JobState", "")
        waits = about.get("Reason", "") if state == "PENDING" else ""
        if waits and waits != told:
            say(_waiting(job, about))
        told = waits
        shown += _grown(log, shown, show)
        if state in _ENDED:
            return _code(job, state, about.get("ExitCode", ""), log)
        time.sleep(_LOOK_S)


def _about(job: int) -> dict[str, str]:
    """Return what the controller says about the job; empty where it says nothing."""
    try:
        said = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", str(job)],
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}
    return dict(re.findall(r"(\w+)=(\S*)", said.stdout))


def _waiting(job: int, about: dict[str, str]) -> str:
    reason, again = about["Reason"], "" if about.get("Restarts", "0") == "0" else "to start again "
    if reason == "BeginTime":
        return f"job {job} waits {again}until {about.get('StartTime')}"
    if reason in _NEVER:
        return f"job {job} waits ({reason}), and will not start as it was asked for: end it with scancel {job}"
    return f"job {job} waits {again}" + ("for its turn" if reason == "None" else f"({reason})")


def _grown(log: Path, shown: int, show: Callable[[bytes], None]) -> int:
    """Show what the log has more than `shown` bytes; return how many."""
    try:
        with log.open("rb") as file:
            file.seek(shown)
            more = file.read()
    except OSError:  # which the node has not begun, or which this machine does not see yet
        return 0
    if more:
        show(more)
    return len(more)


def _code(job: int, state: str, exit_code: str, log: Path) -> int:
    code, _, number = exit_code.partition(":")
    if state == "COMPLETED":
        return 0
    if state == "FAILED" and code.isdecimal() and int(code):
        return int(code)
    ways = {
        "FAILED": f"by signal {number}",
        "CANCELLED": "because it was cancelled; submit it again with --resume auto to continue",
        "TIMEOUT": "at its time limit; submit it again with --resume auto and a longer --time",
        "NODE_FAIL": "because a node was lost; submit it again with --resume auto to continue",
        "OUT_OF_MEMORY": "because it used more memory than it was given; ask for more with --mem",
    }
    raise RunError(f"Job {job} ended {ways.get(state, f'as {state}')} (Slurm's state {state}); its log is {log}.")


def _words(said: str) -> str:
    """Return what Slurm's command said, without its own name in front of each line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in said.splitlines()]
    return "; ".join(line.rstrip(".") for line in lines if line) or "it gave no reason"

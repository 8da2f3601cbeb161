"""A run as a Slurm job: options and a readable script."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..config.options import flatten
from ..config.registry import KINDS, resolved
from ..config.schema import RunConfig
from ..config.validity import require
from ..errors import RequestError, RunError, counted

NAME = "submit.sh"
WARNED_FROM_S = 300
"""Time limits shorter than this get no warning: Slurm sends it up to 60 s early, and starting takes its time."""
_WARN_S = 90
_IDLE_STARTS = 3
_ANSWER_S = 60.0
COUNT = (r"[1-9][0-9]{0,8}", "an integer from 1 up")
WORD = (r"[\w.,:@%+=/-]+", "one word, without spaces and quotes")
OPTIONS = {
    "--job-name": WORD,
    "--nodes": COUNT,
    "--ntasks-per-node": COUNT,
    "--gpus-per-node": (r"(\w+:)?[1-9][0-9]{0,8}", "a number from 1 up, or a type with it, such as a100:4"),
    "--cpus-per-task": COUNT,
    "--mem": (r"[0-9]{1,9}[KMGT]?", "memory of a node, such as 64G"),
    "--time": (
        r"([0-9]{1,6}-)?[0-9]{1,6}(:[0-9]{1,6}){0,2}|UNLIMITED",
        "minutes, minutes:seconds, hours:minutes:seconds, or days-hours, such as 20:00 for twenty minutes",
    ),
    **dict.fromkeys(("--partition", "--account", "--qos"), WORD),
}
"""Options of sbatch that are flags here: the form of the value, and the same in words."""
_WRITTEN = (
    *OPTIONS,
    *("--output", "--open-mode", "--chdir", "--tasks-per-node", "--ntasks", "-N", "-n", "-t", "-o", "-D"),
    *("--array", "-a", "--wrap", "--parsable", "--wait", "-W", "--test-only"),
)
"""Options of sbatch that the script sets or excludes."""
_SET_BY_JOB = ("gpus", "launcher", "rank", "world-size", "init-method", "max-restarts")


class Job(NamedTuple):
    """A Slurm job's options, and the run's processes on its nodes."""

    options: Mapping[str, str]
    """Values of `OPTIONS`, --nodes and --ntasks-per-node included."""
    sbatch: Sequence[str]
    """Further options of sbatch, each as it stands in a script."""
    strategy: str
    """The strategy, with `auto` resolved for the job."""
    ranks: int
    """Processes on all nodes."""
    devices: int
    """Devices of each process."""
    flags: Sequence[str]
    """Flags of the run that follow from the job."""


def lay_out(options: Mapping[str, str], sbatch: Sequence[str], config: RunConfig) -> Job:
    """Lay out the run's tasks on the nodes: one per GPU, or one per node if a process drives all GPUs.

    Raises `RequestError` for malformed or contradictory options, and for flags that the job sets.
    """
    check_values(options, OPTIONS)
    for option in sbatch:
        _check_option(option)
    values = unplaced(config, "srun starts the ranks, once, and gives each its place")
    nodes, gpus = int(options.get("--nodes", 1)), int(options.get("--gpus-per-node", "0").rpartition(":")[2])
    ntasks, devices, accelerator = int(options.get("--ntasks-per-node", 0)), values["devices"], values["accelerator"]
    strategy = resolved(values["strategy"], distributed=nodes * (gpus or ntasks or 1) > 1)
    kind, with_gpus = KINDS[strategy], f"--strategy {strategy} with --gpus-per-node {gpus}"
    tasks = (gpus or ntasks or 1) if kind.process_per_device else 1
    wrong_tasks = f"--ntasks-per-node {ntasks}: {with_gpus} is {counted(tasks, 'task')} a node; leave it out."
    require(ntasks in (0, tasks), wrong_tasks)
    check_hardware(strategy, accelerator, nodes, gpus)
    require(
        devices is None or not (kind.process_per_device or (gpus and devices != gpus)),
        f"--devices {devices}: on Slurm that is --gpus-per-node {devices}, or --ntasks-per-node {devices} on CPUs.",
    )
    task_devices = (gpus or devices) if kind.drives_all else None
    flags = ["--resume", "auto"]
    flags += ["--nodes", f"{nodes}"] if nodes > 1 else []
    flags += ["--devices", f"{task_devices}"] if task_devices else []
    flags += accelerator_flags(accelerator, gpus)
    options = {**options, "--nodes": f"{nodes}", "--ntasks-per-node": f"{tasks}"}
    return Job(options, sbatch, strategy, nodes * tasks, task_devices or 1, flags)


def check_values(options: Mapping[str, str], forms: Mapping[str, tuple[str, str]]) -> None:
    """Raise `RequestError` for a value of another form. `forms` are as `OPTIONS`."""
    for flag, value in options.items():
        form, words = forms[flag]
        require(bool(re.fullmatch(form, value)), f"{flag} {value}: give {words}.")


def unplaced(config: RunConfig, reason: str) -> dict[str, Any]:
    """Return the config's options by key. Raises `RequestError`, with the reason, for those that the job sets."""
    values, defaults = flatten(config), flatten(RunConfig())
    for flag in _SET_BY_JOB:
        require(values[flag] == defaults[flag], f"--{flag} {values[flag]}: {reason}; leave --{flag} out.")
    return values


def check_hardware(strategy: str, accelerator: str, nodes: int, gpus: int) -> None:
    """Raise `RequestError` for a strategy or accelerator that does not fit the nodes and their GPUs."""
    kind, with_gpus = KINDS[strategy], f"--strategy {strategy} with --gpus-per-node {gpus}"
    require(nodes == 1 or kind.has_ranks, f"--nodes {nodes}: --strategy {strategy} is one process; take another.")
    is_fit = gpus <= 1 or kind.process_per_device or kind.drives_all
    require(is_fit, f"{with_gpus}: that uses one device; take another strategy.")
    on_cpu = f"--accelerator cpu disagrees with --gpus-per-node {gpus}; leave one out."
    require(not gpus or accelerator != "cpu", on_cpu)
    require(
        bool(gpus) or accelerator in ("auto", "cpu"),
        f"--accelerator {accelerator}: add --gpus-per-node N, or the job has no GPU.",
    )


def accelerator_flags(accelerator: str, gpus: int) -> list[str]:
    """Return the run's --accelerator: refused on a node without a working driver, it does not train on the CPU."""
    if gpus:
        return ["--accelerator", "cuda" if accelerator == "auto" else accelerator]
    return [] if accelerator == "auto" else ["--accelerator", accelerator]


def _check_option(option: str) -> None:
    require(
        option.startswith("-") and option.isprintable() and not re.search(r"\s-", option),
        f"--sbatch {option!r}: give one option of sbatch as it stands in a script, such as --sbatch=--exclusive.",
    )
    name = re.split(r"[= ]", option)[0] if option.startswith("--") else option[:2]  # sbatch takes -o/x for -o /x
    instead = f"give {name}" if name in OPTIONS else "leave it out"
    require(name not in _WRITTEN, f"--sbatch {option}: the script sets {name}; {instead}.")


def is_unwarned(options: Mapping[str, str]) -> bool:
    """Return whether the time limit is too short for Slurm's warning, after which a run saves."""
    limit_s = seconds(options.get("--time", "UNLIMITED"))
    return limit_s is not None and limit_s < WARNED_FROM_S


def seconds(time: str) -> int | None:
    """Return a time limit of Slurm's form in seconds; None without a limit."""
    days, dash, clock = time.rpartition("-")
    if clock == "UNLIMITED":
        return None
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86_400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def render(job: Job, folder: Path, command: Sequence[str], script: Sequence[str]) -> str:
    """Return the sbatch script for a run.

    `folder` is the run's absolute folder, `command` the command with its flags, and `script` a user's script with its
    flags, which follow those that the job sets. Raises `RequestError` for paths and words that a script cannot hold.
    """
    for path in (folder, Path.cwd()):
        require(
            str(path).isprintable() and not {'"', "\\"} & {*str(path)},
            f"{str(path)!r} has a quote, a backslash or a control character, which Slurm cannot read in a script; give "
            "another --output, or start the command in another folder.",
        )
    for word in (*command, *script):
        require(word.isprintable(), f"{word!r} has a control character, which no script shows; leave it out.")
    log = str(folder).replace("%", "%%")  # % begins a pattern
    options = {**job.options, "--chdir": f'"{Path.cwd()}"', "--output": f'"{log}/slurm-%j.out"'}
    if not is_unwarned(options):
        options["--signal"] = f"USR1@{_WARN_S}"
    processors = options.get("--cpus-per-task")  # srun no longer takes it from sbatch
    return _SCRIPT.format(
        about=f"{counted(job.ranks, 'rank')} on {counted(int(options['--nodes']), 'node')}, strategy {job.strategy}",
        directives="\n".join(f"#SBATCH {option}" for option in (*map("=".join, options.items()), *job.sbatch)),
        folder=shlex.quote(str(folder)),
        name=NAME,
        idle_starts=_IDLE_STARTS,
        srun="srun --kill-on-bad-exit=1" + (f" --cpus-per-task={processors}" if processors else ""),
        command=shlex.join(command),
        job_flags=shlex.join(["--output", str(folder), *job.flags, *script]),
    )


def submit(script: Path) -> int:
    """Hand a script to sbatch; return the job's number. Raises `RequestError`, in sbatch's words, where it refuses."""
    words = ["sbatch", "--parsable", str(script)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"sbatch gave no answer within {_ANSWER_S:g} s; squeue --me shows whether it has the job."
        ) from error
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        lines = [re.sub(r"^sbatch: (error: )?", "", line).strip(" .") for line in done.stderr.splitlines()]
        raise RequestError(f"sbatch refused the job: {'; '.join(filter(None, lines))}; nothing was submitted.")
    return int(number)


_SCRIPT = """\
#!/bin/bash
# Written by `lockstep submit slurm`: {about}. Submitted again with sbatch, it continues the run.
{directives}
# One log for all starts: Slurm restarts the job after a pre-emption, after the loss of a node, and as requested below.
#SBATCH --open-mode=append
#SBATCH --requeue

folder={folder}
again="sbatch '$folder/{name}'"
export PYTHONUNBUFFERED=1  # lines are in the log when they are printed

# Slurm's warning (USR1) is for the ranks, which save, stop and exit with 75; this script must outlive them.
trap : TERM USR1

# The step of the run's last checkpoint.
saved() {{ name=$(basename "$(readlink "$folder/checkpoints/last")"); echo "${{name%%.*}}"; }}
before=$(saved)

# srun ends all ranks when one exits with an error (--kill-on-bad-exit). A rank that has saved and stopped (75), or was
# stopped before it could handle the signal (138, 143), writes a note and exits with 0, so that the others end in order.
note="$folder/.slurm-$SLURM_JOB_ID.stopped"
rm -f "$note"
rank='trap : TERM USR1; "$@"; code=$?; case $code in 75|138|143) touch "$0"; exit 0;; esac; exit $code'

{srun} bash -c "$rank" "$note" \\
  {command} \\
  {job_flags}
code=$?
if [ $code != 0 ] || [ ! -e "$note" ]; then
  exit $code
fi
rm -f "$note"

# The ranks have saved and stopped. A job that was cancelled stays so.
state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)
if [ "$state" != RUNNING ]; then
  echo "lockstep: the job is ${{state:-over}}, so that it does not requeue itself; to continue: $again"
  exit 75
fi

# A job that never reaches its next checkpoint does not requeue itself for ever.
idle="$folder/.slurm-$SLURM_JOB_ID.idle"
if [ "$(saved)" = "$before" ]; then echo "$before" >> "$idle"; else rm -f "$idle"; fi
if [ -e "$idle" ] && [ "$(wc -l < "$idle")" -ge {idle_starts} ]; then
  rm -f "$idle"
  echo "lockstep: stopped {idle_starts} times without a new checkpoint, so that the job does not requeue itself;"
  echo "lockstep: give it more time, or the run a smaller --checkpoint-every"
  exit 75
fi
echo "lockstep: the job requeues itself"
scontrol requeue "$SLURM_JOB_ID" || echo "lockstep: it could not; to continue: $again"
exit 75
"""

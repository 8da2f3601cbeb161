"""The sbatch script of a run: one file that a person can read, change, and submit by hand."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import RequestError, counted
from .request import Layout, SlurmRequest

NAME = "submit.sh"
WARNED_FROM_S = 300
"""Time limits shorter than this get no warning: Slurm sends it up to 60 s early, and starting takes its time."""
_WARN_S = 90
_IDLE_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the script does: the run's own words, and where."""

    request: SlurmRequest
    layout: Layout
    words: Sequence[str]
    """Of `lockstep train`, as they were given."""
    settled: Sequence[str]
    """Flags that follow from the job."""
    folder: Path
    """The run's, absolute."""
    submitted_from: Path
    python: str


def render(plan: Plan) -> str:
    """Return the script. Raises `RequestError` for paths that cannot stand in one."""
    for what, path, remedy in (
        ("--output", plan.folder, "give another --output"),
        ("The current folder", plan.submitted_from, "start the command in another one"),
    ):
        if not str(path).isprintable() or any(letter in str(path) for letter in '"\\'):
            raise RequestError(
                f"{what} {str(path)!r} has a quote, a backslash or a control character, which Slurm cannot read "
                f"there; {remedy}."
            )
    for word in plan.words:
        if not word.isprintable():
            raise RequestError(
                f"{word!r} has a control character, which a script shows as something else; leave it out."
            )
    request, layout = plan.request, plan.layout
    what = f"{counted(request.nodes, 'node')} × {counted(layout.tasks, 'task')}"
    return _SCRIPT.format(
        about=f"{request.job_name}: {what}, strategy {layout.strategy}",
        directives="\n".join(_directives(plan)),
        folder=shlex.quote(str(plan.folder)),
        idle_starts=_IDLE_STARTS,
        srun=" ".join(_srun(plan)),
        command=shlex.join([plan.python, "-P", "-m", "lockstep", "train", *plan.words]),
        settled=shlex.join(plan.settled),
    )


def is_unwarned(request: SlurmRequest) -> bool:
    """Return whether the time limit is too short for Slurm's warning, so that the run cannot save before it."""
    return request.time_s is not None and request.time_s < WARNED_FROM_S


def _directives(plan: Plan) -> Iterator[str]:
    request = plan.request
    options = {
        "job-name": request.job_name,
        "nodes": str(request.nodes),
        "ntasks-per-node": str(plan.layout.tasks),
        "gpus-per-node": request.gpus_per_node,
        "cpus-per-task": str(request.cpus_per_task or ""),
        "mem": request.mem,
        "time": request.time,
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
    }
    yield from (f"#SBATCH --{name}={value}" for name, value in options.items() if value)
    yield f'#SBATCH --chdir="{plan.submitted_from}"'
    yield "# One log for all starts of the job."
    yield f'#SBATCH --output="{_literal(plan.folder)}/slurm-%j.out"'
    yield "#SBATCH --open-mode=append"
    yield "# Slurm may start it again: after a pre-emption, when a node was lost, and when the job asks for it, below."
    yield "#SBATCH --requeue"
    if not is_unwarned(request):
        yield f"# All ranks hear SIGUSR1 {_WARN_S} s before the time limit: they save, stop, and exit with 75."
        yield f"#SBATCH --signal=USR1@{_WARN_S}"
    else:
        yield "# Too short a limit for a warning, which may come a minute early: at the limit the job just ends."
    if request.sbatch:
        yield "# As asked for with --sbatch."
        yield from (f"#SBATCH {option}" for option in request.sbatch)


def _literal(folder: Path) -> str:
    """Return a path for a directive in which % begins a pattern."""
    return str(folder).replace("%", "%%")


def _srun(plan: Plan) -> Iterator[str]:
    yield "srun --kill-on-bad-exit=1"
    if plan.request.cpus_per_task:
        yield f"--cpus-per-task={plan.request.cpus_per_task}"  # which srun no longer takes from sbatch


_SCRIPT = """\
#!/bin/bash
# {about}
# Written by `lockstep submit slurm`. Submitted again with sbatch, it continues the run.
{directives}

folder={folder}
export PYTHONUNBUFFERED=1  # lines are in the log when they are printed
export LOCKSTEP_SECRET="$(head -c 24 /dev/urandom | base64)"  # by which the ranks of this job know one another

# Signals are for the ranks; this script has to outlive them.
trap : TERM USR1

# The step of the run's last checkpoint.
saved() {{ name=$(basename "$(readlink "$folder/checkpoints/last")"); echo "${{name%%.*}}"; }}
before=$(saved)

# srun ends all ranks when one exits with an error (--kill-on-bad-exit). A rank that has saved and stopped (75), or that
# was stopped before it could listen (138, 143), is none: it leaves a note instead, and the others can leave in order.
note="$folder/.slurm-$SLURM_JOB_ID.stopped"
rm -f "$note"
rank='trap : TERM USR1; "$@"; code=$?; case $code in 75|138|143) touch "$0"; exit 0;; esac; exit $code'

{srun} bash -c "$rank" "$note" \\
  {command} \\
  {settled}
code=$?
if [ $code != 0 ] || [ ! -e "$note" ]; then
  exit $code
fi
rm -f "$note"

# The ranks have saved and stopped. A job that was cancelled stays so.
state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)
if [ "$state" != RUNNING ]; then
  echo "lockstep: the job is ${{state:-over}}, so that it does not requeue itself; to continue: sbatch {{this file}}"
  exit 75
fi

# A job that never comes as far as its next checkpoint does not requeue itself for ever.
idle="$folder/.slurm-$SLURM_JOB_ID.idle"
if [ "$(saved)" = "$before" ]; then echo "$before" >> "$idle"; else rm -f "$idle"; fi
if [ -e "$idle" ] && [ "$(wc -l < "$idle")" -ge {idle_starts} ]; then
  rm -f "$idle"
  echo "lockstep: stopped {idle_starts} times without a new checkpoint, so that the job does not requeue itself;"
  echo "lockstep: give it more time, or the run a smaller --checkpoint-every"
  exit 75
fi
echo "lockstep: the job requeues itself"
if ! scontrol requeue "$SLURM_JOB_ID"; then
  echo "lockstep: it could not be requeued, and scontrol says why above; to continue: sbatch {{this file}}"
fi
exit 75
""".replace("{{this file}}", f"'$folder/{NAME}'")

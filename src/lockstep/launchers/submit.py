"""A run as a job of Slurm: what is asked of it, one sbatch script that a person can read, and the job until its end."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config.options import flatten
from ..config.registry import auto, kind
from ..config.schema import RunConfig
from ..config.validity import check_whole, require
from ..errors import RequestError, RunError, counted

NAME = "submit.sh"
WARNED_FROM_S = 300
"""Time limits shorter than this get no warning: Slurm sends it up to 60 s early, and starting takes its time."""
_WARN_S = 90
_IDLE_STARTS = 3
_LOOK_S = 1.0
_ASK_S = 60.0
_UNKNOWN_LIMIT = 30
"""Looks in a row at which the controller does not answer, before we give up."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_FORMS = {
    "gpus_per_node": (r"(\w+:)?[1-9]\d*", "a number from 1 up, or a type with it, such as a100:4"),
    "mem": (r"\d+[KMGT]?", "the memory of a node, such as 32G"),
    **dict.fromkeys(
        ("partition", "account", "qos", "job_name"), (r"[\w.,:@%+=/-]+", "one word, without spaces and quotes")
    ),
}
"""What may stand in a script, and in words."""
_OURS = {
    **dict.fromkeys(("--nodes", "-N"), "--nodes"),
    **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node", "--tasks-per-node"), "--ntasks-per-node"),
    **dict.fromkeys(("--gpus-per-node",), "--gpus-per-node"),
    **dict.fromkeys(("--time", "-t"), "--time"),
    **dict.fromkeys(("--output", "-o"), "--output"),
}
"""What --sbatch would say a second time, and the flag that says it here."""
_NOT_OURS = ("--array", "-a", "--wrap", "--open-mode", "--chdir", "-D", "--parsable", "--wait", "-W", "--test-only")
"""What the script does not allow for."""
_SETTLED = {
    "gpus": "the job sees the GPUs that Slurm gives it; give --gpus-per-node",
    "launcher": "srun starts the ranks",
    "rank": "srun says who is which rank",
    "world-size": "it follows from --nodes and --gpus-per-node or --ntasks-per-node",
    "init-method": "the ranks meet on the job's first node",
    "max-restarts": "srun starts the ranks once; the same command with --output RUN goes on after a failure",
}
"""Flags of a run that the job settles, and how."""
_ENDED = {
    "FAILED": "by signal {number}",
    "CANCELLED": "because it was cancelled; submit it again with --resume auto to continue",
    "TIMEOUT": "at its time limit; submit it again with --resume auto and a longer --time",
    "NODE_FAIL": "because a node was lost; submit it again with --resume auto to continue",
    "OUT_OF_MEMORY": "because it used more memory than it was given; ask for more with --mem",
    **{state: f"as {state}" for state in ("PREEMPTED", "DEADLINE", "BOOT_FAIL")},
}
"""States in which a job has ended without an exit code of its own, in words."""
_NEVER = frozenset({"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"})
"""Reasons to wait that go only when somebody changes the job or the cluster."""


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """What the scheduler is asked for. Raises `RequestError` for what Slurm would not understand."""

    nodes: int = 1
    gpus_per_node: str = ""
    """A number, or a type and a number, such as a100:4; empty for none."""
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    time: str = ""
    mem: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    job_name: str = ""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, each as it stands in a script, such as --exclusive."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ntasks_per_node", "cpus_per_task"):
            check_whole(name.replace("_", "-"), getattr(self, name))
        for name, (form, words) in _FORMS.items():
            value, flag = getattr(self, name), name.replace("_", "-")
            require(not value or bool(re.fullmatch(form, value)), f"--{flag} {value!r}: give {words}.")
        for option in self.sbatch:
            _check_option(option)
        self.time_s  # noqa: B018  # which raises

    @property
    def gpus(self) -> int:
        """GPUs of a node; 0 where none were asked for."""
        return int(self.gpus_per_node.rpartition(":")[2] or 0)

    @property
    def time_s(self) -> int | None:
        """Seconds until the time limit; None where the partition's own holds."""
        if not self.time or self.time.upper() in ("UNLIMITED", "INFINITE"):
            return None
        seconds = _seconds(self.time)
        require(
            seconds > 0,
            f"--time {self.time}: give minutes, minutes:seconds, hours:minutes:seconds, or days-hours, such as 20:00 "
            "for twenty minutes.",
        )
        return seconds


def _seconds(time: str) -> int:
    """Return the seconds in a time as Slurm writes it: numbers mean other things by how many there are; 0 for none."""
    found = _TIME.fullmatch(time)
    if not found:
        return 0
    parts = [int(part) for part in (found["first"], found["second"], found["third"]) if part]
    first_is_hours = found["days"] or len(parts) == 3
    units = (3600, 60, 1) if first_is_hours else (60, 1)
    return sum(part * unit for part, unit in zip(parts, units, strict=False)) + 86_400 * int(found["days"] or 0)


def _check_option(option: str) -> None:
    require(
        option.startswith("-") and option.isprintable() and not re.search(r"\s-", option),
        f"--sbatch {option!r}: give one option of sbatch as it stands in a script, such as --sbatch=--exclusive.",
    )
    # sbatch takes -o/x for -o /x, and --outp for --output; --gpus is an option besides --gpus-per-node.
    given = re.split(r"[= ]", option, maxsplit=1)[0] if option.startswith("--") else option[:2]
    meant = [name for name in (*_OURS, *_NOT_OURS) if name.startswith(given) and given != "--gpus"]
    name = given if given in meant else next(iter(meant), "")
    require(name not in _OURS, f"--sbatch {option}: lockstep submit writes that itself; give {_OURS.get(name)}.")
    require(name not in _NOT_OURS, f"--sbatch {option}: the script that is written does not allow for {name}.")


@dataclass(frozen=True)
class Layout:
    """How a run's processes lie on the nodes."""

    strategy: str
    """What --strategy auto stands for there."""
    tasks: int
    """Processes on each node."""
    ranks: int
    """Processes on all nodes."""
    devices: int | None
    """What --devices has to be, where one process drives several; None where it follows from the processes."""


def lay_out(request: SlurmRequest, strategy: str, devices: int | None) -> Layout:
    """Return how `strategy` uses what is asked for: one task a GPU, or one a node where a process drives them all.

    `devices` are those asked for with --devices. Raises `RequestError` where they do not go together.
    """
    asked, gpus, on_gpus = request.ntasks_per_node, request.gpus, f"--gpus-per-node {request.gpus_per_node}"
    if strategy == "auto":
        strategy = auto(several=request.nodes * (gpus or asked or 1) > 1)
    chosen = kind(strategy)
    require(
        chosen.has_ranks or request.nodes == 1,
        f"--strategy {strategy} is one process, but --nodes {request.nodes} were asked for; leave --nodes out, or "
        "take another strategy.",
    )
    tasks = (gpus or asked or 1) if chosen.process_per_device else 1
    require(
        asked in (None, tasks),
        f"--ntasks-per-node {asked}: --strategy {strategy} is {tasks} process{'es' * (tasks != 1)} a node"
        f"{f' with {on_gpus}' if gpus else ''}; leave it out.",
    )
    if chosen.process_per_device:
        require(
            devices is None,
            f"--devices {devices}: on Slurm it follows from what is asked for; give --gpus-per-node {devices}, or "
            f"--ntasks-per-node {devices} for processes on CPUs.",
        )
        return Layout(strategy, tasks, tasks * request.nodes, None)
    require(
        chosen.drives_all or gpus <= 1,
        f"--strategy {strategy} uses one device, but {on_gpus} asks for {counted(gpus, 'GPU')}; ask for one, or take "
        "another strategy.",
    )
    require(not gpus or devices in (None, gpus), f"--devices {devices} disagrees with {on_gpus}; leave --devices out.")
    return Layout(strategy, tasks, request.nodes, (gpus or devices) if chosen.drives_all else None)


def check_settled(given: dict[str, object]) -> None:
    """Raise `RequestError` for options of a run that Slurm's job settles; `given` are the run's, by their flags."""
    untouched = flatten(RunConfig())
    for flag, reason in _SETTLED.items():
        if given[flag] != untouched[flag]:
            raise RequestError(f"--{flag} {given[flag]}: with lockstep submit slurm, {reason}; leave --{flag} out.")


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
    if strange := next((word for word in plan.words if not word.isprintable()), None):
        raise RequestError(
            f"{strange!r} has a control character, which a script shows as something else; leave it out."
        )
    request, layout = plan.request, plan.layout
    what = f"{counted(request.nodes, 'node')} × {counted(layout.tasks, 'task')}"
    return _SCRIPT.format(
        about=f"{request.job_name}: {what}, strategy {layout.strategy}",
        directives="\n".join(_directives(plan)),
        folder=shlex.quote(str(plan.folder)),
        idle_starts=_IDLE_STARTS,
        # srun no longer takes the processors from sbatch.
        srun="srun --kill-on-bad-exit=1"
        + (f" --cpus-per-task={request.cpus_per_task}" if request.cpus_per_task else ""),
        command=shlex.join([plan.python, "-P", "-m", "lockstep", "train", *plan.words]),
        settled=shlex.join(plan.settled),
    )


def is_unwarned(request: SlurmRequest) -> bool:
    """Return whether the time limit is too short for Slurm's warning, so that the run cannot save before it."""
    return request.time_s is not None and request.time_s < WARNED_FROM_S


def _directives(plan: Plan) -> Iterator[str]:
    request = plan.request
    names = ("job_name", "nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task", "mem", "time")
    for name in (*names, "partition", "account", "qos"):
        if value := plan.layout.tasks if name == "ntasks_per_node" else getattr(request, name):
            yield f"#SBATCH --{name.replace('_', '-')}={value}"
    yield f'#SBATCH --chdir="{plan.submitted_from}"'
    yield "# One log for all starts of the job."
    folder = str(plan.folder).replace("%", "%%")  # which begins a pattern there
    yield f'#SBATCH --output="{folder}/slurm-%j.out"'
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
        if state in _ENDED or state == "COMPLETED":
            return _code(job, state, about.get("ExitCode", ""), log)
        time.sleep(_LOOK_S)


def _about(job: int) -> dict[str, str]:
    """Return what the controller says about the job; empty where it says nothing."""
    asked = ["scontrol", "show", "job", "--oneliner", str(job)]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S, check=False)
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
    raise RunError(f"Job {job} ended {_ENDED[state].format(number=number)} (Slurm's state {state}); its log is {log}.")


def _words(said: str) -> str:
    """Return what Slurm's command said, without its own name in front of each line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in said.splitlines()]
    return "; ".join(line.rstrip(".") for line in lines if line) or "it gave no reason"


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

"""What is asked of Slurm, and how a run's processes are laid out on it: whole and valid once they exist."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..config import RunConfig
from ..errors import RequestError, counted
from ..kinds import auto, kind
from ..options import flatten
from ..validity import check_whole, require

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_WORD = re.compile(r"[\w.,:@%+=/-]+")
_OURS = {
    "--nodes": "--nodes",
    "-N": "--nodes",
    "--ntasks": "--ntasks-per-node",
    "-n": "--ntasks-per-node",
    "--ntasks-per-node": "--ntasks-per-node",
    "--tasks-per-node": "--ntasks-per-node",
    "--gpus-per-node": "--gpus-per-node",
    "--time": "--time",
    "-t": "--time",
    "--output": "--output",
    "-o": "--output",
}
"""What --sbatch would say a second time, and the flag that says it here."""
_NOT_OURS = ("--array", "-a", "--wrap", "--open-mode", "--chdir", "-D", "--parsable", "--wait", "-W", "--test-only")
"""What the script does not allow for."""


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
        check_whole("nodes", self.nodes)
        check_whole("ntasks-per-node", self.ntasks_per_node)
        check_whole("cpus-per-task", self.cpus_per_task)
        require(
            not self.gpus_per_node or bool(re.fullmatch(r"(\w+:)?[1-9]\d*", self.gpus_per_node)),
            f"--gpus-per-node {self.gpus_per_node}: give a number from 1 up, or a type with it, such as a100:4.",
        )
        require(
            not self.mem or bool(re.fullmatch(r"\d+[KMGT]?", self.mem)),
            f"--mem {self.mem}: give the memory of a node, such as 32G.",
        )
        for flag in ("partition", "account", "qos", "job_name"):
            value = getattr(self, flag)
            require(
                not value or bool(_WORD.fullmatch(value)),
                f"--{flag.replace('_', '-')} {value!r}: give one word, without spaces and quotes.",
            )
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
    asked, gpus = request.ntasks_per_node, request.gpus
    if strategy == "auto":
        strategy = auto(several=request.nodes * (gpus or asked or 1) > 1)
    chosen = kind(strategy)
    require(
        chosen.has_ranks or request.nodes == 1,
        f"--strategy {strategy} is one process, but --nodes {request.nodes} were asked for; leave --nodes out, or "
        "take another strategy.",
    )
    if chosen.process_per_device:
        require(
            devices is None,
            f"--devices {devices}: on Slurm it follows from what is asked for; give --gpus-per-node {devices}, or "
            f"--ntasks-per-node {devices} for processes on CPUs.",
        )
        require(
            not gpus or asked is None or asked == gpus,
            f"--ntasks-per-node {asked} disagrees with --gpus-per-node {request.gpus_per_node}: --strategy {strategy} "
            "is one process for each GPU; leave --ntasks-per-node out.",
        )
        tasks = gpus or asked or 1
        return Layout(strategy, tasks, tasks * request.nodes, None)
    require(
        asked in (None, 1),
        f"--ntasks-per-node {asked}: --strategy {strategy} is one process a node; leave it out.",
    )
    require(
        chosen.drives_all or gpus <= 1,
        f"--strategy {strategy} uses one device, but --gpus-per-node {request.gpus_per_node} asks for "
        f"{counted(gpus, 'GPU')}; ask for one, or take another strategy.",
    )
    require(
        devices is None or not gpus or devices == gpus,
        f"--devices {devices} disagrees with --gpus-per-node {request.gpus_per_node}; leave --devices out.",
    )
    return Layout(strategy, 1, request.nodes, (gpus or devices) if chosen.drives_all else None)


def check_settled(given: dict[str, object]) -> None:
    """Raise `RequestError` for options of a run that Slurm's job settles; `given` are the run's, by their flags."""
    reasons = {
        "gpus": "the job sees the GPUs that Slurm gives it; give --gpus-per-node",
        "launcher": "srun starts the ranks",
        "rank": "srun says who is which rank",
        "world-size": "it follows from --nodes and --gpus-per-node or --ntasks-per-node",
        "init-method": "the ranks meet on the job's first node",
        "max-restarts": "srun starts the ranks once; the same command with --output RUN goes on after a failure",
    }
    untouched = flatten(RunConfig())
    for flag, reason in reasons.items():
        if given[flag] != untouched[flag]:
            raise RequestError(f"--{flag} {given[flag]}: with lockstep submit slurm, {reason}; leave --{flag} out.")

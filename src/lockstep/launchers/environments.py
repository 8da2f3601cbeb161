"""What programs that start ranks tell them through environment variables: torchrun, Slurm's srun, MPI's mpirun.

Each program is a line of `_PROGRAMS`, the most specific first: torchrun inside a Slurm job is torchrun, and so is an
mpirun there its own. No torch here: which launcher a run takes is known without it.

    torchrun   https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables, and whatever else sets these
    Open MPI, PMI (MPICH, Intel MPI)   say no place to meet: MASTER_ADDR and MASTER_PORT do, or ranks that are all on
               this host meet at a file that belongs to this one mpirun
    Slurm      https://slurm.schedmd.com/srun.html, output environment. An sbatch script has most of the variables too,
               and yet is no task: only srun sets SLURM_STEP_ID
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ..errors import RequestError
from ..files import private_folder
from ..world.topology import Topology
from . import hosts

Env = Mapping[str, str]

LOOPBACK = "127.0.0.1"
_MOST_DIGITS = 10
_MOST_NODES = 1 << 17
_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_FIRST_PORT, _PORTS, _STEPS = 10_000, 20_000, 16
_ASK_S = 10.0
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_NAME = r"(?:[^,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
_HOSTS = re.compile(rf"({_NAME})(?:,{_NAME})*", re.ASCII)


class Program(NamedTuple):
    """The variables of one program; where there are several for a thing, the first that is set counts."""

    start: str
    """What to do, for sentences."""
    rank: str
    sizes: tuple[str, ...]
    local_ranks: tuple[str, ...]
    local_sizes: tuple[str, ...]
    exporting: str = ""
    """How it hands a variable on to ranks on other hosts."""

    def has_several(self, env: Env) -> bool:
        """Return whether the variables make this process one of several ranks."""
        return self.rank in env and (whole(env.get(_first(self.sizes, env), "")) or 0) > 1


@dataclass(frozen=True)
class Place:
    """Where the environment puts this process, and where its ranks meet."""

    topology: Topology
    names: Mapping[str, str]
    """The variables that say --world-size, --rank, --devices and --nodes, by these flags."""
    file: Path | None = None
    """The file at which the ranks meet, where that is no address."""
    served: bool = False
    """Whether an agent serves the store, which outlives the ranks; otherwise rank 0 does."""
    job: str = ""
    """What tells this job from others that use the agent's store."""
    knows_node: bool = True
    """Whether it says which ranks share this node; otherwise the roll call finds out."""
    nodes_are_hosts: bool = True
    """Whether its nodes are known to be hosts of their own; all those of a Slurm for trials may be this one."""
    gpus: tuple[str, int] | None = None
    """The variable that says how many of the node's GPUs are the job's, and the number; None where none says."""
    error_file: Path | None = None
    """Where the program that started the ranks looks for the reason of a failure."""


_TORCHRUN = Program("start with torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_SLURM = Program(
    "start the ranks with srun",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ("SLURM_LOCALID",),
    (_TASKS_PER_NODE, "SLURM_TASKS_PER_NODE"),
)
_OPEN_MPI = Program(
    "start the ranks with mpirun",
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    "-x {}={}",
)
_PMI = Program(
    "start the ranks with mpirun",
    "PMI_RANK",
    ("PMI_SIZE",),
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    "-genv {} {}",
)
_PROGRAMS = (_TORCHRUN, _OPEN_MPI, _SLURM, _PMI)


def is_spoken(env: Env) -> bool:
    """Return whether another program has made this process a rank."""
    return _spoken(env) is not None


def started_elsewhere(env: Env) -> dict[str, str]:
    """Return the variables by which another program says that it has started several ranks; empty if none does.

    A world of one, which managed containers like to announce, keeps nobody from starting ranks of their own.
    """
    program = _spoken(env)
    if program is None or ranks_told(env)[1] <= 1:
        return {}
    names = (program.rank, *program.sizes, *program.local_ranks, *program.local_sizes, "SLURM_STEP_ID")
    return {name: env[name] for name in names if name in env and (program is _SLURM or name != "SLURM_STEP_ID")}


def ranks_told(env: Env) -> tuple[str, int]:
    """Return the variable that says how many ranks another program has started, and the number; 1 where none does."""
    program = _spoken(env)
    variable = _first(program.sizes, env) if program else ""
    told = whole(env.get(variable, ""))
    return variable, 1 if told is None else told


def read(env: Env) -> Place:
    """Return this process's place. Raises `RequestError` where the variables make none."""
    program = _spoken(env) or (_TORCHRUN if _names_a_rank(env) else None)
    if program is None:
        raise RequestError(
            "--launcher environment: RANK and WORLD_SIZE are not set, nor Slurm's or MPI's variables of several tasks; "
            "start the command with torchrun, srun or mpirun, or take --launcher auto."
        )
    reads = {_TORCHRUN: _of_torchrun, _SLURM: _of_slurm}.get(program, _of_mpi)
    return reads(program, env)


def check_started(env: Env) -> None:
    """Raise `RequestError` where a Slurm job has several tasks, and srun has not started this one: it would be alone.

    To train alone is not what was asked for.
    """
    instead = (
        "where this process is to start its ranks on this node itself, ask for one task or name --launcher spawn"
        if "SLURM_JOB_ID" in env
        else "where there is no job, and the variable is left over, unset it"
    )
    for variable in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE") if "SLURM_STEP_ID" not in env else ():
        if (told := whole(env.get(variable, "")) or 0) > 1:
            raise RequestError(
                f"{variable} is {told}, but SLURM_STEP_ID is not set: the job has {told} tasks"
                f"{' a node' if variable.endswith('NODE') else ''}, and srun did not start this process, which would "
                f"be alone; write srun before the command, or torchrun, or, {instead}."
            )


def of_array(env: Env) -> tuple[int, int] | None:
    """Return (rank, world size) by this job's place in its Slurm array; None outside of one.

    Raises `RequestError` for an array whose indices are not evenly spaced, or whose elements are several tasks each.
    """
    if "SLURM_ARRAY_TASK_ID" not in env:
        return None
    index, first, last, count = (
        _number(env, f"SLURM_ARRAY_TASK_{name}", "give --rank and --world-size")
        for name in ("ID", "MIN", "MAX", "COUNT")
    )
    step = _number(env, "SLURM_ARRAY_TASK_STEP", _SLURM.start, "1") or 1
    indices = range(first, last + 1, step)
    if len(indices) != count or index not in indices or _is_spoken(_SLURM, env):
        raise RequestError(
            f"Ranks do not follow from this job's array, SLURM_ARRAY_TASK_ID={index} of SLURM_ARRAY_TASK_COUNT={count} "
            f"by SLURM_ARRAY_TASK_MIN={first} to SLURM_ARRAY_TASK_MAX={last} by SLURM_ARRAY_TASK_STEP={step}, with "
            f"{ranks_told(env)[1]} tasks in each; submit an array such as --array=0-3 of one task each, or give --rank "
            "and --world-size."
        )
    return (index - first) // step, count


def whole(text: str) -> int | None:
    """Return the number that a text is, from 0 up; None for any other, and for one with more digits than a job's."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def first_host(text: str) -> str:
    """Return the first name in a host list: n08-ib of `n[08-11,20]-ib,m2`, whose brackets stand for numbers."""
    found = _HOSTS.fullmatch(text)
    if not found:
        raise RequestError(f"The environment's SLURM_STEP_NODELIST is {text!r}; Slurm writes such as n[1-3,5],m2.")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def _spoken(env: Env) -> Program | None:
    return next((program for program in _PROGRAMS if _is_spoken(program, env)), None)


def _is_spoken(program: Program, env: Env) -> bool:
    if program is _TORCHRUN:
        # A world of one without an address is what managed containers announce: it starts no ranks. And scripts for
        # srun often export WORLD_SIZE alone, beside the address: who is which rank is then for Slurm to say.
        if env.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in env:
            return False
        by_slurm = "RANK" not in env and "LOCAL_RANK" not in env and _is_spoken(_SLURM, env)
        return _names_a_rank(env) and not by_slurm
    if program is _SLURM and program.has_several(env):
        # Under an mpirun that has its ranks' daemons started by srun, these variables are the daemon's, and its PMI
        # counts otherwise.
        tasks = env[_first(program.sizes, env)]
        is_own = env.get("PMI_SIZE", tasks) == tasks and env.get("PMI_RANK") in (None, env["SLURM_PROCID"])
        return "SLURM_STEP_ID" in env and is_own
    return program.has_several(env)


def _names_a_rank(env: Env) -> bool:
    return any(variable in env for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def _place(
    program: Program,
    env: Env,
    numbers: tuple[int, int, int, int, int, int],
    meets_at: tuple[str, int],
    nodes_variable: str = "",
    **more: Any,
) -> Place:
    """Return the place that the numbers make: rank, size, local rank, local size, node, nodes; raise for none."""
    index, size, local_rank, local_size, node, nodes = numbers
    of_size, of_local_size = _first(program.sizes, env), _first(program.local_sizes, env)
    for name, value, bound_name, bound in (
        (program.rank, index, of_size, size),
        (_first(program.local_ranks, env), local_rank, of_local_size, local_size),
        (of_local_size, local_size, f"{of_size} + 1", size + 1),
        ("the number of the node", node, "the number of nodes", nodes),
    ):
        if not value < bound:
            raise RequestError(
                f"The environment disagrees with itself: {name} is {value}, but {bound_name} is {bound}; "
                f"set both on every rank, or {program.start}."
            )
    topology = Topology(
        rank=index,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=nodes,
        address=meets_at[0],
        port=meets_at[1],
    )
    names = {"--world-size": of_size, "--rank": program.rank, "--devices": of_local_size}
    return Place(topology, names | {"--nodes": nodes_variable or "the number of nodes"}, **more)


def _of_torchrun(program: Program, env: Env) -> Place:
    start = program.start
    index, size = _number(env, "RANK", start), _number(env, "WORLD_SIZE", start)
    local_size = _number(env, "LOCAL_WORLD_SIZE", start, "1")
    node = _number(env, "GROUP_RANK", start, str(index // max(1, local_size)))
    nodes = _number(env, "GROUP_WORLD_SIZE", start, str(max(node + 1, -(-size // max(1, local_size)))))
    # Without LOCAL_WORLD_SIZE the roll call finds out who shares a host.
    local_rank = _number(env, "LOCAL_RANK", start, str(index % max(1, local_size))) if "LOCAL_WORLD_SIZE" in env else 0
    if not env.get("MASTER_ADDR"):
        raise RequestError(f"WORLD_SIZE is {size}, but MASTER_ADDR is not set; it says where rank 0 listens.")
    error_file = env.get("TORCHELASTIC_ERROR_FILE")
    return _place(
        program,
        env,
        (index, size, local_rank, local_size, node, nodes),
        (env["MASTER_ADDR"], _port(env)),
        served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job=env.get("TORCHELASTIC_RUN_ID", ""),
        knows_node="LOCAL_RANK" in env and "LOCAL_WORLD_SIZE" in env,
        # Several agents of torchrun's may share a host, and it takes the host's own name for the address itself.
        nodes_are_hosts="TORCHELASTIC_RUN_ID" not in env,
        error_file=Path(error_file) if error_file else None,
    )


def _of_mpi(program: Program, env: Env) -> Place:
    """Return this rank's place; which ranks of several hosts share one is left to the roll call."""
    start, of_size, of_local_size = program.start, program.sizes[0], _first(program.local_sizes, env)
    index, size = _number(env, program.rank, start), _number(env, of_size, start)
    local_rank = _number(env, _first(program.local_ranks, env), start, "0")
    local_size = _number(env, of_local_size, start, "1")
    is_here, address = local_size == size, env.get("MASTER_ADDR", "")
    if not address and not is_here:
        raise RequestError(
            f"{of_size} is {size}, but {of_local_size} is {env.get(of_local_size, 'not set')}: ranks run on several "
            "hosts, and nothing says where they meet; add "
            f"{program.exporting.format('MASTER_ADDR', '<address of the first host>')} "
            f"{program.exporting.format('MASTER_PORT', '29500')} to the mpirun command."
        )
    return _place(
        program,
        env,
        (index, size, local_rank, local_size, 0, 1 if is_here else 2),
        (address, _port(env) if address else 0),
        file=None if address else _meeting(env, program),
        knows_node=is_here,
    )


def _meeting(env: Env, program: Program) -> Path:
    """Return the path of a file that the ranks of this mpirun share with no other one.

    Open MPI's has a folder for its session, which it removes at its end, whatever became of the ranks. Elsewhere it
    lies in this user's own folder, under the name of the process that has started the ranks.
    """
    session = env.get("PMIX_SERVER_TMPDIR", "")
    with contextlib.suppress(OSError):  # it is no path, but a text that is too long for one
        if session and Path(session).is_dir():
            return Path(session) / f"lockstep-{_hashed(env.get('PMIX_NAMESPACE', ''))}"
    try:
        folder = private_folder()
    except OSError as error:
        raise RequestError(f"The ranks of mpirun cannot meet in {error.filename}: {error.strerror}.") from error
    for process in psutil.Process().parents():  # the nearest that is no rank by its variables
        try:
            is_rank = program.rank in process.environ()
        except psutil.Error:  # another user's, so none of the ranks'
            is_rank = False
        if not is_rank:
            return folder / f"mpi-{process.pid}-{_hashed(hosts.begun(process.pid))}"
    raise RequestError(
        f"{program.rank} is set, but all processes above this one have it too: no mpirun has started it; "
        f"unset {program.rank}, or {program.start}."
    )


def _of_slurm(program: Program, env: Env) -> Place:
    """Return this task's place in its step."""
    of_size, start = _first(program.sizes, env), program.start
    names = (program.rank, of_size, "SLURM_NODEID", "SLURM_LOCALID")
    index, size, node, local_rank = (_number(env, name, start) for name in names)
    tasks = _tasks_per_node(env.get(_first(program.local_sizes, env), ""))
    if sum(tasks) != size or not node < len(tasks):
        raise RequestError(
            f"The environment disagrees with itself: {of_size} is {size} and SLURM_NODEID {node}, but {_TASKS_PER_NODE}"
            f" is {env.get(_TASKS_PER_NODE, 'not set')}; {start}, and set none of them by hand."
        )
    address, gpus = _slurm_address(env, len(tasks)), whole(env.get("SLURM_GPUS_ON_NODE", ""))
    return _place(
        program,
        env,
        (index, size, local_rank, tasks[node], node, len(tasks)),
        (address, _port(env, default=_slurm_port(env))),
        _first(("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), env),
        nodes_are_hosts="MASTER_ADDR" in env or address != LOOPBACK,  # which is then Slurm's own word
        gpus=None if gpus is None else ("SLURM_GPUS_ON_NODE", gpus),
    )


def _tasks_per_node(text: str) -> list[int]:
    """Return the numbers that Slurm writes as `2(x3),1`: of tasks, on each node."""
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        times = int(found[2] or 1) if found else 0
        if not found or len(counts) + times > _MOST_NODES:
            raise RequestError(
                f"The environment's {_TASKS_PER_NODE} is {text!r}; Slurm writes such as 2(x3),1: {_SLURM.start}."
            )
        counts += [int(found[1])] * times
    return counts


def _slurm_address(env: Env, nodes: int) -> str:
    """Return where rank 0 listens: where the user's script says so, else on the step's first node."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if nodes == 1:
        return LOOPBACK
    text = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    first = first_host(text)
    if _resolves(first):
        return first
    if (said := _node_address(first)) and _resolves(said):
        return said
    raise RequestError(
        f"The step's first node is {first} (SLURM_STEP_NODELIST={text}), a name that does not resolve here, nor does "
        f"scontrol show node {first} name an address that does; set MASTER_ADDR to that node's address."
    )


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return True


def _node_address(name: str) -> str:
    """Return the address that Slurm itself uses for a node, which may be called otherwise in the network."""
    asked = ["scontrol", "show", "node", "--oneliner", name]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S, check=False)
        if found := re.search(r"\bNodeAddr=(\S+)", said.stdout):
            return found[1]
    return ""


def _slurm_port(env: Env) -> int:
    """Return a port that all tasks of the step derive alike, and that steps of neighbouring jobs do not share.

    It lies below those that the kernel gives to whoever asks for any.
    """
    job, step = (_number(env, name, _SLURM.start) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * _STEPS + step % _STEPS) % _PORTS


def _port(env: Env, default: int | None = None) -> int:
    given = _number(env, "MASTER_PORT", "start with torchrun", None if default is None else str(default))
    if not 0 < given < 1 << 16:
        raise RequestError(f"The environment's MASTER_PORT is {given}; ports go from 1 to 65535.")
    return given


def _first(names: tuple[str, ...], env: Env) -> str:
    return next((name for name in names if name in env), names[0])


def _number(env: Env, variable: str, start: str, default: str | None = None) -> int:
    """Return the number in a variable. Raises `RequestError` where it is missing without a default, or is none."""
    text = env.get(variable, default)
    if text is None:
        raise RequestError(f"{variable} is not set in the environment; set it on every rank, or {start}.")
    if (found := whole(text)) is None:
        raise RequestError(f"The environment's {variable} is {text!r}; it takes a number from 0 up.")
    return found


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]

"""Rank and world size from the variables of torchrun, srun and mpirun. No torch.

torchrun's variables (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables), set by any program,
take precedence over Slurm's (https://slurm.schedmd.com/srun.html, output environment): torchrun may run in a Slurm job.
MPI sets no address: MASTER_ADDR and MASTER_PORT do, or ranks that are all on this host meet at a file of their mpirun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from ..errors import RequestError
from ..files import private_folder
from ..world.topology import Topology
from . import hosts
from .stores import Endpoint

Env = Mapping[str, str]

LOOPBACK = "127.0.0.1"
_MOST_DIGITS = 10
_FIRST_PORT, _PORTS, _STEPS = 10_000, 20_000, 16  # below the kernel's ephemeral ports


class Program(NamedTuple):
    """The names of the variables that one program sets for each rank."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str = ""
    nodes: str = ""

    def ranks(self, env: Env) -> int:
        """Return the program's number of ranks; 0 if its variables are unset."""
        return (integer(env.get(self.size)) or 0) if self.rank in env else 0


_TORCHRUN = Program("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_SLURM = Program(
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
)
_OPEN_MPI = Program(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_PMI = Program("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # MPICH, Intel MPI


@dataclass(frozen=True)
class Place:
    """This process's rank and meeting place by the environment."""

    topology: Topology
    endpoint: Endpoint | None = None
    """The rendezvous of the ranks; None if --init-method has it."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The variables that set --world-size, --rank, --devices and --nodes, by these flags."""
    knows_node: bool = True
    """Whether the variables report which ranks share this node; otherwise the roll call does."""
    error_file: Path | None = None
    """The file from which torchrun reads the reason of a failure."""


def starter(env: Env) -> Program | None:
    """Return the most specific program that started this process as a rank, or None."""
    # An sbatch script has most of srun's variables and is no task: only srun sets SLURM_STEP_ID. mpirun may start its
    # daemons by srun: Slurm's variables are then a daemon's, and PMI's differ.
    pairs = ((_PMI.rank, _SLURM.rank), (_PMI.size, _SLURM.size))
    is_task = "SLURM_STEP_ID" in env and _SLURM.ranks(env) > 1
    is_task = is_task and all(env.get(pmi, env[slurm]) == env[slurm] for pmi, slurm in pairs)
    # Managed containers announce a world of one, without an address; lockstep may start ranks there. Scripts for srun
    # often export WORLD_SIZE alone, beside the address.
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & env.keys()
    is_announced = env.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in env
    if names and not is_announced and not (is_task and names == {"WORLD_SIZE"}):
        return _TORCHRUN
    if _OPEN_MPI.ranks(env) > 1:
        return _OPEN_MPI
    if is_task:
        return _SLURM
    return _PMI if _PMI.ranks(env) > 1 else None


def started_ranks(env: Env) -> int:
    """Return the number of ranks that another program started; 1 without one."""
    program = starter(env)
    return max(1, program.ranks(env)) if program else 1


def variables(env: Env) -> dict[str, str]:
    """Return the set variables of the program that started this rank."""
    return {name: env[name] for name in starter(env) or () if name in env}


def read(env: Env) -> Place:
    """Return this process's place. Raises `RequestError` for missing or contradictory variables."""
    program, settings = starter(env), ", ".join(f"{name} is {value}" for name, value in variables(env).items())
    if program is None:
        raise RequestError(
            "--launcher environment: RANK and WORLD_SIZE are not set, nor such variables of srun or mpirun; start the "
            "command with one of these, or take --launcher auto."
        )
    numbers = Topology(rank=_number(env, program.rank), size=_number(env, program.size))
    node_topology = _on_node(env, program, numbers)
    knows_node, topology = node_topology is not None, node_topology or numbers
    rank, size, local_size = topology.rank, topology.size, topology.local_size
    if not (rank < size and topology.local_rank < local_size <= size and topology.node < topology.nodes):
        raise RequestError(f"The environment is inconsistent: {settings}; set all of these on every rank, or none.")
    is_slurm = program is _SLURM
    address = env.get("MASTER_ADDR", "")
    if is_slurm and not address:
        address = LOOPBACK if topology.nodes == 1 else first_host(env.get("SLURM_STEP_NODELIST", ""))
    file = _rendezvous_file(program) if knows_node and not address and program in (_OPEN_MPI, _PMI) else None
    if not address and file is None:
        raise RequestError(
            f"{settings}, but MASTER_ADDR is not set, the address at which rank 0 listens; give it and MASTER_PORT to "
            "every rank, as by mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500."
        )
    port = 0 if file else _slurm_port(env) if is_slurm and "MASTER_PORT" not in env else _number(env, "MASTER_PORT")
    names = {"--rank": program.rank, "--world-size": program.size}
    if knows_node:
        names |= {"--devices": program.local_size, "--nodes": program.nodes or "the number of nodes"}
    is_agents, error_file = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True", env.get("TORCHELASTIC_ERROR_FILE", "")
    endpoint = Endpoint(
        file=file,
        host=LOOPBACK if file else address,
        port=port,
        job=env.get("TORCHELASTIC_RUN_ID", "") if is_agents else "",
        served=is_agents or _has_group(),
    )
    return Place(
        dataclasses.replace(topology, address=address, port=port),
        endpoint,
        names,
        knows_node=knows_node,
        error_file=Path(error_file) if error_file else None,
    )


def _has_group() -> bool:
    """Return whether this process has torch's default process group, whose rank 0 serves the store."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def check_started(env: Env) -> None:
    """Raise `RequestError` in a multi-task Slurm job for a process without srun."""
    tasks = max(integer(env.get(f"SLURM_NTASKS{suffix}")) or 0 for suffix in ("", "_PER_NODE"))
    if tasks > 1 and "SLURM_STEP_ID" not in env:
        raise RequestError(
            f"SLURM_NTASKS is {tasks}, but srun did not start this process (no SLURM_STEP_ID); write srun before it, "
            "take --launcher spawn for ranks on this node alone, or, if the variable is left over, unset it."
        )


def of_array(env: Env) -> tuple[int, int] | None:
    """Return (rank, world size) by Slurm's array index; None outside an array."""
    if "SLURM_ARRAY_TASK_ID" not in env:
        return None
    names = ("ID", "MIN", "MAX", "STEP", "COUNT")
    index, first, last, step, count = (_number(env, f"SLURM_ARRAY_TASK_{name}") for name in names)
    indices = range(first, last + 1, max(1, step))
    if len(indices) != count or index not in indices or starter(env) is _SLURM:
        raise RequestError(
            f"This job's array has {count} elements from {first} to {last} by {step}, this one {index}; to have ranks "
            "follow from it, submit one such as --array=0-3 of one task each, or give --rank and --world-size."
        )
    return indices.index(index), count


def integer(text: str | None) -> int | None:
    """Parse an integer from 0 up. Return None for other text, and for more than 10 digits."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def first_host(text: str) -> str:
    """Return the first name of a Slurm host list. `n[08-11,20]-ib,m2` gives n08-ib."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", text)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else "")


def _on_node(env: Env, program: Program, numbers: Topology) -> Topology | None:
    """Return the topology with local rank, local size, node and nodes; None if variables are missing."""
    is_slurm, is_one_node = program is _SLURM, env.get(program.local_size) == env[program.size]
    needed = {program.local_rank, program.local_size} | (set() if is_one_node else {program.node, program.nodes})
    if not is_slurm and not needed <= env.keys():
        return None
    node, nodes = (0, 1) if is_one_node else (_number(env, program.node), _number(env, program.nodes))
    local_size = _tasks(env.get(program.local_size, ""), node if is_slurm else 0)
    local_rank = _number(env, program.local_rank)
    return dataclasses.replace(numbers, local_rank=local_rank, local_size=local_size, node=node, nodes=nodes)


def _tasks(text: str, node: int) -> int:
    """Return a node's number of tasks, or 0, from Slurm's notation: `2(x3),1` describes nodes 0 to 3."""
    for count, times in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", text, re.ASCII):
        if node < int(times or 1):
            return int(count)
        node -= int(times or 1)
    return 0


def _rendezvous_file(program: Program) -> Path:
    """Return a rendezvous file for this mpirun's ranks, named by the nearest ancestor process that is no rank."""
    pid = 1
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):  # another user's, so none of the ranks'
            if program.rank in process.environ():
                continue
        pid = process.pid
        break
    try:
        return private_folder() / f"mpi-{pid}-{hashlib.sha256(hosts.begun(pid).encode()).hexdigest()[:12]}"
    except OSError as error:
        raise RequestError(f"The ranks of mpirun cannot meet in {error.filename}: {error.strerror}.") from error


def _slurm_port(env: Env) -> int:
    """Return a port for a Slurm step, the same on all tasks. Steps of neighbouring jobs get other ports."""
    job, step = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID")
    return _FIRST_PORT + (job * _STEPS + step % _STEPS) % _PORTS


def _number(env: Env, variable: str) -> int:
    if (number := integer(env.get(variable))) is None:
        state = f"is {env[variable]!r}" if variable in env else "is not set"
        raise RequestError(f"The environment's {variable} {state}; it takes a number from 0 up, on every rank.")
    return number

"""Slurm's dialect: what srun tells the tasks of a step (https://slurm.schedmd.com/srun.html, output environment).

An sbatch script has most of these variables too, and yet is no task: only srun sets SLURM_STEP_ID. A step of one task,
such as a shell that `srun --pty` opened, is no world.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Mapping

from ...errors import RequestError
from ...topology import Topology
from .place import LOOPBACK, Names, Place, check_below, number, port, whole

VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID")
_START = "start the ranks with srun"
_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_FIRST_PORT, _PORTS, _STEPS = 10_000, 20_000, 16
_ASK_S = 10.0
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_MOST_NODES = 1 << 17
_NAME = r"(?:[^,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
_HOSTS = re.compile(rf"({_NAME})(?:,{_NAME})*", re.ASCII)


def size_variable(env: Mapping[str, str]) -> str:
    """Return the variable that holds the number of the step's tasks; older versions have one for job and step."""
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def is_spoken(env: Mapping[str, str]) -> bool:
    """Return whether srun has started several tasks, of which this is one.

    Other programs use srun to start their own: under an mpirun that has its ranks' daemons started so, these
    variables are the daemon's, and its PMI counts otherwise.
    """
    tasks = env.get(size_variable(env), "")
    if "SLURM_STEP_ID" not in env or (whole(tasks) or 0) < 2:
        return False
    return env.get("PMI_SIZE", tasks) == tasks and env.get("PMI_RANK") in (None, env.get("SLURM_PROCID"))


def read(env: Mapping[str, str]) -> Place:
    """Return this task's place in its step."""
    of_size = size_variable(env)
    index, size, node, local_rank = (
        number(env, name, _START) for name in ("SLURM_PROCID", of_size, "SLURM_NODEID", "SLURM_LOCALID")
    )
    check_below("SLURM_PROCID", index, of_size, size, _START)
    tasks = tasks_per_node(env.get(_TASKS_PER_NODE) or env.get("SLURM_TASKS_PER_NODE", ""))
    if sum(tasks) != size or not node < len(tasks):
        raise RequestError(
            f"The environment disagrees with itself: {of_size} is {size} and SLURM_NODEID {node}, but {_TASKS_PER_NODE}"
            f" is {env.get(_TASKS_PER_NODE, 'not set')}; {_START}, and set none of them by hand."
        )
    check_below("SLURM_LOCALID", local_rank, f"the number of tasks on node {node}", tasks[node], _START)
    if env.get("WORLD_SIZE", str(size)) != str(size):
        raise RequestError(
            f"The environment disagrees with itself: WORLD_SIZE is {env['WORLD_SIZE']}, but srun has started {size} "
            f"tasks ({of_size}); unset WORLD_SIZE, or start as many tasks."
        )
    address = _address(env, len(tasks))
    return Place(
        Topology(
            rank=index,
            size=size,
            local_rank=local_rank,
            local_size=tasks[node],
            node=node,
            nodes=len(tasks),
            address=address,
            port=port(env, default=_port(env)),
        ),
        Names(
            rank="SLURM_PROCID",
            size=of_size,
            local_size=f"{_TASKS_PER_NODE} of this node",
            nodes="SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES",
        ),
        nodes_are_hosts="MASTER_ADDR" in env or address != LOOPBACK,  # which is then Slurm's own word
        gpus=_gpus(env),
    )


def check_started(env: Mapping[str, str]) -> None:
    """Raise `RequestError` where srun has not started this one of several tasks, or its variables make no sense."""
    of_size = size_variable(env)
    tasks = number(env, of_size, _START, "1")
    if "SLURM_STEP_ID" in env:
        if tasks < 2:
            check_below("SLURM_PROCID", number(env, "SLURM_PROCID", _START, "0"), of_size, tasks, _START)
        return
    instead = (
        "where this process is to start its ranks on this node itself, ask for one task or name --launcher spawn"
        if "SLURM_JOB_ID" in env
        else "where there is no job, and the variable is left over, unset it"
    )
    for variable in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        if (told := whole(env.get(variable, "")) or 0) > 1:
            raise RequestError(
                f"{variable} is {told}, but SLURM_STEP_ID is not set: the job has {told} tasks"
                f"{' a node' if variable.endswith('NODE') else ''}, and srun did not start this process, which would "
                f"be alone; write srun before the command, or torchrun, or, {instead}."
            )


def of_array(env: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (rank, world size) by this job's place in its array; None outside of one.

    Raises `RequestError` for an array whose indices are not evenly spaced, and for one whose elements are several
    tasks each.
    """
    if "SLURM_ARRAY_TASK_ID" not in env:
        return None
    index, first, last, count = (
        number(env, f"SLURM_ARRAY_TASK_{name}", "give --rank and --world-size")
        for name in ("ID", "MIN", "MAX", "COUNT")
    )
    step = number(env, "SLURM_ARRAY_TASK_STEP", _START, "1") or 1
    indices = range(first, last + 1, step)
    words = f"SLURM_ARRAY_TASK_MIN={first} to SLURM_ARRAY_TASK_MAX={last} by SLURM_ARRAY_TASK_STEP={step}"
    wrong = ""
    if len(indices) != count:
        wrong = f"SLURM_ARRAY_TASK_COUNT is {count}, but indices from {words} are {len(indices)}"
    elif index not in indices:
        wrong = f"SLURM_ARRAY_TASK_ID is {index}, which is none of the indices from {words}"
    if wrong:
        raise RequestError(
            f"{wrong}, so that ranks do not follow from them; submit an array such as --array=0-3, or give --rank and "
            "--world-size."
        )
    if is_spoken(env):
        raise RequestError(
            f"SLURM_ARRAY_TASK_COUNT is {count}, and srun has started {env[size_variable(env)]} tasks "
            f"({size_variable(env)}) in each element of the array: who is which rank does not follow; leave "
            "--init-method out for a world of each element, or start one task in each."
        )
    return (index - first) // step, count


def tasks_per_node(text: str) -> list[int]:
    """Return the numbers that Slurm writes as `2(x3),1`: of tasks, on each node."""
    if not text:
        raise RequestError(f"{_TASKS_PER_NODE} is not set, which srun sets for each task; {_START}.")
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        times = int(found[2] or 1) if found else 0
        if not found or len(counts) + times > _MOST_NODES:
            raise RequestError(f"The environment's {_TASKS_PER_NODE} is {text!r}; Slurm writes such as 2(x3),1.")
        counts += [int(found[1])] * times
    return counts


def first_host(text: str) -> str:
    """Return the first name in a host list: n08-ib of `n[08-11,20]-ib,m2`, whose brackets stand for numbers."""
    found = _HOSTS.fullmatch(text)
    if not found:
        raise RequestError(f"The environment's SLURM_STEP_NODELIST is {text!r}; Slurm writes such as n[1-3,5],m2.")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[1])


def _address(env: Mapping[str, str], nodes: int) -> str:
    """Return where rank 0 listens: where the user's script says so, else on the step's first node."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if nodes == 1:
        return LOOPBACK
    text = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not text:
        raise RequestError(
            f"SLURM_STEP_NODELIST is not set, which says where rank 0 runs; {_START}, or set MASTER_ADDR."
        )
    first = first_host(text)
    if _resolves(first):
        return first
    said = _node_address(first)
    if said and _resolves(said):
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
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", name],
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
        if found := re.search(r"\bNodeAddr=(\S+)", said.stdout):
            return found[1]
    return ""


def _port(env: Mapping[str, str]) -> int:
    """Return a port that all tasks of the step derive alike, and that steps of neighbouring jobs do not share.

    It lies below those that the kernel gives to whoever asks for any.
    """
    job = number(env, "SLURM_JOB_ID", _START)
    step = number(env, "SLURM_STEP_ID", _START)
    return _FIRST_PORT + (job * _STEPS + step % _STEPS) % _PORTS


def _gpus(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return what says how many of this node's GPUs the job has."""
    told = whole(env.get("SLURM_GPUS_ON_NODE", ""))
    return None if told is None else ("SLURM_GPUS_ON_NODE", told)

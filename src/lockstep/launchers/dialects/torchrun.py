"""torchrun's dialect, and that of whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...errors import RequestError
from ...topology import Topology
from . import mpi, slurm
from .place import Names, Place, check_below, number, port

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NAMES = Names(rank="RANK", size="WORLD_SIZE", local_size="LOCAL_WORLD_SIZE")
_START = "start with torchrun"


def is_told(env: Mapping[str, str]) -> bool:
    """Return whether any of the variables is there."""
    return any(variable in env for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def is_spoken(env: Mapping[str, str]) -> bool:
    """Return whether the variables make this process a rank.

    A world of one without an address to meet at is what managed containers announce: it starts no ranks. And scripts
    for srun often export WORLD_SIZE alone, beside the address: who is which rank is then for Slurm to say.
    """
    if env.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in env:
        return False
    if "RANK" not in env and "LOCAL_RANK" not in env and slurm.is_spoken(env):
        return False
    return is_told(env)


def check_started(env: Mapping[str, str]) -> None:
    """Raise `RequestError` where a world of one, which starts no ranks, has a rank beyond it."""
    if "RANK" in env and "WORLD_SIZE" in env:
        check_below("RANK", _number(env, "RANK"), "WORLD_SIZE", _number(env, "WORLD_SIZE"), _START)


def read(env: Mapping[str, str]) -> Place:
    """Return this process's place."""
    index, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_size = _number(env, "LOCAL_WORLD_SIZE", "1")
    local_rank = _number(env, "LOCAL_RANK", str(index % max(1, local_size)))
    node = _number(env, "GROUP_RANK", str(index // max(1, local_size)))
    nodes = _number(env, "GROUP_WORLD_SIZE", str(max(node + 1, -(-size // max(1, local_size)))))
    check_below("RANK", index, "WORLD_SIZE", size, _START)
    if "LOCAL_WORLD_SIZE" in env:
        check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size, _START)
        check_below("LOCAL_WORLD_SIZE", local_size, "WORLD_SIZE", size, _START, or_same=True)
    else:
        local_rank = 0  # the roll call finds out who shares a host
    check_below("GROUP_RANK", node, "GROUP_WORLD_SIZE", nodes, _START)
    if local_size == size and local_rank != index:
        raise RequestError(
            f"The environment disagrees with itself: LOCAL_WORLD_SIZE and WORLD_SIZE are {size}, so that all ranks are "
            f"on this node, but LOCAL_RANK is {local_rank} where RANK is {index}; {_START}, or set both alike."
        )
    if "TORCHELASTIC_RUN_ID" not in env:  # torchrun numbers its ranks itself, whoever has started its agents
        for starter in (mpi.OPEN_MPI, mpi.PMI):
            starter.check_agrees(("RANK", index), ("WORLD_SIZE", size), env)
    if not env.get("MASTER_ADDR"):
        raise RequestError(f"WORLD_SIZE is {size}, but MASTER_ADDR is not set; it says where rank 0 listens.")
    error_file = env.get("TORCHELASTIC_ERROR_FILE")
    return Place(
        Topology(
            rank=index,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node=node,
            nodes=nodes,
            address=env["MASTER_ADDR"],
            port=port(env),
        ),
        NAMES,
        store_is_served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job=env.get("TORCHELASTIC_RUN_ID", ""),
        knows_node="LOCAL_RANK" in env and "LOCAL_WORLD_SIZE" in env,
        # Several agents of torchrun's may share a host, and it takes the host's own name for the address itself.
        nodes_are_hosts="TORCHELASTIC_RUN_ID" not in env,
        error_file=Path(error_file) if error_file else None,
    )


def _number(env: Mapping[str, str], variable: str, default: str | None = None) -> int:
    if env.get(variable, default) is None:
        told = ", ".join(f"{name}={env[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in env)
        raise RequestError(
            f"The environment has {told}, but {variable} is not set; set it on every rank, or start with torchrun."
        )
    return number(env, variable, _START, default)

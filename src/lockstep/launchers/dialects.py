"""What programs that start ranks tell them through environment variables.

Each such program speaks a *dialect*: which variables it sets and what they mean. A dialect is one function from the
environment to a `Place`; `_DIALECTS` lists them, the most specific first. Today: torchrun (and whatever else sets
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT). No torch here: which launcher a run takes is known without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import RequestError
from ..topology import Topology


@dataclass(frozen=True)
class Place:
    """Where the environment puts this process, and where its ranks meet."""

    topology: Topology
    store_is_served: bool = False
    """Whether an agent serves the store, which outlives the ranks; otherwise rank 0 does."""
    job: str = ""
    """What tells this job from others that use the agent's store."""
    start: str = ""
    """What tells this start of the ranks from earlier ones of the same job."""
    knows_node: bool = True
    """Whether it says which ranks share this node; otherwise the roll call finds out."""
    error_file: Path | None = None
    """Where the program that started the ranks looks for the reason of a failure."""


def is_spoken(env: Mapping[str, str]) -> bool:
    """Return whether any dialect is spoken here.

    A world of one without an address to meet at is what managed containers announce: it starts no ranks.
    """
    if env.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in env:
        return False
    return any(speaks(env) for speaks, _ in _DIALECTS.values())


def started_elsewhere(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which another program says that it has started several ranks; empty if none does.

    A world of one, which managed containers like to announce, keeps nobody from starting ranks of their own.
    """
    size = env.get("WORLD_SIZE", "")
    told = {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in env}
    return told if size.isdecimal() and int(size) > 1 else {}


def read(env: Mapping[str, str]) -> Place:
    """Return this process's place, by the first dialect that is spoken here."""
    for speaks, understand in _DIALECTS.values():
        if speaks(env):
            return understand(env)
    raise RequestError(
        "--launcher environment: RANK and WORLD_SIZE are not set; start the command with torchrun, "
        "or take --launcher auto."
    )


def _torchrun_is_spoken(env: Mapping[str, str]) -> bool:
    return any(variable in env for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def _torchrun(env: Mapping[str, str]) -> Place:
    """torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables"""
    index, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_size = _number(env, "LOCAL_WORLD_SIZE", "1")
    local_rank = _number(env, "LOCAL_RANK", str(index % max(1, local_size)))
    node = _number(env, "GROUP_RANK", str(index // max(1, local_size)))
    nodes = _number(env, "GROUP_WORLD_SIZE", str(max(node + 1, -(-size // max(1, local_size)))))
    _check_below(env, "RANK", index, "WORLD_SIZE", size)
    _check_below(env, "LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    _check_below(env, "LOCAL_WORLD_SIZE", local_size, "WORLD_SIZE", size + 1)
    _check_below(env, "GROUP_RANK", node, "GROUP_WORLD_SIZE", nodes)
    if not env.get("MASTER_ADDR"):
        raise RequestError(f"WORLD_SIZE is {size}, but MASTER_ADDR is not set; it says where rank 0 listens.")
    address, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT")
    error_file = env.get("TORCHELASTIC_ERROR_FILE")
    return Place(
        Topology(
            rank=index,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node=node,
            nodes=nodes,
            address=address,
            port=port,
        ),
        store_is_served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job=env.get("TORCHELASTIC_RUN_ID", ""),
        start=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        knows_node="LOCAL_RANK" in env and "LOCAL_WORLD_SIZE" in env,
        error_file=Path(error_file) if error_file else None,
    )


_DIALECTS: dict[str, tuple[Callable[[Mapping[str, str]], bool], Callable[[Mapping[str, str]], Place]]] = {
    "torchrun": (_torchrun_is_spoken, _torchrun),
}


def _number(env: Mapping[str, str], variable: str, default: str | None = None) -> int:
    text = env.get(variable, default)
    if text is None:
        told = ", ".join(f"{name}={env[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in env)
        raise RequestError(
            f"The environment has {told}, but {variable} is not set; set it on every rank, or start with torchrun."
        )
    if not text.isdecimal():
        raise RequestError(f"The environment's {variable} is {text!r}; it takes a number from 0 up.")
    return int(text)


def _check_below(env: Mapping[str, str], name: str, value: int, bound_name: str, bound: int) -> None:
    if not value < bound:
        raise RequestError(
            f"The environment disagrees with itself: {name} is {value}, but {bound_name} is "
            f"{env.get(bound_name, bound)}; set both on every rank, or start with torchrun."
        )

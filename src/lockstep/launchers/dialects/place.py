"""Where the environment puts a process, whatever the dialect, and the reading of numbers that all dialects share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import RequestError
from ...topology import Topology

LOOPBACK = "127.0.0.1"
_MOST_DIGITS = 10


@dataclass(frozen=True)
class Names:
    """The variables in which a dialect says each thing, for sentences about them."""

    rank: str
    size: str
    local_size: str
    nodes: str = "the number of nodes"


@dataclass(frozen=True)
class Place:
    """Where the environment puts this process, and where its ranks meet."""

    topology: Topology
    names: Names
    file: Path | None = None
    """The file in which the ranks meet, where that is no address."""
    store_is_served: bool = False
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


@dataclass(frozen=True)
class Dialect:
    """One program's way to tell ranks who they are."""

    name: str
    variables: tuple[str, ...]
    """Those that say which rank of how many this is."""
    is_spoken: Callable[[Mapping[str, str]], bool]
    read: Callable[[Mapping[str, str]], Place]
    size: Callable[[Mapping[str, str]], str]
    """Returns the name of the variable that holds the number of ranks."""


def whole(text: str) -> int | None:
    """Return the number that a text is, from 0 up; None for any other, and for one with more digits than a job's."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def number(env: Mapping[str, str], variable: str, start_with: str, default: str | None = None) -> int:
    """Return the number in a variable. Raises `RequestError` where it is missing without a default, or is none."""
    text = env.get(variable, default)
    if text is None:
        raise RequestError(f"{variable} is not set in the environment; set it on every rank, or {start_with}.")
    if (found := whole(text)) is None:
        raise RequestError(f"The environment's {variable} is {text!r}; it takes a number from 0 up.")
    return found


def check_below(name: str, value: int, bound_name: str, bound: int, start_with: str, *, or_same: bool = False) -> None:
    """Raise `RequestError` where a number does not lie below its bound (`or_same`: lies above it)."""
    if not value < bound + or_same:
        raise RequestError(
            f"The environment disagrees with itself: {name} is {value}, but {bound_name} is {bound}; "
            f"set both on every rank, or {start_with}."
        )


def port(env: Mapping[str, str], default: int | None = None) -> int:
    """Return MASTER_PORT. Raises `RequestError` for what is no port."""
    given = number(env, "MASTER_PORT", "start with torchrun", None if default is None else str(default))
    if not 0 < given < 1 << 16:
        raise RequestError(f"The environment's MASTER_PORT is {given}; ports go from 1 to 65535.")
    return given

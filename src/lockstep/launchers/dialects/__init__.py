"""What programs that start ranks tell them through environment variables.

Each such program speaks a *dialect*: which variables it sets and what they mean. A dialect is a file beside this one
and a line in `_DIALECTS`, the most specific first: torchrun inside a Slurm job is torchrun, and so is an mpirun there
its own. No torch here: which launcher a run takes is known without it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import RequestError
from . import mpi, slurm, torchrun
from .place import Dialect, Names, Place, whole
from .slurm import of_array

__all__ = ["Names", "Place", "check_started", "is_spoken", "of_array", "ranks_told", "read", "started_elsewhere"]


def is_spoken(env: Mapping[str, str]) -> bool:
    """Return whether any dialect is spoken here; a world of one task is none: nobody has to be met."""
    return _spoken(env) is not None


def started_elsewhere(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which another program says that it has started several ranks; empty if none does.

    A world of one, which managed containers like to announce, keeps nobody from starting ranks of their own.
    """
    dialect = _spoken(env)
    if dialect is None or ranks_told(env)[1] <= 1:
        return {}
    return {name: env[name] for name in dialect.variables if name in env}


def ranks_told(env: Mapping[str, str]) -> tuple[str, int]:
    """Return the variable that says how many ranks another program has started, and the number; 1 where none does."""
    dialect = _spoken(env)
    if dialect is None:
        return "", 1
    told = whole(env.get(variable := dialect.size(env), ""))
    return variable, 1 if told is None else told


def read(env: Mapping[str, str]) -> Place:
    """Return this process's place, by the first dialect that is spoken here.

    Raises `RequestError` where the variables disagree with one another, or where there are none.
    """
    if dialect := _spoken(env):
        return dialect.read(env)
    if torchrun.is_told(env):
        return torchrun.read(env)
    raise RequestError(
        "--launcher environment: RANK and WORLD_SIZE are not set, nor Slurm's or MPI's variables of several tasks; "
        "start the command with torchrun, srun or mpirun, or take --launcher auto."
    )


def check_started(env: Mapping[str, str]) -> None:
    """Raise `RequestError` where a process that no dialect places was yet meant to be one of several.

    Then a scheduler has granted several tasks, and this is none of them, or some of a dialect's variables are missing
    or make no sense: to train alone would not be what was asked for.
    """
    torchrun.check_started(env)
    mpi.OPEN_MPI.check_started(env)
    slurm.check_started(env)
    mpi.PMI.check_started(env)


_DIALECTS = (
    Dialect("torchrun", torchrun.VARIABLES, torchrun.is_spoken, torchrun.read, lambda env: "WORLD_SIZE"),
    Dialect("Open MPI", mpi.OPEN_MPI.variables, mpi.OPEN_MPI.is_spoken, mpi.OPEN_MPI.read, mpi.OPEN_MPI.size_variable),
    Dialect("Slurm", slurm.VARIABLES, slurm.is_spoken, slurm.read, slurm.size_variable),
    Dialect("PMI", mpi.PMI.variables, mpi.PMI.is_spoken, mpi.PMI.read, mpi.PMI.size_variable),
)


def _spoken(env: Mapping[str, str]) -> Dialect | None:
    return next((dialect for dialect in _DIALECTS if dialect.is_spoken(env)), None)

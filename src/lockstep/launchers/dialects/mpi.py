"""The dialects of MPI's starters: Open MPI's mpirun, and PMI as MPICH's and Intel's mpirun speak it.

None of them says where ranks could meet. With MASTER_ADDR and MASTER_PORT they meet there (`mpirun -x` and `-genv`
hand them on); ranks that all run on this host meet in a file that belongs to this one mpirun.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...errors import RequestError
from ...files import private_folder
from ...topology import Topology
from .. import processes
from .place import Names, Place, check_below, number, port, whole

_START = "start the ranks with mpirun"


@dataclass(frozen=True)
class Mpi:
    """The names of one family of starters; where there are several for a thing, the first that is set counts."""

    rank: str
    size: str
    local_ranks: tuple[str, ...]
    local_sizes: tuple[str, ...]
    exporting: str
    """How the starter hands a variable on to ranks on other hosts."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Those that say which rank of how many this is."""
        return (self.rank, self.size, *self.local_ranks, *self.local_sizes)

    def size_variable(self, env: Mapping[str, str]) -> str:
        """Return the variable that holds the number of ranks."""
        return self.size

    def is_spoken(self, env: Mapping[str, str]) -> bool:
        """Return whether several ranks were started, of which this is one."""
        return self.rank in env and (whole(env.get(self.size, "")) or 0) > 1

    def check_started(self, env: Mapping[str, str]) -> None:
        """Raise `RequestError` where the variables, which make no several ranks, are not those of one either."""
        if self.size not in env and self.rank not in env:
            return
        size = number(env, self.size, _START) if self.size in env else None
        if size is None or (self.rank not in env and size > 1):
            there, missing = (self.rank, self.size) if size is None else (self.size, self.rank)
            raise RequestError(
                f"The environment disagrees with itself: {there} is {env[there]}, but {missing} is not set; {_START}, "
                f"or, if it is left over: unset {there}."
            )
        if self.rank in env:
            check_below(self.rank, number(env, self.rank, _START), self.size, size, _START)

    def check_agrees(self, rank: tuple[str, int], size: tuple[str, int], env: Mapping[str, str]) -> None:
        """Raise `RequestError` where this starter has as many ranks as other variables say, and this is another one.

        With another number of them, each may well have started some that count for themselves.
        """
        (name, index), (of_size, count) = rank, size
        if self.is_spoken(env) and int(env[self.size]) == count and env[self.rank] != str(index):
            raise RequestError(
                f"The environment disagrees with itself: {name} is {index}, but {self.rank} is {env[self.rank]}, and "
                f"both {of_size} and {self.size} are {count}; unset {name} and {of_size}, or set {name} to "
                f"{self.rank} on every rank."
            )

    def read(self, env: Mapping[str, str]) -> Place:
        """Return this rank's place; which ranks of several hosts share one is left to the roll call."""
        index, size = number(env, self.rank, _START), number(env, self.size, _START)
        check_below(self.rank, index, self.size, size, _START)
        if self is OPEN_MPI:
            PMI.check_agrees((self.rank, index), (self.size, size), env)
        local_size_name = next((name for name in self.local_sizes if name in env), self.local_sizes[0])
        local_rank_name = next((name for name in self.local_ranks if name in env), self.local_ranks[0])
        local_size = number(env, local_size_name, _START, "1")
        local_rank = number(env, local_rank_name, _START, "0")
        check_below(local_rank_name, local_rank, local_size_name, local_size, _START)
        check_below(local_size_name, local_size, self.size, size, _START, or_same=True)
        is_here = local_size == size
        address = env.get("MASTER_ADDR", "")
        if not address and not is_here:
            raise RequestError(
                f"{self.size} is {size}, but {local_size_name} is {env.get(local_size_name, 'not set')}: ranks run on "
                "several hosts, and nothing says where they meet; add "
                f"{self.exporting.format('MASTER_ADDR', '<address of the first host>')} "
                f"{self.exporting.format('MASTER_PORT', '29500')} to the mpirun command."
            )
        topology = Topology(
            rank=index,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            nodes=1 if is_here else 2,
            address=address,
            port=port(env) if address else 0,
        )
        return Place(
            topology,
            Names(rank=self.rank, size=self.size, local_size=local_size_name),
            file=None if address else _meeting(env, self.rank),
            knows_node=is_here,
        )


OPEN_MPI = Mpi(
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_ranks=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_sizes=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    exporting="-x {}={}",
)
PMI = Mpi(
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_ranks=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_sizes=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    exporting="-genv {} {}",
)


def _meeting(env: Mapping[str, str], rank_variable: str) -> Path:
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
        raise RequestError(f"The ranks of {_START} cannot meet in {error.filename}: {error.strerror}.") from error
    _sweep(folder)
    starter = _starter(rank_variable)
    return folder / f"mpi-{starter.pid}-{_hashed(processes.begun(starter.pid))}"


def _starter(rank_variable: str) -> psutil.Process:
    """Return the process that has started this host's ranks: the nearest ancestor that is no rank by its variables."""
    ancestors = psutil.Process().parents()
    for process in ancestors:
        try:
            if rank_variable not in process.environ():
                return process
        except psutil.Error:  # another user's, so none of the ranks'
            return process
    raise RequestError(
        f"{rank_variable} is set, but all processes above this one have it too: no mpirun has started it; "
        f"unset {rank_variable}, or {_START}."
    )


def _sweep(folder: Path) -> None:
    """Remove the files of this user whose mpirun has ended before its ranks could."""
    for path in folder.glob("mpi-*"):
        found = re.fullmatch(r"mpi-(\d+)-\w+", path.name)
        if found and not psutil.pid_exists(int(found[1])):
            with contextlib.suppress(OSError):
                path.unlink()


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]

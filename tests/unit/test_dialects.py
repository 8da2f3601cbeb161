"""What srun and mpirun say through variables, read without either; tests/real has the real ones."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.config import RunConfig
from lockstep.errors import RequestError
from lockstep.launchers import dialects, manual, table
from lockstep.launchers import environment as launcher
from lockstep.launchers.dialects import mpi, slurm
from lockstep.options import override
from lockstep.topology import Topology

from ..environments import environment

SLURM, ONE_NODE, BATCH = (environment(name) for name in ("srun", "srun-one-node", "batch"))
TORCHRUN, OPEN_MPI, MPICH = (environment(name) for name in ("ranks", "open-mpi", "mpich"))


def _config(**values: Any) -> RunConfig:
    return override(RunConfig(), accelerator="cpu", **values)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3,5],m2", ["n1", "n2", "n3", "n5", "m2"]),
        ("n[08-11]-ib", ["n08-ib", "n09-ib", "n10-ib", "n11-ib"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("a-b.c,n[7]", ["a-b.c", "n7"]),
    ],
)
def test_a_host_list_is_expanded_as_scontrol_does(text: str, names: list[str]) -> None:
    assert slurm.hosts(text) == names


def test_sruns_variables_say_the_place() -> None:
    port = 10_000 + 7 * 16
    assert dialects.read(SLURM).topology == Topology(
        rank=2, size=3, local_rank=0, local_size=1, node=1, nodes=2, address="localhost", port=port
    )
    assert dialects.read(ONE_NODE).topology == Topology(
        rank=2, size=3, local_rank=2, local_size=3, address="127.0.0.1", port=port
    )
    chosen = {**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}
    topology = dialects.read(chosen).topology
    assert (topology.address, topology.port) == ("10.0.0.1", 5)


def test_steps_of_neighbouring_jobs_meet_at_ports_of_their_own() -> None:
    ports = {
        dialects.read({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).topology.port
        for job in range(1000, 1100)
        for step in range(4)
    }
    assert len(ports) == 400
    assert max(ports) < 32_768


@pytest.mark.parametrize(
    ("words", "variable", "size"),
    [
        ("srun", "SLURM_STEP_NUM_TASKS", 3),
        ("srun ranks", "WORLD_SIZE", 2),
        ("srun WORLD_SIZE=3 MASTER_ADDR=localhost", "SLURM_STEP_NUM_TASKS", 3),
        ("srun open-mpi", "OMPI_COMM_WORLD_SIZE", 2),
        ("srun mpich", "PMI_SIZE", 2),
        ("srun PMI_RANK=2 PMI_SIZE=6", "PMI_SIZE", 6),
        ("batch open-mpi", "OMPI_COMM_WORLD_SIZE", 2),
        ("batch", "", 1),
        ("srun RANK=0 WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS", 3),
    ],
)
def test_the_most_specific_dialect_is_heard(words: str, variable: str, size: int) -> None:
    env = environment(words)
    assert dialects.ranks_told(env) == (variable, size)
    assert dialects.is_spoken(env) == (size > 1)
    assert table.resolve(_config(), env).parallel.strategy == ("ddp" if size > 1 else "single")


@pytest.mark.parametrize(
    "words",
    [
        "SLURM_JOB_ID=7",
        "step SLURM_NTASKS=1",
        "step SLURM_NTASKS=1 PMI_RANK=0 PMI_SIZE=1",
        "OMPI_COMM_WORLD_SIZE=1",
        "RANK=0 WORLD_SIZE=1",
        "batch SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=1",
    ],
)
def test_a_process_that_is_alone_may_be_so(words: str) -> None:
    assert table.choose(_config(), environment(words)).name == "inline"
    assert table.choose(_config(devices=2), environment(words)).name == "spawn"


def test_where_the_ranks_of_a_host_are_not_counted_the_roll_call_finds_them() -> None:
    """What scripts for srun often export: no LOCAL_WORLD_SIZE."""
    place = dialects.read(environment("ranks -LOCAL_WORLD_SIZE"))
    assert (place.topology.rank, place.topology.size, place.knows_node) == (1, 2, False)


def test_an_agents_own_ranks_need_not_be_those_of_who_has_started_it() -> None:
    """torchrun numbers its ranks as the agents come."""
    for words in ("OMPI_COMM_WORLD_RANK=0 TORCHELASTIC_RUN_ID=none", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4"):
        assert dialects.read(environment(f"ranks open-mpi {words}")).topology.rank == 1


def test_more_tasks_than_gpus_are_refused() -> None:
    place = dialects.read({**ONE_NODE, "SLURM_GPUS_ON_NODE": "2"})
    asked = dataclasses.replace(_config(strategy="ddp").parallel, accelerator="cuda")
    words = "SLURM_STEP_TASKS_PER_NODE of this node is 3, but SLURM_GPUS_ON_NODE is 2: each rank needs a GPU of its own"
    with pytest.raises(RequestError, match=words):
        launcher._check_node(asked, place, {"CUDA_VISIBLE_DEVICES": ""})
    enough = dialects.read({**ONE_NODE, "SLURM_GPUS_ON_NODE": "3"})
    launcher._check_node(asked, enough, {"CUDA_VISIBLE_DEVICES": ""})


def test_an_array_says_ranks_once_there_is_a_place_to_meet() -> None:
    meeting, array = _config(init_method="file:///shared/x"), environment("array")
    assert table.choose(meeting, array).name == "manual"
    assert table.resolve(meeting, array).parallel.strategy == "ddp"
    assert manual._who(meeting.parallel, array) == (2, 4)
    assert manual._who(_config(init_method="tcp://h:1", rank=0, world_size=2).parallel, array) == (0, 2)
    assert table.choose(_config(), array).name == "inline"  # by itself an array is as many runs


def test_ranks_of_one_mpirun_meet_in_its_own_folder(tmp_path: Path) -> None:
    env = {**OPEN_MPI, "PMIX_SERVER_TMPDIR": str(tmp_path), "PMIX_NAMESPACE": "1"}
    place = dialects.read(env)
    assert place.file is not None
    assert place.file.parent == tmp_path
    assert dialects.read({**env, "PMIX_NAMESPACE": "2"}).file != place.file
    at_address = dialects.read({**env, "MASTER_ADDR": "h", "MASTER_PORT": "5"})
    assert (at_address.file, at_address.topology.address, at_address.topology.port) == (None, "h", 5)


def test_meeting_files_of_mpiruns_that_have_ended_are_removed(tmp_path: Path) -> None:
    alive, dead = psutil.Process().pid, 2**22 + 1  # beyond what Linux gives
    left, used = (tmp_path / f"lockstep-mpi-{os.getuid()}-{pid}-0123456789ab" for pid in (dead, alive))
    other = tmp_path / f"lockstep-mpi-{os.getuid()}-notes"
    for path in (left, used, other):
        path.touch()
    mpi._sweep(tmp_path)
    assert [path.exists() for path in (left, used, other)] == [False, True, True]


def test_ranks_of_an_mpi_on_several_hosts_leave_the_nodes_to_the_roll_call() -> None:
    env = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    place = dialects.read(env)
    assert (place.topology.rank, place.topology.size, place.knows_node) == (1, 4, False)
    launcher._check_agrees(_config(nodes=3, devices=4, strategy="ddp").parallel, place)

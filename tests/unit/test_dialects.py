"""What srun and mpirun say through variables, read without either; tests/real has the real ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RequestError
from lockstep.launchers import dialects, manual, table
from lockstep.launchers import environment as launcher
from lockstep.launchers.dialects import slurm

from ..environments import environment
from ..starting import config

PORT = 10_000 + 7 * 16


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3,5],m2", "n1 n2 n3 n5 m2"),
        ("n[08-11]-ib", "n08-ib n09-ib n10-ib n11-ib"),
        ("r[1-2]n[3,5]", "r1n3 r1n5 r2n3 r2n5"),
        ("a-b.c,n[7]", "a-b.c n7"),
    ],
)
def test_a_host_list_is_expanded_as_scontrol_does(text: str, names: str) -> None:
    assert " ".join(slurm.hosts(text)) == names


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("srun", {"rank": 2, "size": 3, "node": 1, "nodes": 2, "address": "localhost", "port": PORT}),
        ("srun-one-node", {"rank": 2, "size": 3, "local_rank": 2, "local_size": 3, "port": PORT}),
        ("srun MASTER_ADDR=10.0.0.1 MASTER_PORT=5", {"rank": 2, "size": 3, "address": "10.0.0.1", "port": 5}),
        # What scripts for srun often export; the roll call finds the nodes, as for an MPI on several hosts.
        ("ranks -LOCAL_WORLD_SIZE", {"rank": 1, "size": 2, "knows_node": False}),
        ("open-mpi OMPI_COMM_WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=5", {"rank": 1, "size": 4, "knows_node": False}),
        # torchrun numbers its ranks as the agents come: they need not be those of who has started it.
        ("ranks open-mpi OMPI_COMM_WORLD_RANK=0 TORCHELASTIC_RUN_ID=none", {"rank": 1}),
        ("ranks open-mpi OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4", {"rank": 1}),
    ],
)
def test_variables_say_the_place(words: str, place: dict[str, Any]) -> None:
    found = dialects.read(environment(words))
    expected = dataclasses.asdict(found.topology) | {"knows_node": found.knows_node}
    assert {name: expected[name] for name in place} == place


def test_steps_of_neighbouring_jobs_meet_at_ports_of_their_own() -> None:
    jobs = [f"srun SLURM_JOB_ID={job} SLURM_STEP_ID={step}" for job in range(1000, 1100) for step in range(4)]
    ports = {dialects.read(environment(words)).topology.port for words in jobs}
    assert len(ports) == len(jobs)
    assert max(ports) < 32_768


@pytest.mark.parametrize(
    ("words", "variable", "size"),
    [
        ("srun", "SLURM_STEP_NUM_TASKS", 3),
        ("srun ranks", "WORLD_SIZE", 2),
        ("srun WORLD_SIZE=3 MASTER_ADDR=localhost", "SLURM_STEP_NUM_TASKS", 3),
        ("srun open-mpi", "OMPI_COMM_WORLD_SIZE", 2),
        ("srun mpich", "PMI_SIZE", 2),
        ("srun RANK=0 WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS", 3),
        ("batch open-mpi", "OMPI_COMM_WORLD_SIZE", 2),
        ("batch", "", 1),
    ],
)
def test_the_most_specific_dialect_is_heard(words: str, variable: str, size: int) -> None:
    env = environment(words)
    assert dialects.ranks_told(env) == (variable, size)
    assert table.resolve(config(), env).parallel.strategy == ("ddp" if size > 1 else "single")


@pytest.mark.parametrize(
    "words",
    [
        "SLURM_JOB_ID=7",
        "step SLURM_NTASKS=1 PMI_RANK=0 PMI_SIZE=1",
        "OMPI_COMM_WORLD_SIZE=1",
        "RANK=0 WORLD_SIZE=1",
        "batch SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=1",
    ],
)
def test_a_process_that_is_alone_may_be_so(words: str) -> None:
    assert table.choose(config(), environment(words)).name == "inline"
    assert table.choose(config(devices=2), environment(words)).name == "spawn"


def test_more_tasks_than_gpus_are_refused() -> None:
    asked = dataclasses.replace(config(strategy="ddp").parallel, accelerator="cuda")
    place = dialects.read(environment("srun-one-node SLURM_GPUS_ON_NODE=2"))
    with pytest.raises(RequestError, match="this node is 3, but SLURM_GPUS_ON_NODE is 2: each rank needs a GPU"):
        launcher._check_node(asked, place, {"CUDA_VISIBLE_DEVICES": ""})


def test_an_array_says_ranks_once_there_is_a_place_to_meet() -> None:
    meeting, array = config(init_method="file:///shared/x"), environment("array")
    assert table.choose(meeting, array).name == "manual"
    assert table.resolve(meeting, array).parallel.strategy == "ddp"
    assert manual._who(meeting.parallel, array) == (2, 4)
    assert manual._who(config(init_method="tcp://h:1", rank=0, world_size=2).parallel, array) == (0, 2)
    assert table.choose(config(), array).name == "inline"  # by itself an array is as many runs


def test_ranks_of_one_mpirun_meet_in_its_own_folder(tmp_path: Path) -> None:
    env = environment(f"open-mpi PMIX_SERVER_TMPDIR={tmp_path} PMIX_NAMESPACE=1")
    place = dialects.read(env)
    assert place.file is not None
    assert place.file.parent == tmp_path
    assert dialects.read({**env, "PMIX_NAMESPACE": "2"}).file != place.file
    assert dialects.read({**env, "MASTER_ADDR": "h", "MASTER_PORT": "5"}).file is None

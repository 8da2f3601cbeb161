"""What srun and mpirun say through variables, read without either; tests/real has the real ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lockstep.errors import RequestError
from lockstep.launchers import dialects, table
from lockstep.launchers import environment as launcher
from lockstep.launchers.dialects import slurm

from ..environments import environment
from ..starting import config

PORT = 10_000 + 7 * 16


def test_a_host_list_is_expanded_as_scontrol_does() -> None:
    for text, names in (
        ("n[1-3,5],m2", "n1 n2 n3 n5 m2"),
        ("n[08-11]-ib", "n08-ib n09-ib n10-ib n11-ib"),
        ("r[1-2]n[3,5]", "r1n3 r1n5 r2n3 r2n5"),
    ):
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
        # The most specific program is heard.
        ("srun ranks", {"rank": 1, "size": 2, "port": 29500}),
        ("srun mpich", {"rank": 1, "size": 2}),
        ("batch open-mpi", {"rank": 1, "size": 2}),
    ],
)
def test_variables_say_the_place(words: str, place: dict[str, Any]) -> None:
    env = environment(words)
    found = dialects.read(env)
    expected = dataclasses.asdict(found.topology) | {"knows_node": found.knows_node}
    assert {name: expected[name] for name in place} == place
    assert table.resolve(config(), env).parallel.strategy == "ddp"


def test_steps_of_neighbouring_jobs_meet_at_ports_of_their_own() -> None:
    jobs = [f"srun SLURM_JOB_ID={job} SLURM_STEP_ID={step}" for job in range(1000, 1100) for step in range(4)]
    ports = {dialects.read(environment(words)).topology.port for words in jobs}
    assert len(ports) == len(jobs)
    assert max(ports) < 32_768


@pytest.mark.parametrize(
    "words",
    [
        "SLURM_JOB_ID=7",
        "step SLURM_NTASKS=1 PMI_RANK=0 PMI_SIZE=1",
        "OMPI_COMM_WORLD_SIZE=1",
        "RANK=0 WORLD_SIZE=1",
        "batch SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=1",
        "array",  # which is as many runs
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

"""Environment variables of srun, mpirun and torchrun, without these programs; tests/real runs them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import RequestError
from lockstep.launchers import environments
from lockstep.launchers.plan import plan

from ..environments import environment
from ..hostile import environments as drawn
from ..hostile import often
from ..starting import config

PORT = 10_000 + 7 * 16


def test_the_first_host_of_a_list() -> None:
    lists = ("n[1-3,5],m2", "m2,n[1-3]", "n[08-11]-ib", "r[1-2]n[3,5]", "n[1-99999999]", f"n[{'9' * 5000}]")
    assert [environments.first_host(text) for text in lists] == ["n1", "m2", "n08-ib", "r1n3", "n1", f"n{'9' * 5000}"]


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("srun", {"rank": 2, "size": 3, "local_size": 1, "node": 1, "nodes": 2, "address": "localhost", "port": PORT}),
        ("srun-one-node", {"rank": 2, "size": 3, "local_rank": 2, "local_size": 3, "port": PORT}),
        ("srun MASTER_ADDR=10.0.0.1 MASTER_PORT=5", {"rank": 2, "size": 3, "address": "10.0.0.1", "port": 5}),
        ("torchrun", {"rank": 3, "size": 4, "local_rank": 1, "local_size": 2, "node": 1, "nodes": 2}),
        # What scripts for srun often export; the roll call finds the nodes, as for an MPI on several hosts.
        ("ranks -LOCAL_WORLD_SIZE", {"rank": 1, "size": 2, "knows_node": False}),
        ("open-mpi OMPI_COMM_WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=5", {"rank": 1, "size": 4, "knows_node": False}),
        # The most specific program is heard; torchrun numbers its ranks as the agents come.
        ("ranks open-mpi OMPI_COMM_WORLD_RANK=0 TORCHELASTIC_RUN_ID=none", {"rank": 1}),
        ("srun ranks", {"rank": 1, "size": 2, "port": 29500}),
        ("srun WORLD_SIZE=2 MASTER_ADDR=h", {"rank": 2, "size": 3}),
        ("srun mpich", {"rank": 1, "size": 2}),
        ("batch open-mpi", {"rank": 1, "size": 2}),
    ],
)
def test_variables_give_the_topology(words: str, place: dict[str, Any]) -> None:
    env = environment(words)
    found = environments.read(env)
    told = dataclasses.asdict(found.topology) | {"knows_node": found.knows_node}
    assert {name: told[name] for name in place} == place
    assert plan(config(), env).config.parallel.strategy == "ddp"


def test_ranks_of_one_node_have_one_endpoint() -> None:
    files = ("error.json", "/a/0/error.json", "/a/1/attempt/0/error.json")
    envs = [environment(f"ranks TORCHELASTIC_ERROR_FILE={file}") for file in files]
    assert len({environments.read(env).endpoint for env in envs}) == 1


def test_job_steps_have_ports_of_their_own() -> None:
    jobs = [f"srun SLURM_JOB_ID={job} SLURM_STEP_ID={step}" for job in range(1000, 1100) for step in range(4)]
    ports = {environments.read(environment(words)).topology.port for words in jobs}
    assert len(ports) == len(jobs)
    assert max(ports) < 32_768


def test_tasks_of_an_array_are_ranks() -> None:
    assert environments.of_array(environment("array")) == (2, 4)
    with pytest.raises(RequestError, match="such as --array=0-3 of one task each"):
        environments.of_array(environment("array SLURM_ARRAY_TASK_COUNT=3"))


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
def test_a_single_process_starts_its_own_ranks(words: str) -> None:
    assert plan(config(), environment(words)).launcher == "inline"
    assert plan(config(devices=2), environment(words)).launcher == "spawn"


_FUZZED = ("srun", "srun-one-node", "array", "ranks", "torchrun", "open-mpi", "mpich", "")


@often
@given(st.sampled_from(_FUZZED).flatmap(lambda words: drawn(environment(words))))
def test_no_environment_does_more_than_be_refused(env: dict[str, str]) -> None:
    for ask in (
        lambda: plan(config(), env),
        lambda: plan(config(launcher="environment"), env),
        lambda: environments.read(env),
        lambda: environments.of_array(env),
    ):
        with contextlib.suppress(RequestError):
            ask()

"""What srun and mpirun say through variables, read without either; tests/cluster has the real ones."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.config import RunConfig
from lockstep.errors import RequestError
from lockstep.kinds import KINDS, Kind
from lockstep.launchers import devices, dialects, environment, manual, table
from lockstep.launchers.dialects import mpi, slurm
from lockstep.options import override
from lockstep.topology import Topology

# As srun -N2 -n3 set them for its last task.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "localhost,127.0.0.[2-3]",
}
ONE_NODE = {
    **SLURM,
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3",
    "SLURM_STEP_NODELIST": "no-such-name",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ARRAY = {
    "SLURM_JOB_ID": "9",
    "SLURM_ARRAY_TASK_ID": "6",
    "SLURM_ARRAY_TASK_MIN": "2",
    "SLURM_ARRAY_TASK_MAX": "8",
    "SLURM_ARRAY_TASK_STEP": "2",
    "SLURM_ARRAY_TASK_COUNT": "4",
}


def _config(**values: Any) -> RunConfig:
    return override(RunConfig(), accelerator="cpu", **values)


def _never(config: RunConfig, world: Any) -> None:
    raise AssertionError("no rank may start")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,5],m2", ["n1", "n2", "n3", "n5", "m2"]),
        ("n[08-11]-ib", ["n08-ib", "n09-ib", "n10-ib", "n11-ib"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("a-b.c,n[7]", ["a-b.c", "n7"]),
    ],
)
def test_a_host_list_is_expanded_as_scontrol_does(text: str, names: list[str]) -> None:
    assert slurm.hosts(text) == names


@pytest.mark.parametrize("text", ["", "n[1-2", "n1,,n2", "n[a-b]", "n[]", "n]1["])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="SLURM_STEP_NODELIST"):
        slurm.hosts(text)


@pytest.mark.parametrize(("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])])
def test_tasks_per_node_are_counted(text: str, counts: list[int]) -> None:
    assert slurm.tasks_per_node(text) == counts


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
    ("env", "variable", "size"),
    [
        (SLURM, "SLURM_STEP_NUM_TASKS", 3),
        ({**SLURM, **TORCHRUN}, "WORLD_SIZE", 2),
        ({**SLURM, "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}, "SLURM_STEP_NUM_TASKS", 3),
        ({**SLURM, **OPEN_MPI}, "OMPI_COMM_WORLD_SIZE", 2),
        ({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "3"}, "SLURM_STEP_NUM_TASKS", 3),
        ({**SLURM, **MPICH}, "PMI_SIZE", 2),
        ({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "6"}, "PMI_SIZE", 6),
        ({**BATCH, **OPEN_MPI}, "OMPI_COMM_WORLD_SIZE", 2),
        (BATCH, "", 1),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, "", 1),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, "", 1),
        ({**MPICH, "PMI_SIZE": "1", "PMI_RANK": "0"}, "", 1),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}, "SLURM_STEP_NUM_TASKS", 3),
    ],
)
def test_the_most_specific_dialect_is_heard(env: dict[str, str], variable: str, size: int) -> None:
    assert dialects.ranks_told(env) == (variable, size)
    assert dialects.is_spoken(env) == (size > 1)
    assert table.resolve(_config(), env).parallel.strategy == ("ddp" if size > 1 else "single")


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        ({"devices": 4}, ONE_NODE, "--devices 4 disagrees .* where SLURM_STEP_TASKS_PER_NODE of this node is 3;"),
        ({"nodes": 3}, SLURM, "--nodes 3 disagrees .* where SLURM_STEP_NUM_NODES is 2;"),
        ({"world_size": 4, "rank": 2}, SLURM, "--world-size 4 disagrees .* where SLURM_STEP_NUM_TASKS is 3;"),
        ({"world_size": 3, "rank": 1}, SLURM, "--rank 1 disagrees .* where SLURM_PROCID is 2;"),
        ({"devices": 4}, OPEN_MPI, "--devices 4 disagrees .* where OMPI_COMM_WORLD_LOCAL_SIZE is 2;"),
        ({"world_size": 3, "rank": 1}, MPICH, "--world-size 3 disagrees .* where PMI_SIZE is 2;"),
        ({"strategy": "dp"}, SLURM, "--strategy dp is one process, but 3 ranks .* environment's SLURM_STEP_NUM_TASKS"),
        ({"launcher": "spawn", "devices": 2}, SLURM, "environment's SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=3, "),
        ({"launcher": "inline"}, MPICH, "environment's PMI_RANK=1, PMI_SIZE=2, .* has started 2 ranks"),
        ({}, {**SLURM, "WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but srun has started 3 tasks"),
        ({}, {**SLURM, "SLURM_PROCID": "3"}, "SLURM_PROCID is 3, but SLURM_STEP_NUM_TASKS is 3;"),
        (
            {},
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2"},
            "SLURM_STEP_NUM_TASKS is 3 .* SLURM_STEP_TASKS_PER_NODE is 2;",
        ),
        ({}, {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE is 'x'; Slurm writes such as"),
        ({}, {**SLURM, "SLURM_STEP_NODELIST": "no-such-name"}, "first node is no-such-name .* set MASTER_ADDR to"),
        ({}, {**SLURM, "MASTER_PORT": "0"}, "MASTER_PORT is 0; ports go from 1 to 65535"),
        ({}, {**MPICH, "PMI_RANK": "2"}, "PMI_RANK is 2, but PMI_SIZE is 2;"),
        (
            {},
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"},
            "OMPI_COMM_WORLD_SIZE is 4, but OMPI_COMM_WORLD_LOCAL_SIZE is 2: .* add -x MASTER_ADDR=<address of the "
            "first host> -x MASTER_PORT=29500 to the mpirun command",
        ),
        ({}, {**MPICH, "MPI_LOCALNRANKS": "3"}, "MPI_LOCALNRANKS is 3, but PMI_SIZE is 2"),
        ({}, BATCH, "SLURM_NTASKS is 4, but SLURM_STEP_ID is not set: .* name --launcher spawn"),
        ({}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "2"}, "SLURM_NTASKS_PER_NODE is 2, but SLURM_STEP_ID is"),
        ({}, {"SLURM_NTASKS": "2"}, "SLURM_NTASKS is 2, but SLURM_STEP_ID is not set: .* left over, unset it"),
        ({}, {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_NTASKS is 2, but SLURM_STEP_ID is not set"),
        ({}, {**STEP, "SLURM_NTASKS": "x"}, "SLURM_NTASKS is 'x'; it takes a number"),
        ({}, {**STEP, "SLURM_NTASKS": "-2"}, "SLURM_NTASKS is '-2'; it takes a number"),
        ({}, {**STEP, "SLURM_NTASKS": "1", "SLURM_PROCID": "1"}, "SLURM_PROCID is 1, but SLURM_NTASKS is 1;"),
        ({}, {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2, but OMPI_COMM_WORLD_RANK is not set;"),
        ({}, {"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK is 0, but OMPI_COMM_WORLD_SIZE is not set;"),
        ({}, {"PMI_RANK": "0", "PMI_SIZE": "x"}, "PMI_SIZE is 'x'; it takes a number"),
        ({}, {"PMI_RANK": "1", "PMI_SIZE": "1"}, "PMI_RANK is 1, but PMI_SIZE is 1;"),
        ({}, {"RANK": "1", "WORLD_SIZE": "1"}, "RANK is 1, but WORLD_SIZE is 1;"),
        (
            {},
            {**TORCHRUN, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"},
            "RANK is 1, but OMPI_COMM_WORLD_RANK is 0, and both WORLD_SIZE and OMPI_COMM_WORLD_SIZE are 2;",
        ),
        ({}, {"RANK": "1", "WORLD_SIZE": "2", **MPICH, "PMI_RANK": "0"}, "RANK is 1, but PMI_RANK is 0, and both"),
        ({}, {**OPEN_MPI, **MPICH, "PMI_RANK": "0"}, "OMPI_COMM_WORLD_RANK is 1, but PMI_RANK is 0, and both"),
        ({}, {**TORCHRUN, "LOCAL_RANK": "0"}, "LOCAL_RANK is 0 where RANK is 1;"),
        (
            {},
            {key: value for key, value in SLURM.items() if key != "SLURM_STEP_TASKS_PER_NODE"},
            "SLURM_STEP_TASKS_PER_NODE is not set, which srun sets",
        ),
    ],
)
def test_what_disagrees_is_one_sentence(options: dict[str, Any], env: dict[str, str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        table.launch(_never, _config(**options), env)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "7"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {**STEP, "SLURM_NTASKS": "1"},
        {**STEP, "SLURM_NTASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_a_process_that_is_alone_may_be_so(env: dict[str, str]) -> None:
    assert table.choose(_config(), env).name == "inline"
    assert table.choose(_config(devices=2), env).name == "spawn"


def test_where_the_ranks_of_a_host_are_not_counted_the_roll_call_finds_them() -> None:
    """What scripts for srun often export: no LOCAL_WORLD_SIZE."""
    env = {key: value for key, value in TORCHRUN.items() if key != "LOCAL_WORLD_SIZE"} | {
        "RANK": "1",
        "LOCAL_RANK": "1",
    }
    place = dialects.read(env)
    assert (place.topology.rank, place.topology.size, place.knows_node) == (1, 2, False)


def test_an_agents_own_ranks_need_not_be_those_of_who_has_started_it() -> None:
    """torchrun numbers its ranks as the agents come."""
    env = {**TORCHRUN, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    assert dialects.read(env).topology.rank == 1
    wider = {**TORCHRUN, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    assert dialects.read(wider).topology.rank == 1


@pytest.mark.parametrize("launcher", ["spawn", "inline"])
def test_a_launcher_that_is_named_is_taken_in_a_batch_script(launcher: str) -> None:
    assert table.choose(_config(launcher=launcher), BATCH).name == launcher


def test_a_job_of_one_task_starts_its_own_ranks() -> None:
    assert (
        table.choose(_config(devices=2), {**BATCH, "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}).name == "spawn"
    )


def test_more_tasks_than_gpus_are_refused() -> None:
    place = dialects.read({**ONE_NODE, "SLURM_GPUS_ON_NODE": "2"})
    asked = dataclasses.replace(_config(strategy="ddp").parallel, accelerator="cuda")
    words = "SLURM_STEP_TASKS_PER_NODE of this node is 3, but SLURM_GPUS_ON_NODE is 2: each rank needs a GPU of its own"
    with pytest.raises(RequestError, match=words):
        environment._check_node(asked, place, {"CUDA_VISIBLE_DEVICES": ""})
    enough = dialects.read({**ONE_NODE, "SLURM_GPUS_ON_NODE": "3"})
    environment._check_node(asked, enough, {"CUDA_VISIBLE_DEVICES": ""})


def test_two_tasks_a_node_are_refused_where_one_drives_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "whole", Kind("x", "X", "drives a node", has_ranks=True, drives_all=True))
    words = "--strategy whole drives all devices of a node in one process, but SLURM_STEP_TASKS_PER_NODE .* is 3"
    with pytest.raises(RequestError, match=words):
        table.launch(_never, _config(strategy="whole"), ONE_NODE)


def test_an_array_says_ranks_once_there_is_a_place_to_meet() -> None:
    meeting = _config(init_method="file:///shared/x")
    assert table.choose(meeting, ARRAY).name == "manual"
    assert table.resolve(meeting, ARRAY).parallel.strategy == "ddp"
    assert manual._who(meeting.parallel, ARRAY) == (2, 4)
    assert manual._who(_config(init_method="tcp://h:1", rank=0, world_size=2).parallel, ARRAY) == (0, 2)
    # By itself an array is as many runs.
    assert table.choose(_config(), ARRAY).name == "inline"


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        ({"world_size": 3}, ARRAY, "--world-size 3 disagrees with the array job, where SLURM_ARRAY_TASK_COUNT=4"),
        ({}, {**ARRAY, "SLURM_ARRAY_TASK_COUNT": "3"}, "SLURM_ARRAY_TASK_COUNT is 3, but indices from"),
        ({}, {**ARRAY, "SLURM_ARRAY_TASK_ID": "5"}, "SLURM_ARRAY_TASK_ID is 5, which is none of .* do not follow"),
        ({}, {**ARRAY, "SLURM_ARRAY_TASK_ID": "10"}, "SLURM_ARRAY_TASK_ID is 10, which is none of"),
        ({}, {**ARRAY, **SLURM}, "SLURM_ARRAY_TASK_COUNT is 4, and srun has started 3 tasks"),
    ],
)
def test_an_array_whose_ranks_do_not_follow_is_refused(
    options: dict[str, Any], env: dict[str, str], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        table.launch(_never, _config(init_method="file:///shared/x", **options), env)


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
    environment._check_agrees(_config(nodes=3, devices=4, strategy="ddp").parallel, place)


def test_the_least_number_of_ranks_is_what_is_told() -> None:
    assert devices.least_ranks(table.resolve(_config(), SLURM), SLURM) == 3

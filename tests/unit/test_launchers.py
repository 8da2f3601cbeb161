"""Which launcher, which devices, which words: decided without torch and without starting anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep import failures, hardware
from lockstep.config import RunConfig, override
from lockstep.errors import ProofError, RequestError, RunError, Stopped
from lockstep.hardware import Gpu
from lockstep.launchers import claims, devices, environment, table
from lockstep.topology import Topology

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "job",
}


def _config(**values: Any) -> RunConfig:
    return override(RunConfig(), accelerator="cpu", **values)


def test_a_launcher_is_chosen_without_torch() -> None:
    code = (
        "import sys; from lockstep.config import RunConfig; from lockstep.launchers import table; "
        "table.choose(RunConfig(), {}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "env", "launcher", "strategy"),
    [
        ({}, {}, "inline", "single"),
        ({"devices": 3}, {}, "spawn", "ddp"),
        ({"devices": 3, "strategy": "dp"}, {}, "inline", "dp"),
        ({"devices": 1, "strategy": "ddp"}, {}, "inline", "ddp"),
        ({}, TORCHRUN, "environment", "ddp"),
        ({"init_method": "env://"}, TORCHRUN, "environment", "ddp"),
        ({"world_size": 4}, TORCHRUN, "environment", "ddp"),
        ({"init_method": "tcp://h:1", "rank": 0, "world_size": 2}, TORCHRUN, "manual", "ddp"),
        ({"init_method": "file:///x", "rank": 0, "world_size": 2}, {}, "manual", "ddp"),
        ({"launcher": "spawn"}, {}, "spawn", "single"),
    ],
)
def test_auto_finds_the_launcher_and_the_strategy(
    options: dict[str, Any], env: dict[str, str], launcher: str, strategy: str
) -> None:
    resolved = table.resolve(_config(**options), env)
    choice = table.choose(resolved, env)
    assert (choice.name, choice.launcher.name, resolved.parallel.strategy) == (launcher, launcher, strategy)
    assert choice.why
    assert table.resolve(resolved, env) == resolved


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        ({"launcher": "spwan"}, {}, "did you mean spawn"),
        ({"nodes": 2}, {}, "torchrun --nnodes 2"),
        ({"strategy": "single", "devices": 2}, {}, "uses one device, but 2"),
        ({"strategy": "dp", "nodes": 2}, {}, "--strategy dp is one process, but 2 ranks"),
        ({"strategy": "dp"}, TORCHRUN, "--strategy dp is one process, but 4 ranks"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], env: dict[str, str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        table.choose(_config(**options), env)


@pytest.mark.skipif(bool(hardware.gpus(None)), reason="says what a machine without a GPU says")
@pytest.mark.parametrize("options", [{"accelerator": "cuda"}, {"gpus": "0"}])
def test_a_gpu_that_is_not_there_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="this machine shows no GPU"):
        table.resolve(override(RunConfig(), **options), {})


def _never(config: RunConfig, world: Any) -> None:
    raise AssertionError("no rank may start")


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        ({"launcher": "inline", "devices": 2}, {}, "--launcher inline is one process, but --strategy ddp needs 2"),
        ({"launcher": "spawn", "nodes": 2}, {}, "starts processes on this host alone"),
        ({"launcher": "environment"}, {}, "RANK and WORLD_SIZE are not set"),
        ({"launcher": "manual"}, {}, "needs --rank"),
        ({"world_size": 2, "rank": 0}, {}, "need --init-method"),
        ({"world_size": 2, "init_method": "tcp://h:1"}, {}, "needs --rank"),
        ({"world_size": 2, "rank": 0, "init_method": "tcp://h"}, {}, "an address and a port"),
        ({"world_size": 2, "rank": 0, "init_method": "tcp://h:99999"}, {}, "an address and a port"),
        ({"world_size": 2, "rank": 0, "init_method": "file://x"}, {}, "three slashes"),
        ({"world_size": 2, "rank": 0, "init_method": "udp://h:1"}, {}, "no meeting place that is known"),
        ({"world_size": 2, "rank": 0, "init_method": "env://"}, {}, "needs MASTER_ADDR"),
        ({}, {"RANK": "0"}, "WORLD_SIZE is not set"),
        ({}, {"WORLD_SIZE": "2"}, "RANK is not set"),
        ({}, {"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({}, {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({}, {"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({}, {**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
        ({"devices": 3}, TORCHRUN, "--devices 3 disagrees .* LOCAL_WORLD_SIZE is 2"),
        ({"nodes": 3}, TORCHRUN, "--nodes 3 disagrees .* is 2"),
        ({"world_size": 3}, TORCHRUN, "--world-size 3 disagrees .* WORLD_SIZE is 4"),
    ],
)
def test_a_launch_that_cannot_be_is_one_sentence(options: dict[str, Any], env: dict[str, str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        table.launch(_never, _config(**options), env)


def test_an_entry_that_other_processes_cannot_find_is_refused() -> None:
    with pytest.raises(RequestError, match="top level of a module"):
        table.launch(lambda config, world: None, _config(devices=2), {})


def test_torchruns_variables_say_the_place() -> None:
    place = environment.read(TORCHRUN)
    assert place.topology == Topology(
        rank=3, size=4, local_rank=1, local_size=2, node=1, nodes=2, address="10.0.0.1", port=29500
    )
    assert place.store_is_served
    assert place.attempt == "job/2"


def test_gpus_are_chosen_as_cuda_reads_its_variable() -> None:
    a, b, c = (Gpu(name, f"GPU-{name}", 1) for name in ("a1", "a2", "b1"))
    found = [a, b, c]
    assert hardware.select(found, None) == (a, b, c)
    assert hardware.select(found, "2,0") == (c, a)
    assert hardware.select(found, "GPU-b, 1") == (c, b)
    assert hardware.select(found, "0,7,1") == (a,)
    assert hardware.select(found, "0,-1,1") == (a,)
    assert hardware.select(found, "GPU-a") == ()
    assert hardware.select(found, "") == ()


def test_the_survey_agrees_with_the_machine() -> None:
    found = hardware.survey(None)
    assert found.cpus == len(psutil.Process().cpu_affinity() or [0])
    assert found.memory_bytes == psutil.virtual_memory().total
    assert found.cpu_name
    assert found.gpus == hardware.gpus(None)


def test_a_rank_takes_its_own_gpu() -> None:
    several = override(RunConfig(), gpus="4,6").parallel
    assert [devices.gpu_index(several, local_rank) for local_rank in (0, 1)] == [4, 6]
    assert devices.gpu_index(override(RunConfig(), gpus="5").parallel, 1) == 5
    assert devices.gpu_index(RunConfig().parallel, 1) == 1


def _claim(rank: int, size: int, host: str, **values: Any) -> claims.Claim:
    return claims.Claim(rank=rank, size=size, host=host, **{"accelerator": "cpu", **values})


def test_nodes_and_local_ranks_follow_from_the_hosts() -> None:
    came = [_claim(rank, 4, host) for rank, host in enumerate(["a", "b", "a", "a"])]
    places = [claims.place(came, claim) for claim in came]
    assert [(place.node, place.local_rank, place.local_size) for place in places] == [
        (0, 0, 3),
        (1, 0, 1),
        (0, 1, 3),
        (0, 2, 3),
    ]
    assert {place.nodes for place in places} == {2}


def test_a_failure_names_rank_line_and_reason(tmp_path: Path) -> None:
    try:
        subprocess.run(["true"], timeout="soon")  # type: ignore[call-overload]  # raises within the library
    except TypeError as error:
        line = error.__traceback__.tb_lineno if error.__traceback__ else 0
        failure = failures.describe(error, 3)
    assert failure.sentence.startswith(f"Rank 3 failed at {__file__}:{line}: TypeError: ")
    path = failures.write(failure, tmp_path / "failures")
    assert path.name == "rank_3.txt"
    assert "Traceback" in path.read_text()


@pytest.mark.parametrize("error", [RequestError("No."), ProofError("Differs."), Stopped("Later."), RunError("Broke.")])
def test_our_own_errors_keep_class_and_sentence(error: Exception) -> None:
    again = failures.describe(error, 1).error()
    assert (type(again), str(again)) == (type(error), str(error))


def test_the_first_cause_is_not_the_loudest() -> None:
    echo = failures.describe(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), 0)
    cause = failures.describe(ValueError("bad label"), 1)
    assert echo.is_echo
    assert not cause.is_echo
    assert failures.first_cause([echo, cause]) is cause


@pytest.mark.parametrize(
    ("options", "gpus", "answer"),
    [
        ({}, 0, "cpu"),
        ({}, 2, "cuda"),
        ({"accelerator": "cpu", "devices": 4}, 0, "cpu"),
        ({"devices": 2}, 2, "cuda"),
        ({"devices": 3}, 2, "--devices 3: this machine shows 2 GPUs; ask for at most that many"),
        ({"gpus": "0,2"}, 2, "--gpus 0,2: there is no GPU 2; this machine shows 2 GPUs, with indices 0 to 1."),
        ({"gpus": "1"}, 1, "there is no GPU 1; this machine shows 1 GPU"),
    ],
)
def test_devices_are_checked_against_what_there_is(options: dict[str, Any], gpus: int, answer: str) -> None:
    parallel = override(RunConfig(), **options).parallel
    try:
        told = devices._accelerator(parallel, gpus)
    except RequestError as error:
        told = str(error)
    assert answer in told

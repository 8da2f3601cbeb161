"""Which launcher, which devices, which words: decided without torch and without starting anything."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from lockstep import failures, hardware
from lockstep.config import RunConfig
from lockstep.errors import ProofError, RequestError, RunError, Stopped
from lockstep.hardware import Gpu
from lockstep.launchers import claims, devices, processes, rank, reports, table
from lockstep.options import override

from ..command import until
from ..environments import environment

TORCHRUN = environment("torchrun")


def _config(**values: Any) -> RunConfig:
    return override(RunConfig(), accelerator="cpu", **values)


def test_a_rank_that_was_killed_is_told_by_its_signal() -> None:
    told = [reports.obituary(1, -number, "again").sentence for number in (9, 40)]
    assert told == ["Rank 1 was killed by SIGKILL (out of memory?); again.", "Rank 1 was killed by signal 40; again."]


@pytest.mark.parametrize(
    ("options", "env", "launcher", "strategy"),
    [
        ({}, {}, "inline", "single"),
        ({"devices": 3}, {}, "spawn", "ddp"),
        ({"devices": 3, "strategy": "dp"}, {}, "inline", "dp"),
        ({"devices": 1, "strategy": "ddp"}, {}, "inline", "ddp"),
        ({}, TORCHRUN, "environment", "ddp"),
        ({"world_size": 4}, TORCHRUN, "environment", "ddp"),
        ({"init_method": "tcp://h:1", "rank": 0, "world_size": 2}, TORCHRUN, "manual", "ddp"),
        ({"init_method": "file:///x", "rank": 0, "world_size": 2}, {}, "manual", "ddp"),
        ({"launcher": "spawn"}, {}, "spawn", "single"),
        ({"devices": 2}, {"RANK": "0", "WORLD_SIZE": "1"}, "spawn", "ddp"),
        ({}, {"RANK": "0", "WORLD_SIZE": "1"}, "inline", "single"),
    ],
)
def test_auto_finds_the_launcher_and_the_strategy(
    options: dict[str, Any], env: dict[str, str], launcher: str, strategy: str
) -> None:
    resolved = table.resolve(_config(**options), env)
    assert (table.choose(resolved, env).name, resolved.parallel.strategy) == (launcher, strategy)
    assert table.resolve(resolved, env) == resolved


def test_an_entry_that_other_processes_cannot_find_is_refused() -> None:
    with pytest.raises(RequestError, match="top level of a module"):
        table.launch(lambda config, world: None, _config(devices=2), {})


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


class _Driver:
    """Answers as a driver whose GPU 1 is lost and GPU 2 divided, with memory that only GPU 0 tells of."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetCount": lambda: 3,
            "nvmlDeviceGetHandleByIndex": self._handle,
            "nvmlDeviceGetName": lambda handle: "H200",
            "nvmlDeviceGetUUID": lambda handle: str(handle),
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._part,
            "nvmlDeviceGetGpuInstanceId": lambda part: 5,
            "nvmlDeviceGetComputeInstanceId": lambda part: 0,
        }
        for name, answer in answers.items():
            patch.setattr(pynvml, name, answer)

    def _handle(self, index: int) -> str:
        if index == 1:
            raise pynvml.NVMLError_GpuIsLost
        return f"GPU-{index}"

    def _memory(self, handle: str) -> SimpleNamespace:
        if handle != "GPU-0":
            raise pynvml.NVMLError_NotSupported
        return SimpleNamespace(total=7)

    def _part(self, handle: str, index: int) -> str:
        if (handle, index) != ("GPU-2", 0):
            raise pynvml.NVMLError_NotFound
        return "MIG-abc"


def test_gpus_that_do_not_answer_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _Driver(monkeypatch)
    whole = hardware.memory_bytes()
    assert hardware.gpus(None) == (Gpu("H200", "GPU-0", 7), Gpu("H200", "GPU-2", whole))
    assert hardware.survey("").driver == "580.1"

    def broken() -> int:
        raise pynvml.NVMLError_Unknown

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", broken)
    assert (hardware.survey(None).gpus, hardware.survey(None).driver) == ((), "")


@pytest.mark.parametrize("visible", ["MIG-abc", "MIG-GPU-2/5/0", "MIG-abc,0"])
def test_a_part_of_a_gpu_is_a_gpu(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _Driver(monkeypatch)
    assert [gpu.uuid for gpu in hardware.gpus(visible)] == ["MIG-abc"]
    assert hardware.gpus("MIG-none") == ()


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Gpu("H200", f"GPU-{index}", 1) for index in range(8)]
    monkeypatch.setattr(hardware, "gpus", lambda visible: hardware.select(found, visible))


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("gpus", "visible", "taken"),
    [
        ("", [None, None], [("GPU-0", 0), ("GPU-1", 1)]),
        ("4,6", [None, None], [("GPU-4", 4), ("GPU-6", 6)]),
        ("1,0", ["4,6", "4,6"], [("GPU-6", 1), ("GPU-4", 0)]),
        ("", ["4,6", "4,6"], [("GPU-4", 0), ("GPU-6", 1)]),
        ("", ["0", "1"], [("GPU-0", 0), ("GPU-1", 0)]),  # one bound to each rank, so that each has index 0
        ("", ["GPU-5", "GPU-3"], [("GPU-5", 0), ("GPU-3", 0)]),
    ],
)
def test_a_rank_takes_the_gpu_that_its_claim_names(
    gpus: str, visible: list[str | None], taken: list[tuple[str, int]]
) -> None:
    parallel = override(RunConfig(), gpus=gpus, accelerator="cuda").parallel
    envs = [{} if value is None else {"CUDA_VISIBLE_DEVICES": value} for value in visible]
    indices = [devices.gpu_index(parallel, env, local_rank) for local_rank, env in enumerate(envs)]
    assert [
        (hardware.gpus(env.get("CUDA_VISIBLE_DEVICES"))[i].uuid, i) for env, i in zip(envs, indices, strict=True)
    ] == taken
    claims.check_together(
        [_claim(rank, 2, "a", accelerator="cuda", gpus=devices.gpu_ids(parallel, env)) for rank, env in enumerate(envs)]
    )


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ([{"gpus": "4,6"}, {"gpus": "1,0"}], [["GPU-4", "GPU-6"], ["GPU-1", "GPU-0"]]),
        ([{"devices": 2}, {"gpus": "7,2"}], [["GPU-0", "GPU-1"], ["GPU-7", "GPU-2"]]),
        ([{"devices": 2}, {"devices": 2}], None),
        ([{}, {"gpus": "7"}], None),  # the first takes all eight
    ],
)
def test_a_rank_that_drives_several_gpus_takes_all_its_own(
    options: list[dict[str, Any]], taken: list[list[str]] | None
) -> None:
    came = []
    for rank_, own in enumerate(options):
        parallel = devices.resolve(override(RunConfig(), strategy="hybrid", nodes=2, **own), {}).parallel
        ids = devices.gpu_ids(parallel, {})
        assert devices.processes(override(RunConfig(), strategy="hybrid", **own), {}) == 1
        assert hardware.gpus(None)[devices.gpu_index(parallel, {}, rank_)].uuid == ids[0]
        came.append(_claim(rank_, 2, "a", accelerator="cuda", gpus=ids, drives_all=devices.drives_all(parallel)))
    if taken is None:
        with pytest.raises(RequestError, match=r"Ranks 0 and 1 on a would share one GPU .GPU-[07].; give each"):
            claims.check_together(came)
        return
    assert [list(claim.gpus) for claim in came] == taken
    claims.check_together(came)
    claims.check_together([came[0], dataclasses.replace(came[0], rank=1, host="b", boot="b")])  # each on its own node


def test_traffic_is_kept_on_one_interface_by_its_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", env := {"NCCL_SOCKET_IFNAME": "ib"})
    with rank.bound_to(None):
        assert env == {"NCCL_SOCKET_IFNAME": "ib"}
    with rank.bound_to("eth1"):
        assert env == {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "eth1"}
    assert env == {"NCCL_SOCKET_IFNAME": "ib"}
    env.clear()
    with rank.bound_to("eth1"):
        assert env == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert env == {}


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


def test_who_lives_is_not_dead_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["sleep", "60"])
    came = _claim(0, 1, "a", pid=process.pid, begun=processes.begun(process.pid))
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: 1.0)
    assert came.is_dead() is False
    assert dataclasses.replace(came, begun="1").is_dead() is True  # another one that has its number now
    process.kill()
    until(lambda: came.is_dead() is True)  # a zombie
    process.wait()
    assert came.is_dead() is True


@pytest.mark.parametrize(
    ("processors", "shares"),
    [
        ([(0, 1, 2, 3)] * 3, [3, 3, 3]),
        ([(0, 1), (2, 3), (4, 5)], [1, 1, 1]),  # bound by numactl or a scheduler
        ([(0, 1), (0, 1), (2, 3)], [2, 2, 1]),
    ],
)
def test_processors_are_divided_among_those_who_share_them(
    processors: list[tuple[int, ...]], shares: list[int]
) -> None:
    came = [_claim(rank, 3, "a", processors=own) for rank, own in enumerate(processors)]
    assert [claims.sharing(came, mine) for mine in came] == shares
    elsewhere = _claim(3, 4, "b", boot="another", processors=processors[0])
    assert claims.sharing([*came, elsewhere], elsewhere) == 1
    assert claims.Claim.from_json(elsewhere.to_json()) == elsewhere


@pytest.mark.parametrize(
    ("inner", "outer", "left"),
    [("max 100000", "max 100000", float("inf")), ("150000 100000", "max 100000", 1.5), ("max 1000", "2000 1000", 2)],
)
def test_a_containers_quota_is_read(inner: str, outer: str, left: float, tmp_path: Path) -> None:
    (tmp_path / "pod" / "run").mkdir(parents=True)
    (tmp_path / "pod" / "cpu.max").write_text(f"{outer}\n")
    (tmp_path / "pod" / "run" / "cpu.max").write_text(f"{inner}\n")
    own = tmp_path / "own"
    own.write_text("0::/pod/run\n")
    assert hardware.quota(own, tmp_path) == left
    assert hardware.quota(tmp_path / "none", tmp_path) == float("inf")


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


class DistNetworkError(RuntimeError):
    """Named as torch's, which is not imported here."""


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (f"{GLOO}pair.cc:561] Connection closed by peer [10.0.0.7]:4711. This is", "closed by peer at 10.0.0.7"),
        (f"{GLOO}pair.cc:541] Read error [10.0.0.7]:4711: Connection reset by peer", "reset by peer at 10.0.0.7"),
        ("Failed to recv, got 0 bytes. Connection was likely closed. Did\nException from f", "was likely closed"),
        (f"{GLOO}unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation", "waited 600 s (--stall"),
    ],
)
def test_a_lost_rank_is_told_in_plain_words_without_a_trace(said: str, told: str) -> None:
    error = RuntimeError(said) if GLOO in said else DistNetworkError(said)
    failure = failures.describe(error, 2)
    assert failure.is_echo
    assert said in failure.trace  # which goes to the file
    again = failure.error()
    assert isinstance(again, RunError)
    assert again.trace == ""
    for words in ("Rank 2", "collective", told, "continue with --resume auto"):
        assert words in str(again)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the database timed out"),
        RuntimeError(f"{GLOO}pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"),
        DistNetworkError("The server socket has failed to listen"),
        ConnectionResetError("Connection reset by peer"),
    ],
)
def test_what_only_looks_like_a_lost_rank_keeps_its_trace(error: Exception) -> None:
    failure = failures.describe(error, 2)
    told = failure.error()
    assert not failure.is_echo
    assert isinstance(told, RunError)
    assert str(error) in told.trace


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

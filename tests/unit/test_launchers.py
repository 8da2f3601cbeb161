"""Which launcher, which devices, which words: decided without torch and without starting anything."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from lockstep import hardware
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError, RunError
from lockstep.hardware import Gpu
from lockstep.launchers import devices, rollcall
from lockstep.launchers.plan import plan
from lockstep.launchers.start import launch
from lockstep.launchers.supervisor import Supervisor
from lockstep.monitor import failures

from ..environments import environment
from ..starting import config, member_of

MEETING = {"rank": 0, "world_size": 2}


@pytest.mark.parametrize(
    ("options", "env", "launcher", "strategy"),
    [
        ({}, "", "inline", "single"),
        ({}, "RANK=0 WORLD_SIZE=1", "inline", "single"),
        ({"devices": 3}, "", "spawn", "ddp"),
        ({"devices": 3}, "RANK=0 WORLD_SIZE=1", "spawn", "ddp"),
        ({"devices": 3, "strategy": "dp"}, "", "inline", "dp"),
        ({"devices": 1, "strategy": "ddp"}, "", "inline", "ddp"),
        ({"world_size": 4}, "torchrun", "environment", "ddp"),
        (MEETING | {"init_method": "tcp://h:1"}, "torchrun", "manual", "ddp"),
        (MEETING | {"init_method": "file:///x"}, "", "manual", "ddp"),
    ],
)
def test_auto_finds_the_launcher_and_the_strategy(
    options: dict[str, Any], env: str, launcher: str, strategy: str
) -> None:
    planned = plan(config(**options), environment(env))
    assert (planned.launcher, planned.config.parallel.strategy) == (launcher, strategy)


def test_an_entry_that_cannot_reach_other_processes_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(RequestError, match=r"cannot be (sent to|run in) other processes"):
        launch(lambda config, world: lock, config(devices=2), {})


def known(answers: dict[tuple[Any, ...], Any]) -> Callable[..., Any]:
    """Return a function of the driver's that answers these arguments alone."""

    def asked(*given: Any) -> Any:
        if given not in answers:
            raise pynvml.NVMLError_NotFound
        return answers[given]

    return asked


def test_gpus_are_those_that_answer_and_that_cudas_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {  # of a driver whose GPU 1 is lost and GPU 2 divided
        "nvmlInit": known({(): None}),
        "nvmlShutdown": known({(): None}),
        "nvmlSystemGetDriverVersion": known({(): "580.1"}),
        "nvmlDeviceGetCount": known({(): 3}),
        "nvmlDeviceGetHandleByIndex": known({(0,): "GPU-a", (2,): "GPU-b"}),
        "nvmlDeviceGetName": lambda handle: "H200",
        "nvmlDeviceGetUUID": str,
        "nvmlDeviceGetMemoryInfo": known({("GPU-a",): SimpleNamespace(total=7)}),
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": known({("GPU-b", 0): "MIG-c"}),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    assert hardware.gpus(None) == (Gpu("H200", "MIG-c", hardware.memory_bytes()),)  # as CUDA, and no other one
    assert hardware.gpus("0") == (Gpu("H200", "GPU-a", 7),)
    for visible, names in {
        "": [],
        "1,0": ["MIG-c"],
        "GPU-b, 0": ["MIG-c"],
        "0,-1,1": ["GPU-a"],  # up to the first one that is not there
        "GPU-": [],  # which may be either
        "MIG-c,0": ["MIG-c"],
        "MIG-none": [],
    }.items():
        assert [gpu.uuid for gpu in hardware.gpus(visible)] == names, visible
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxMigDeviceCount", lambda handle: 0)
    assert hardware.gpus(None) == (Gpu("H200", "GPU-a", 7), Gpu("H200", "GPU-b", hardware.memory_bytes()))
    assert [gpu.uuid for gpu in hardware.gpus("GPU-b, 0")] == ["GPU-b", "GPU-a"]


@pytest.fixture
def shows(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have this machine show so many GPUs."""

    def show(count: int) -> None:
        found = [Gpu("H200", f"GPU-{index}", 1) for index in range(count)]
        monkeypatch.setattr(hardware, "gpus", lambda visible: hardware.select(found, visible))

    return show


def test_devices_are_checked_against_what_there_is(shows: Callable[[int], None]) -> None:
    shows(0)
    assert plan(RunConfig(), {}).config.parallel.accelerator == "cpu"
    shows(2)
    assert plan(override(RunConfig(), devices=2), {}).config.parallel.accelerator == "cuda"
    with pytest.raises(RequestError, match="--devices 3: this machine shows 2 GPUs"):
        plan(override(RunConfig(), devices=3), {})
    with pytest.raises(RequestError, match="--gpus 0,2: there is no GPU 2; this machine shows 2 GPUs"):
        plan(override(RunConfig(), gpus="0,2"), {})


@pytest.mark.parametrize(
    ("strategy", "ranks", "taken"),
    [
        ("ddp", [("", None)] * 2, ["GPU-0", "GPU-1"]),
        ("ddp", [("4,6", None)] * 2, ["GPU-4", "GPU-6"]),
        ("ddp", [("1,0", "4,6")] * 2, ["GPU-6", "GPU-4"]),
        ("ddp", [("", "GPU-5"), ("", "3")], ["GPU-5", "GPU-3"]),  # one bound to each rank, so that each has index 0
        ("hybrid", [("4,6", None), ("1,0", None)], ["GPU-4 GPU-6", "GPU-1 GPU-0"]),
        ("hybrid", [("6", None), ("", "6")], []),
    ],
)
def test_each_rank_takes_gpus_of_its_own(
    strategy: str, ranks: list[tuple[str, str | None]], taken: list[str], shows: Callable[[int], None]
) -> None:
    shows(8)
    found, came = [], []
    for rank, (gpus, visible) in enumerate(ranks):
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        asked = override(RunConfig(), strategy=strategy, gpus=gpus, nodes=2, init_method="tcp://h:1")
        parallel = plan(asked, env).config.parallel
        ids, drives_all = devices.gpu_ids(parallel, env), parallel.drives_all
        own = devices.of_rank(ids, rank, drives_all=drives_all)
        assert hardware.gpus(visible)[devices.gpu_index(parallel, env, rank)].uuid == own[0]
        found.append(" ".join(own))
        came.append(member_of(rank, 2, accelerator="cuda", gpus=ids, drives_all=drives_all))
    if not taken:
        with pytest.raises(RequestError, match=r"Ranks 0 and 1 on .* would share one GPU .GPU-6.; give each"):
            rollcall.check_together(came)
        came[1] = dataclasses.replace(came[1], host="b", boot="b")
    else:
        assert found == taken
    rollcall.check_together(came)


def test_nodes_and_local_ranks_follow_from_the_hosts() -> None:
    came = [member_of(rank, 4, host=host) for rank, host in enumerate("abaa")]
    places = [rollcall.place(came, member) for member in came]
    assert [(place.node, place.local_rank, place.local_size) for place in places] == [
        *((0, 0, 3), (1, 0, 1), (0, 1, 3), (0, 2, 3))
    ]
    assert {place.nodes for place in places} == {2}


def test_processors_are_divided_among_those_who_share_them() -> None:
    came = [member_of(rank, 4, processors=bound) for rank, bound in enumerate([(0, 1), (0, 1), (2, 3)])]
    came.append(member_of(3, 4, boot="another", processors=(0, 1)))
    assert [rollcall.sharing(came, mine) for mine in came] == [2, 2, 1, 1]


def test_a_containers_quota_is_read(tmp_path: Path) -> None:
    (tmp_path / "pod" / "run").mkdir(parents=True)
    (tmp_path / "own").write_text("0::/pod/run\n")
    for inner, outer, left in (
        ("max 100000", "max 100000", float("inf")),
        ("150000 100000", "max 100000", 1.5),
        ("max 1000", "2000 1000", 2),
    ):
        (tmp_path / "pod" / "cpu.max").write_text(f"{outer}\n")
        (tmp_path / "pod" / "run" / "cpu.max").write_text(f"{inner}\n")
        assert hardware.quota(tmp_path / "own", tmp_path) == left


class DistNetworkError(RuntimeError):
    """Named as torch's, which is not imported here."""


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


def test_the_first_cause_is_not_the_loudest() -> None:
    echo = failures.describe(RuntimeError(f"{GLOO}pair.cc:534] Connection closed by peer"), 0)
    cause = failures.describe(ValueError("bad label"), 1)
    assert failures.first_cause([echo, cause]) is cause


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError(f"{GLOO}pair.cc:561] Connection closed by peer [10.0.0.7]:4711. "), "closed by peer at 10.0.0.7"),
        (RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 600000ms for recv"), "Timed out"),
        (RuntimeError("NCCL error: remote process exited or there was a network error, NCCL version 2.28.9"), "exited"),
        (RuntimeError("NCCL Error 6: remote process exited or there was a network error"), "remote process exited"),
        (
            RuntimeError("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600001 ms"),
            "ran for 600001 ms",
        ),
        (RuntimeError("NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"), ""),
        (DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did\nEx"), "was likely closed"),
        (RuntimeError("the database timed out"), ""),
    ],
)
def test_a_lost_rank_is_told_in_plain_words_and_no_other_failure_is(error: Exception, told: str) -> None:
    failure = failures.describe(error, 2)
    again = failure.error()
    assert isinstance(again, RunError)
    assert str(error) in failure.trace  # which goes to the file
    assert again.trace == ("" if told else failure.trace)
    for words in ("Rank 2", "collective", told, "continue with --resume auto") if told else ():
        assert words in str(again)


def test_an_operation_without_a_deterministic_kind_is_refused_by_its_name() -> None:
    text = "kthvalue CUDA does not have a deterministic implementation, but you set 'torch.use_deterministic_algorith"
    error = failures.describe(RuntimeError(text), 1).error()
    assert error.exit_code == 2
    assert str(error).startswith("Rank 1 failed: kthvalue CUDA has no deterministic implementation on this device")


def test_a_kernel_that_has_failed_is_a_cause_and_a_rank_left_alone_an_echo(tmp_path: Path) -> None:
    supervisor, path = Supervisor(override(RunConfig(), accelerator="cuda")), tmp_path / "output" / "rank_1.txt"
    path.parent.mkdir()
    path.write_text("CUDA error: out of memory\n")  # of an earlier start
    supervisor.notes["folder"], supervisor._sizes = str(tmp_path), {1: path.stat().st_size}
    aborted: Any = SimpleNamespace(process=SimpleNamespace(exitcode=-signal.SIGABRT), rank=1)
    assert supervisor._death(aborted).is_echo
    with path.open("a") as file:
        file.write("x" * (65 << 20))  # a script may print without end
        file.write("terminate called\n  what():  CUDA error: device-side assert triggered\nframe #0: c10::Error\n")
    cause = supervisor._death(aborted)
    assert not cause.is_echo
    assert "was killed by SIGABRT" in cause.sentence
    assert "CUDA error: device-side assert triggered; continue with" in cause.sentence


FAULTS = """import os, resource, sys; import numpy as np; from lockstep import hardware
if "keep" in sys.argv: hardware.keep_freed_memory(os.environ)
if "return" in sys.argv: hardware.return_freed_memory()
def step(): [np.ones(2**20) for _ in range(3)]
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"""


def test_memory_that_a_step_frees_is_there_for_the_next_one() -> None:
    def faults(*words: str, **env: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, *words], env=os.environ | env, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults("keep") < 1000
    assert faults("keep", MALLOC_MMAP_THRESHOLD_="1000000") > 10_000, "the user's own settings stay"
    assert faults() > 1000
    assert faults("keep", "return") > 10_000


def test_a_failure_that_is_written_again_is_whole_at_each_moment(tmp_path: Path) -> None:
    failures.write(failures.Failure(1, "", "words", "trace"), tmp_path)
    with (tmp_path / "rank_1.txt").open() as reader:
        failures.write(failures.Failure(1, "", "words", "a longer trace"), tmp_path)
        assert reader.read() == "words\n\ntrace"


def test_an_echo_leaves_the_cause_of_an_earlier_start(tmp_path: Path) -> None:
    path = tmp_path / "rank_1.txt"
    for kind in ("cause", "echo", "cause again", "echo"):
        failures.write(failures.Failure(1, "", kind, "", is_echo=kind == "echo"), tmp_path)
    assert path.read_text().startswith("cause again\n")
    path.unlink()
    for kind, first in (("echo", "echo"), ("echo again", "echo"), ("cause", "cause")):
        failures.write(failures.Failure(1, "", kind, "", is_echo="echo" in kind), tmp_path)
        assert path.read_text().startswith(f"{first}\n")

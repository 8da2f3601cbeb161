"""What `lockstep doctor` makes of what it finds: each fault is told with its fix, and what is fine is left in peace."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from lockstep.cli.symptoms import show
from lockstep.doctor import collectives, devices, disk, host, network, ports, software
from lockstep.doctor.board import Board
from lockstep.doctor.bounded import look
from lockstep.doctor.collectives import Carrier, Measured
from lockstep.doctor.finding import GREEN, RED, YELLOW, Finding, Subject, merged, verdict
from lockstep.doctor.nvml import GpuState
from lockstep.errors import RunError

MIB, GIB = 2**20, 2**30
ALONE = host.Sharers(local_size=1, size=1, on_cpu=True)
MANY = host.Sharers(local_size=5, size=512, on_cpu=True)
GPU = GpuState(0, "GPU-0", "H100", 80 * GIB, 79 * GIB)
VERSIONS = dict.fromkeys(("lockstep", "python", "CUDA", "NCCL", "torchvision", "driver"), "1") | {"torch": "2.12.0"}
ROOM = Path("/x")
DOORS = {rank: ports.Door(f"10.0.0.{rank}", 4000, "") for rank in range(2)}


def _torches(*versions: str) -> Iterable[Finding]:
    return software.judge({rank: VERSIONS | {"torch": each} for rank, each in enumerate(versions)}, "2.11")


def _gpu(**changed: object) -> Iterable[Finding]:
    return devices.gpus([GpuState(**{**vars(GPU), **changed})])


def _unusable(build: str, driver: str) -> Iterable[Finding] | Finding:
    return devices.judge_unusable(2, "2.12.0", build, driver, chosen_cpu=False)


def _reduced(carrier: Carrier) -> Finding:
    """Return what is told of the largest of two ranks' all-reduces."""
    rows = {rank: [Measured(8, 1e-4, 0), Measured(64 * MIB, 0.1, 0)] for rank in range(2)}
    return list(collectives.judge(rows, carrier, ["a", "b"]))[-1]


JUDGED: list[tuple[Callable[[], Finding | Iterable[Finding]], str, str]] = [
    (lambda: _torches("2.12.0", "2.12.0"), GREEN, "torch 2.12.0"),
    (lambda: _torches("2.12.0", "2.11.0"), RED, "torch & 2.12.0 on rank 0 & 2.11.0 on rank 1"),
    (lambda: _torches("2.9.1"), RED, "pip install 'torch>=2.11'"),
    (lambda: host.judge_shared_memory(GIB, GIB, ALONE), GREEN, ""),
    (lambda: host.judge_shared_memory(64 * MIB, 64 * MIB, ALONE), YELLOW, "--shm-size=1g"),
    (lambda: host.judge_shared_memory(64 * MIB, GIB, MANY), YELLOW, "--shm-size=2g"),
    (lambda: host.judge_files(1024, 4096, ALONE), GREEN, ""),
    (lambda: host.judge_files(256, 4096, ALONE), YELLOW, "ulimit -n 1024"),
    (lambda: host.judge_files(256, 256, ALONE), YELLOW, "limits.conf"),
    (
        lambda: network.judge_name("a", ["127.0.1.1"], "", "10.0.0.1", is_bound=False, others=True),
        RED,  # Debian's habit: others reach nobody there
        "add a line to /etc/hosts: 10.0.0.1 a",
    ),
    (lambda: ports.judge({(0, 1): "", (1, 0): ""}, DOORS, ["a", "b"]), GREEN, ""),
    (
        lambda: ports.judge({(0, 1): "no answer within 3 s", (1, 0): ""}, DOORS, ["a", "b"]),
        RED,
        "rank 0 (a) does not reach rank 1 (b) at 10.0.0.1: no answer & from 10.0.0.0 into b",
    ),
    (lambda: disk.judge_room(ROOM, 100 * GIB, 5), GREEN, ""),
    (lambda: disk.judge_room(ROOM, 100 * MIB, None), YELLOW, "100 MiB free in /x"),  # enough for smaller models
    (lambda: disk.judge_room(ROOM, 100 * GIB, 0), RED, "inodes"),
    (lambda: disk.judge_speed(ROOM, 1e6), YELLOW, "takes 204 s"),
    (lambda: disk.judge_shared(disk.Mark("/x/y", ""), {1: True, 2: False}, hosts=2), YELLOW, "(2,) & /x is another"),
    (lambda: disk.data(Path("/none")), YELLOW, "/none is not there"),
    (lambda: _gpu(), GREEN, "80 GiB, 79 GiB free"),
    (lambda: _gpu(free_bytes=10 * GIB), YELLOW, "another program"),
    (lambda: _gpu(prohibited=True), RED, "keeps every program away"),
    (lambda: _gpu(uncorrected=3), YELLOW, "3 memory errors"),
    (lambda: _unusable("", "570.1"), RED, "shows 2 GPUs & a build without CUDA & --accelerator cpu"),
    (lambda: _unusable("13.0", "470"), RED, "driver is too old"),
    (lambda: _reduced(Carrier("link", "eth0", 1e9)), GREEN, "of eth0"),
    (lambda: _reduced(Carrier("link", "eth0", 100e9)), YELLOW, "far below it"),
]


@pytest.mark.parametrize(("judge", "state", "told"), JUDGED)
def test_each_fault_is_told_with_its_fix(
    judge: Callable[[], Finding | Iterable[Finding]], state: str, told: str
) -> None:
    judged = judge()
    (found,) = [judged] if isinstance(judged, Finding) else judged  # which has a fix where something is wrong
    assert found.state == state, found
    whole = f"{found.name} {found.ranks} {found.words} → {found.fix}"
    assert [part for part in told.split(" & ") if part not in whole] == [], whole


def test_findings_of_ranks_that_are_alike_are_one_and_the_worst_is_the_verdict() -> None:
    few = [Subject("host", "open files", ranks=(rank,)).yellow("few", "more") for rank in (2, 0, 1)]
    red = Subject("network", "ports").red("closed", "open them")
    assert merged([red, *few]) == [Subject("host", "open files", ranks=(0, 1, 2)).yellow("few", "more"), red]
    green = Subject("host", "x").green("fine")
    assert [verdict(each) for each in ([*few, red], [*few, green], [green])] == [RED, YELLOW, GREEN]


def test_what_raises_or_hangs_is_a_finding() -> None:
    def broken() -> Iterator[Finding]:
        yield about.green("the first part")
        raise OSError(5, "Input/output error")

    about, never = Subject("disk", "output"), threading.Event()
    fine, raised = look(about, broken, 5)
    assert (fine.state, raised.state) == (GREEN, YELLOW)
    assert "Input/output error" in raised.words
    (hung,) = look(about, lambda: [about.green(str(never.wait(60)))], 0.2, hung=RED)
    assert hung.state == RED
    assert "no answer within 0.2 s" in hung.words
    never.set()


def test_rank_0_is_not_waited_for_for_ever() -> None:
    with pytest.raises(RunError, match="rank 0 has not come to first within"):
        Board(HashStore(), 1, 2, 0.05).all("first", {})


def test_a_torchvision_of_another_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = software.torchvision()
    assert "does not fit torch" in found.words
    assert "pip install" in found.fix


def test_a_door_is_known_by_its_nonce_and_silence_takes_bounded_time() -> None:
    with ports.listening("127.0.0.1") as door:
        with contextlib.closing(socket.create_connection((door.address, door.port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")  # and breaks off
        assert ports.visit(door).trouble == ""
        assert ports.visit(ports.Door(door.address, door.port, "00" * 16)).trouble == "another program answers there"
    assert ports.visit(door).trouble == "connection refused"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun_s = time.monotonic()
        shut = ports.visit(ports.Door("127.0.0.1", silent.getsockname()[1], "00" * 16), limit_s=0.3)
    assert shut.trouble == "no answer within 0.3 s"
    assert time.monotonic() - begun_s < 3


def test_in_a_pipe_a_finding_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Subject("host", "versions", ranks=(0, 1)).green("lockstep 0.1.0, python 3.11.7, torch 2.15.0+cu132 " * 3),
        Subject("host", "shared memory", ranks=(1,)).yellow("64 MiB free " * 12, "docker run --shm-size=2g " * 6),
        Subject("network", "ports").red("[b]rank 0 does not reach rank 1[/]", "open them"),
    ]
    show(findings, ["a", "b"], "cpu", 1.0)
    lines = capsys.readouterr().out.splitlines()
    states = [line.split()[0] for line in lines if line.startswith("  ") and "fix:" not in line]
    assert (states, sum("fix:" in line for line in lines)) == (["green", "yellow", "red"], 2)
    assert any(line.endswith("(rank 1 on b)") for line in lines)
    assert any(line.endswith("[b]rank 0 does not reach rank 1[/]") for line in lines)
    assert lines[-1].startswith("red: no job can run here")

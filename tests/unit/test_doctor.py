"""What `lockstep doctor` makes of what it finds: each fault is told with its fix, and what is fine is left in peace."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from lockstep._torch import HashStore
from lockstep.cli.doctor import show, verdict
from lockstep.doctor import alone, gpus, together
from lockstep.doctor.finding import GREEN, RED, UNCHECKED, YELLOW, Finding, conclude, look, merged
from lockstep.hardware import Gpu
from lockstep.world.topology import Topology

MIB, GIB = 2**20, 2**30
ADDRESSES = ["10.0.0.1", "10.0.0.2"]
ROOM = Path("/x")
TWO = [Gpu("H200", f"GPU-{index}", 80 * GIB) for index in range(2)]


def _torches(*versions: str) -> Finding:
    """Return the first of what is told of ranks with these versions of torch."""
    return next(alone.judge_versions([{"python": "3.11", "torch": each} for each in versions]))


def _reached(trouble: str) -> Finding:
    return together.judge_visits({(0, 1): trouble, (1, 0): ""}, ADDRESSES, ["a", "b"])


def _reduced(changed: tuple[int, ...] = ()) -> list[Finding]:
    """Return what is found of two ranks, of which rank 1 gets other bytes from ranks `changed`."""
    one = {"way": "by gloo", "rows": [(8, 1e-4), (64 * MIB, 0.1)], "gather_s": 1e-3, "beside": 0.5, "changed": []}
    return list(together.judge([one, one | {"changed": changed}], ["a", "b"]))


def _failed(*errors: tuple[str, bool]) -> Iterable[Finding]:
    return together.judge([{"error": error, "is_echo": is_echo} for error, is_echo in errors], ["a", "b"])


JUDGED: list[tuple[Callable[[], Finding | Iterable[Finding]], str, str]] = [
    (lambda: _torches("2.12.0", "2.12.0"), GREEN, "torch 2.12.0"),
    (lambda: _torches("2.12.0", "2.11.0"), RED, "torch & 2.12.0 on rank 0 & 2.11.0 & rank 1"),
    (lambda: gpus.usable([], chosen_cpu=False), UNCHECKED, "none"),
    (lambda: gpus.usable(TWO, chosen_cpu=True), UNCHECKED, "2 here, not used"),
    (lambda: gpus.partitions(7), YELLOW, "7 partitions (MIG) & nvidia-smi -mig 0"),
    (lambda: gpus.driver_age(13020, "13.0"), GREEN, "up to 13.2, torch was built for 13.0"),
    (lambda: gpus.driver_age(13000, "13.2"), GREEN, "compiles none (compute_…)"),
    (lambda: gpus.driver_age(12040, "13.0"), RED, "up to 12.4 & a torch for CUDA 12"),
    (lambda: gpus.nccl((2, 29, 2)), YELLOW, "2.29.2 hangs & newer"),
    (lambda: gpus.nccl((2, 21, 5)), YELLOW, "2.21.5 may hang when a group is left"),
    (lambda: _reached(""), GREEN, ""),
    (
        lambda: _reached("no answer within 3 s"),
        RED,
        "rank 0 (a) does not reach rank 1 (b) at 10.0.0.2: no answer & from 10.0.0.1 into b",
    ),
    (lambda: alone.judge_space(ROOM, 100 * GIB), GREEN, ""),
    (lambda: alone.judge_space(ROOM, 100 * MIB), YELLOW, "100 MiB free in /x"),  # enough for smaller models
    (lambda: alone.shared(Path("/none"), "x", 0), YELLOW, "/ is another folder"),
    (lambda: alone.data(Path("/none")), YELLOW, "/none cannot be read: No such file"),
    (lambda: _reduced()[2], GREEN, "100 ms & bus 671 MB/s"),
    (lambda: _reduced(changed=(0,))[-1], RED, "rank 0 to rank 1 (b)"),
    (lambda: _failed(("lost another", True), ("no such device", False)), RED, "rank 1 (b): no such device"),
]


def _check(finding: Finding, state: str, told: str) -> None:
    assert finding.state == state, finding
    assert bool(finding.fix) == (state in (YELLOW, RED))
    whole = f"{finding.name} {finding.words} → {finding.fix}"
    assert [part for part in told.split(" & ") if part not in whole] == [], whole


@pytest.mark.parametrize(("judge", "state", "told"), JUDGED)
def test_each_fault_is_told_with_its_fix(
    judge: Callable[[], Finding | Iterable[Finding]], state: str, told: str
) -> None:
    judged = judge()
    (finding,) = [judged] if isinstance(judged, Finding) else judged
    _check(finding, state, told)


@pytest.mark.parametrize(
    ("facts", "name", "state", "told"),
    [
        ({}, "processors", GREEN, "8 available"),
        ({"usable": 2, "ranks": 4}, "processors", YELLOW, "4 ranks share 2 & at most 2 ranks"),
        ({}, "shared memory", GREEN, ""),
        ({"shm": 64 * MIB, "ranks": 5}, "shared memory", YELLOW, "--shm-size=2g"),
        ({}, "open files", GREEN, ""),
        ({"ranks": 512}, "open files", YELLOW, "ulimit -n 4096"),
    ],
)
def test_what_a_host_lacks_is_told(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], name: str, state: str, told: str
) -> None:
    facts = {"usable": 8, "shm": GIB, "ranks": 1} | facts
    monkeypatch.setattr("lockstep.hardware.cpus", lambda: facts["usable"])
    monkeypatch.setattr(alone, "_free_bytes", lambda folder: facts["shm"])
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 1024))
    topology = Topology(size=facts["ranks"], local_size=facts["ranks"])
    _check(next(each for each in alone.host(topology, True) if each.name == name), state, told)


@pytest.mark.parametrize(
    ("resolved", "others", "state", "told"),
    [
        ("10.0.0.1", True, GREEN, ""),
        ("127.0.1.1", True, RED, f"add a line to /etc/hosts: 10.0.0.1 {socket.gethostname()}"),  # Debian's habit
        ("127.0.1.1", False, GREEN, ""),
        ("", False, YELLOW, "does not resolve"),
    ],
)
def test_a_name_by_which_nobody_is_reached_is_told(
    monkeypatch: pytest.MonkeyPatch, resolved: str, others: bool, state: str, told: str
) -> None:
    answer = [(2, 1, 6, "", (resolved, 0))] if resolved else []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **options: answer)
    _, name = alone.network("10.0.0.1", by_name=others)
    _check(name, state, told)


def test_gpus_that_torch_cannot_use_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **options: None)
    for built, told in (("13.0", "built for CUDA 13.0"), (None, "a build without CUDA")):
        monkeypatch.setattr("torch.version.cuda", built)
        finding = next(gpus.usable(TWO, chosen_cpu=False))
        assert (finding.state, told in finding.words) == (RED, True)
        assert "--accelerator cpu" in finding.fix


def test_a_gpu_that_the_build_has_no_code_for_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **options: "cuda")
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_75"])
    for name, answer in {"HandleByUUID": "handle", "CudaComputeCapability": (6, 1)}.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", lambda *about, answer=answer: answer)
    _check(
        next(gpus.usable(TWO, chosen_cpu=False)), RED, "H200 has the architecture sm_61 & has no code & --accelerator"
    )


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({("nvlink", "01"): 0, ("nvlink", "02"): 0, ("nvlink", "12"): 0}, "NVLink between each pair of 3 GPUs"),
        ({("read", "01"): 0, ("read", "02"): 0, ("read", "12"): 0}, "PCIe between each pair of 3 GPUs"),
        (
            {("nvlink", "01"): 0},
            "NVLink between 0–1; PCIe through host memory, without peer-to-peer access between 0–2, ",
        ),
        (None, ""),
    ],
)
def test_links_are_those_that_the_driver_reports(
    monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[str, str], int] | None, words: str
) -> None:
    names = {pynvml.NVML_P2P_CAPS_INDEX_NVLINK: "nvlink", pynvml.NVML_P2P_CAPS_INDEX_READ: "read"}

    def status(first: str, second: str, index: int) -> Any:
        if answers is None:
            raise pynvml.NVMLError_NotSupported
        return answers.get((names[index], f"{first[-1]}{second[-1]}"), pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", status)
    findings = [*gpus.links([*TWO, Gpu("H200", "GPU-2", GIB)])]
    assert [finding.words[: len(words)] for finding in findings] == [words] * bool(words)


def test_nccls_share_of_shared_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_free_bytes", lambda folder: 700 * MIB)
    topology = Topology(size=4, local_size=4)
    states = [
        next(finding for finding in alone.host(topology, on_cpu) if finding.name == "shared memory")
        for on_cpu in (True, False)
    ]
    _check(states[0], GREEN, "")
    _check(states[1], YELLOW, "data workers of 4 ranks and NCCL need & --shm-size")


def test_a_gpu_whose_memory_others_hold_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(free_bytes: int) -> tuple[str, str]:
        for name, answer in {"HandleByUUID": "handle", "MemoryInfo": SimpleNamespace(free=free_bytes)}.items():
            monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", lambda *about, answer=answer: answer)
        finding = alone.judge_gpu(0, Gpu("H100", "GPU-0", 80 * GIB))
        return finding.state, finding.words

    assert told(79 * GIB) == (GREEN, "H100, 80 GiB, 79 GiB free")
    assert told(GIB) == (YELLOW, "H100, 80 GiB, 1 GiB free: another program holds most of its memory")


def test_findings_of_ranks_that_are_alike_are_one_and_the_worst_is_the_verdict() -> None:
    few = [Finding("host", "open files", YELLOW, "few", "more", ranks=(rank,)) for rank in (2, 0, 1)]
    red = conclude("network", "ports", "closed", "open them", bad=RED)
    assert merged([red, *few]) == [Finding("host", "open files", YELLOW, "few", "more", ranks=(0, 1, 2)), red]
    green = conclude("host", "x", "fine")
    assert [verdict(each) for each in ([*few, red], [*few, green], [green])] == [RED, YELLOW, GREEN]


def test_what_raises_or_hangs_is_a_finding() -> None:
    def broken() -> Iterator[Finding]:
        raise OSError(5, "Input/output error")

    never = threading.Event()
    (raised,) = look("disk", "output", broken, 5)
    assert (raised.state, "Input/output error" in raised.words) == (YELLOW, True)
    (hung,) = look("disk", "output", lambda: [conclude("disk", "output", str(never.wait(60)))], 0.2, hung=RED)
    assert (hung.state, hung.words) == (RED, "the system gave no answer within 0.2 s")
    never.set()


def test_rank_0_is_not_waited_for_for_ever() -> None:
    with pytest.raises(together.SilentRankError, match="rank 0 fell silent at first"):
        together.Board(HashStore(), 1, 2, 0.05).all("first", {})


def test_a_port_that_is_closed_or_silent_is_told_in_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
        assert together.visit(address, port) == ""
    assert together.visit("127.0.0.1", port) == "connection refused"
    begun_s = time.monotonic()
    assert together.visit("192.0.2.1", port, limit_s=0.3) != ""  # nobody's: silent, or unreachable from here
    assert time.monotonic() - begun_s < 3


def test_in_a_pipe_a_finding_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding("host", "versions", GREEN, "lockstep 0.1.0, python 3.11.7, torch 2.15.0+cu132 " * 3, ranks=(0, 1)),
        Finding("host", "shared memory", YELLOW, "64 MiB free " * 12, "docker run --shm-size=2g " * 6, ranks=(1,)),
        Finding("host", "memory", GREEN, "5 GiB free", ranks=(0,)),
        Finding("network", "ports", RED, "[b]rank 0 does not reach rank 1[/]", "open them"),
    ]
    show(findings, ["a", "b"], "cpu", 1.0)
    lines = capsys.readouterr().out.splitlines()
    states = [line.split()[0] for line in lines if line.startswith("  ") and "fix:" not in line]
    assert states == ["green", "yellow", "green", "red"]
    assert sum("fix:" in line for line in lines) == 2
    assert any(line.endswith("(on b)") for line in lines)
    assert any(line.endswith("[b]rank 0 does not reach rank 1[/]") for line in lines)
    assert lines[-1].startswith("red: no job can run here")

"""What `lockstep doctor` makes of what it finds: each fault is told with its fix, and what is fine is left in peace."""

from __future__ import annotations

import contextlib
import math
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lockstep.cli import doctor
from lockstep.cli.main import main
from lockstep.cli.symptoms import show
from lockstep.config import RunConfig
from lockstep.doctor import collectives, copies, devices, disk, host, network, ports, software
from lockstep.doctor.board import Board
from lockstep.doctor.bounded import look
from lockstep.doctor.collectives import Carrier, Measured
from lockstep.doctor.finding import GREEN, RED, UNCHECKED, YELLOW, Finding, Subject, merged, verdict
from lockstep.doctor.nvml import GpuState, Link
from lockstep.errors import RunError
from lockstep.launchers import table

from ..command import refusal

MIB, GIB = 2**20, 2**30
NO_LIMIT = resource.RLIM_INFINITY
ALONE = host.Sharers(local_size=1, size=1, on_cpu=True)
FOUR = host.Sharers(local_size=4, size=4, on_cpu=True)
GPU = GpuState(0, "GPU-0", "H100", 80 * GIB, 79 * GIB, pcie_generation=5, pcie_width=16, pcie_most_width=16)
VERSIONS = {"lockstep": "0.1.0", "python": "3.12.3", "torch": "2.12.0+cu130", "CUDA": "13.0", "NCCL": "2.29.0"}
VERSIONS |= {"torchvision": "0.27.0", "driver": ""}
ROOM = Path("/x")
MARK = disk.Mark("/x/mark", "")
DOORS = {rank: ports.Door(f"10.0.0.{rank}", 4000, "") for rank in range(2)}
NVLINK = [Link(a, b, "nvlink", True) for a, b in ((0, 1), (0, 2), (1, 2))]
MEASURED = [Measured(8, 1e-4, 0), Measured(64 * MIB, 0.1, 0)]


def _torches(**of_last: str) -> Iterable[Finding]:
    return software.judge({0: VERSIONS, 1: VERSIONS, 2: VERSIONS | of_last}, "2.11")


def _processors(seen: int, quota: float, sharers: host.Sharers) -> Iterable[Finding]:
    return host.judge_processors(seen, quota, sharers, "Xeon", True)


def _name(*found: str, is_bound: bool, others: bool, address: str = "10.0.0.1") -> Finding:
    why = "Name or service not known"
    return network.judge_name("a", list(found), why, address, is_bound=is_bound, others=others)


def _gpu(**changed: object) -> Iterable[Finding]:
    return devices.gpus([GpuState(**{**vars(GPU), **changed})])


def _reduced(carrier: Carrier | None, wrong: int = 0) -> Finding:
    """Return what is told of the largest of the all-reduces of four ranks, `wrong` of whose elements are on rank 1."""
    rows = dict.fromkeys(range(4), MEASURED) | {1: [MEASURED[0], Measured(64 * MIB, 0.1, wrong)]}
    return list(collectives.judge(rows, carrier, ["a", "b", "c", "d"]))[-1]


JUDGED: list[tuple[Callable[[], Finding | Iterable[Finding]], str, str]] = [
    (lambda: _torches(), GREEN, "torch 2.12.0+cu130"),
    (lambda: _torches(torch="2.11.0"), RED, "torch versions & 2.12.0+cu130 on rank 0 and rank 1; 2.11.0 on rank 2"),
    (lambda: _torches(python="3.12.9"), YELLOW, "python versions"),
    (lambda: software.judge({0: VERSIONS | {"torch": "2.9.1"}}, "2.11"), RED, "pip install 'torch>=2.11'"),
    (lambda: software.judge({0: VERSIONS | {"torch": "2.11.0a0+git12"}}, "2.11"), GREEN, ""),
    # A host.
    (lambda: _processors(8, math.inf, FOUR), GREEN, ""),
    (lambda: _processors(8, 1.5, ALONE), YELLOW, "gives the time of 1.5 & --cpuset-cpus"),
    (lambda: _processors(2, math.inf, FOUR), YELLOW, "4 ranks share 2"),
    (lambda: _processors(2, math.inf, host.Sharers(4, 4, on_cpu=False)), GREEN, ""),
    (lambda: host.judge_shared_memory(64 * MIB, 64 * MIB, ALONE), YELLOW, "--shm-size=1g"),
    (lambda: host.judge_shared_memory(GIB, GIB, ALONE), GREEN, ""),
    (lambda: host.judge_shared_memory(64 * MIB, GIB, host.Sharers(5, 5, on_cpu=True)), YELLOW, "--shm-size=2g"),
    (lambda: host.shared_memory(ALONE, Path("/no/shm")), RED, "/no/shm"),
    (lambda: host.judge_files(256, 4096, ALONE), YELLOW, "ulimit -n 1024"),
    (lambda: host.judge_files(256, 256, ALONE), YELLOW, "limits.conf"),
    (lambda: host.judge_files(1024, 4096, ALONE), GREEN, ""),
    (lambda: host.judge_files(1024, 4096, host.Sharers(8, 512, on_cpu=False)), YELLOW, "ulimit -n 4096"),
    (lambda: host.judge_files(NO_LIMIT, NO_LIMIT, ALONE), GREEN, ""),
    (lambda: host.judge_locked(8 * MIB), YELLOW, "ulimit -l unlimited"),
    (lambda: host.judge_locked(NO_LIMIT), GREEN, ""),
    (lambda: host.judge_threads(100, ALONE), YELLOW, "--pids-limit=-1"),
    (lambda: host.judge_threads(math.inf, FOUR), GREEN, ""),
    (lambda: host.judge_memory(500 * MIB, 8 * GIB), YELLOW, "500 MiB"),
    # Its name and its wires.
    (lambda: _name("10.0.0.1", is_bound=True, others=True), GREEN, ""),
    (lambda: _name("127.0.1.1", is_bound=True, others=False), GREEN, ""),
    (lambda: _name("127.0.1.1", is_bound=True, others=True), YELLOW, "10.0.0.1 a"),
    (lambda: _name("127.0.1.1", "::1", is_bound=False, others=True), RED, "10.0.0.1 a"),
    (lambda: _name("127.0.1.1", "10.0.0.1", is_bound=False, others=True), GREEN, ""),
    (lambda: _name(is_bound=True, others=False), YELLOW, "10.0.0.1 a"),
    (lambda: _name(is_bound=False, others=True), RED, "10.0.0.1 a"),
    (
        lambda: _name("127.0.0.1", is_bound=True, others=True, address="127.0.0.1"),
        YELLOW,  # a loopback address is not told as one for others
        "add a line to /etc/hosts: ADDRESS a (in place of the one with 127.0.0.1)",
    ),
    (lambda: network.names("localhost", "127.0.0.1", is_bound=True, others=False), GREEN, ""),
    (lambda: [*network.names("no.invalid", "127.0.0.1", is_bound=True, others=False)][:1], YELLOW, "no.invalid"),
    (lambda: network.judge_lookups("a", 0.1, 5.0), YELLOW, "takes 5 s"),
    (lambda: network.judge_wire(network.wire("no0", ""), others=False), RED, "no0 & 127.0.0.1"),
    (lambda: network.judge_mtus({0: 9000, 1: 1500}), YELLOW, "MTU (1,)"),
    (lambda: ports.judge({(0, 1): "", (1, 0): ""}, DOORS, ["a", "b"]), GREEN, ""),
    (
        lambda: ports.judge({(0, 1): "no answer within 3 s", (1, 0): ""}, DOORS, ["a", "b"]),
        RED,
        "rank 0 (a) does not reach rank 1 (b) at 10.0.0.1: no answer within 3 s & from 10.0.0.0 into b",
    ),
    (lambda: ports.judge({}, {}, ["a"]), UNCHECKED, ""),
    (lambda: network.judge_clock(0.2, 0.01, 1), GREEN, ""),
    (lambda: network.judge_clock(1.5, 0.8, 1), GREEN, ""),  # far only beyond doubt
    (lambda: network.judge_clock(-7.0, 0.01, 1), YELLOW, "7 s behind rank 0's, ± 10 ms"),
    # Its disk.
    (lambda: disk.output(Path("/proc/runs")), RED, "/proc cannot be written"),  # root makes no files there either
    (lambda: disk.judge_room(ROOM, 100 * GIB, 5), GREEN, ""),
    (lambda: disk.judge_room(ROOM, 2 * GIB, None), YELLOW, "585 MiB"),
    (lambda: disk.judge_room(ROOM, 100 * MIB, None), YELLOW, ""),  # enough for smaller models
    (lambda: disk.judge_room(ROOM, 100 * GIB, 0), RED, "inodes"),
    (lambda: disk.judge_speed(ROOM, 500e6), GREEN, ""),
    (lambda: disk.judge_speed(ROOM, 1e6), YELLOW, "takes 204 s"),
    (lambda: disk.judge_shared(MARK, {1: True, 2: True}, hosts=2), GREEN, ""),
    (lambda: disk.judge_shared(MARK, {1: True, 2: False}, hosts=2), YELLOW, "shared (2,)"),
    (lambda: disk.judge_shared(None, {1: False}, hosts=2), UNCHECKED, ""),
    (lambda: disk.data(Path("/")), GREEN, ""),
    (lambda: disk.data(Path("/none")), YELLOW, "/none is not there"),
    # Its GPUs.
    (lambda: _gpu(), GREEN, "80 GiB, 79 GiB free, PCIe 5 ×16"),
    (lambda: _gpu(free_bytes=10 * GIB), YELLOW, "another program"),
    (lambda: _gpu(prohibited=True), RED, "keeps every program away"),
    (lambda: _gpu(exclusive=True), YELLOW, "one program at a time"),
    (lambda: _gpu(uncorrected=3), YELLOW, "3 memory errors"),
    (lambda: _gpu(remapping_failed=True), RED, "rows of its memory"),
    (lambda: _gpu(remapping_pending=True), YELLOW, "waits to be replaced"),
    (lambda: _gpu(pcie_width=4), YELLOW, "4 of 16 PCIe lanes"),
    (lambda: _gpu(persistence=False), YELLOW, "persistence mode is off"),
    (lambda: _gpu(slowed=True), YELLOW, "heat"),
    (lambda: _gpu(free_bytes=None, pcie_width=None), GREEN, "H100, 80 GiB"),
    (lambda: devices.links(NVLINK, True), GREEN, "3 pairs over NVLink"),
    (
        lambda: devices.links([*NVLINK, Link(0, 3, "system", False)], True),
        YELLOW,
        "1 pair over the link between processors, not directly & 0–3",
    ),
    (
        lambda: devices.judge_unusable(2, "2.12.0+cpu", "", "570.1", chosen_cpu=False),
        RED,
        "shows 2 GPUs, but torch 2.12.0+cpu is a build without CUDA & --accelerator cpu",
    ),
    (lambda: devices.judge_unusable(1, "2.12.0+cpu", "", "570.1", chosen_cpu=True), YELLOW, ""),
    (lambda: devices.judge_unusable(1, "2.12.0", "13.0", "470", chosen_cpu=False), RED, "driver is too old"),
    # What arrives, and how fast.
    (lambda: copies.host_and_devices([torch.device("cpu")], 1, 5.0), UNCHECKED, ""),
    (lambda: copies.judge_copies([], 20e9), GREEN, ""),
    (lambda: copies.judge_copies(["cuda:0 to cuda:1"], 20e9), RED, "cuda:0 to cuda:1"),
    (lambda: copies.judge_between({0: [], 1: [], 2: []}, ["a"] * 3, on_cuda=False), GREEN, ""),
    (
        lambda: copies.judge_between({0: [], 1: [0], 2: []}, ["a", "b", "c"], on_cuda=True),
        RED,
        "(0, 1) & rank 0 (a) to rank 1 (b)",
    ),
    (lambda: copies.judge_between({0: []}, ["a"], on_cuda=False), UNCHECKED, ""),
    (lambda: _reduced(Carrier("memory", "memory copy", 5e9)), GREEN, "0.2 of memory copy"),
    (lambda: _reduced(Carrier("link", "eth0", 100e9)), YELLOW, "far below it"),
    (lambda: _reduced(Carrier("fast link", "eth0", 100e9)), GREEN, ""),
    (lambda: _reduced(None), GREEN, ""),
    (lambda: [*collectives.judge({0: MEASURED, 1: MEASURED}, None, ["a", "b"])][:1], UNCHECKED, ""),
    (lambda: _reduced(None, wrong=3), RED, "(1,) & 3 on rank 1 (b)"),
    (lambda: collectives.judge({0: []}, None, ["a"]), UNCHECKED, "--devices 2"),
]


@pytest.mark.parametrize(("judge", "state", "said"), JUDGED)
def test_each_fault_is_told_with_its_fix(
    judge: Callable[[], Finding | Iterable[Finding]], state: str, said: str
) -> None:
    judged = judge()
    (found,) = [judged] if isinstance(judged, Finding) else judged  # which has a fix where something is wrong
    told = f"{found.name} {found.ranks} {found.words} → {found.fix}"
    assert found.state == state, told
    assert all(part in told for part in said.split(" & ")), told


def test_what_is_no_fault_is_not_told() -> None:
    assert not [*network.judge_lookups("a", 0.1, 0.1)]
    assert not [*network.judge_mtus({0: 9000, 1: 9000, 2: None})]
    assert not [*devices.links([], False)]
    inward = ports.judge({(0, 1): "refused"}, {1: ports.Door("127.0.0.1", 4000, "")}, ["a", "b"])
    assert "iptables" not in inward.fix
    assert _reduced(Carrier("memory", "memory copy", 5e9)).value == pytest.approx(1.5 * 64 * MIB / 0.1)


def test_findings_of_ranks_that_are_alike_are_one() -> None:
    soft = [Subject("host", "open files", 256.0, ranks=(rank,)).yellow("few", "more") for rank in (2, 0, 1)]
    other = Subject("host", "open files", 128.0, ranks=(3,)).yellow("fewer", "more")
    red = Subject("network", "ports").red("closed", "open them")
    assert merged([red, *soft, other]) == [
        Subject("host", "open files", 256.0, ranks=(0, 1, 2)).yellow("few", "more"),
        other,
        red,
    ]
    assert Finding.from_json(other.to_json()) == other
    assert verdict([other, red]) == RED
    assert verdict([other]) == YELLOW
    assert verdict([Subject("host", "x").unchecked("why"), Subject("host", "y").green("fine")]) == GREEN


def test_what_raises_or_hangs_is_a_finding() -> None:
    def broken() -> Iterator[Finding]:
        yield about.green("the first part")
        raise OSError(5, "Input/output error")

    about = Subject("disk", "output")
    fine, raised = look(about, broken, 5)
    assert fine.state == GREEN
    assert raised.state == YELLOW
    assert "Input/output error" in raised.words
    never = threading.Event()
    since_s = time.monotonic()
    (hung,) = look(about, lambda: [about.green(str(never.wait()))], 0.2, hung=RED)
    assert time.monotonic() - since_s < 5
    assert hung.state == RED
    assert "no answer within 0.2 s" in hung.words
    never.set()


def test_the_board_goes_on_without_a_rank_that_is_silent() -> None:
    store, heard, late, others_are_done = HashStore(), {}, [], threading.Event()

    def be(rank: int) -> None:
        board = Board(store, rank, 3, 0.3)
        heard[rank] = [board.all("first", rank * 10)]
        if rank == 1:
            others_are_done.wait(60)
        try:
            heard[rank].append(board.all("second", rank))
            heard[rank].append(board.all("third", rank))
        except RunError as error:
            late.append((rank, str(error)))

    ranks = [threading.Thread(target=be, args=(rank,)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for rank in (0, 2):
        ranks[rank].join()
    others_are_done.set()
    ranks[1].join()
    assert heard[0] == heard[2] == [[0, 10, 20], [0, None, 2], [0, None, 2]]
    assert heard[1] == [[0, 10, 20]]
    ((rank, said),) = late
    assert rank == 1
    assert "came to second more than 0.3 s late" in said


def test_the_board_does_not_wait_for_rank_0_for_ever() -> None:
    with pytest.raises(RunError, match="rank 0 has not come to first within"):
        Board(HashStore(), 1, 2, 0.05).all("first", {})


@pytest.mark.parametrize(
    ("raises", "said"),
    [
        ("RuntimeError('operator torchvision::nms does not exist')", "does not fit torch"),
        ("ImportError('libjpeg.so.8: cannot open shared object file')", "libjpeg.so.8"),
    ],
)
def test_a_torchvision_of_another_torch_is_told(
    raises: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(f"raise {raises}\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = software.torchvision()
    assert found.state == YELLOW
    assert said in found.words
    assert "pip install" in found.fix


@pytest.mark.parametrize(("line", "root"), [("0::/job/step", ""), ("8:pids:/job/step", "pids")])
def test_the_nearest_limit_of_processes_counts(line: str, root: str, tmp_path: Path) -> None:
    step = tmp_path / root / "job" / "step"
    step.mkdir(parents=True)
    (step / "pids.max").write_text("max\n")
    (step / "pids.current").write_text("10\n")
    (step.parent / "pids.max").write_text("100\n")
    (step.parent / "pids.current").write_text("70\n")
    own = tmp_path / "cgroup"
    own.write_text(f"3:cpuset:/\n{line}\n")
    assert host.pids_left(own, tmp_path) == 30
    assert host.pids_left(tmp_path / "none", tmp_path) == math.inf


def test_wires_are_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "speed").write_text("25000\n")
    (tmp_path / "lo" / "mtu").write_text("9000\n")
    wire = network.wire("lo", "", tmp_path)
    assert wire == network.Wire("lo", "127.0.0.1", 25e9 / 8, 9000)
    assert [each.state for each in network.judge_wire(wire, others=False)] == [GREEN]
    (kept,) = network.judge_wire(wire, others=True)
    assert (kept.state, "GLOO_SOCKET_IFNAME" in kept.fix) == (YELLOW, True)
    rate = tmp_path / "mlx5_0" / "ports" / "1"
    rate.mkdir(parents=True)
    assert network.infiniband_bytes_per_s(tmp_path) is None
    (rate / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert network.infiniband_bytes_per_s(tmp_path) == 12.5e9


@pytest.mark.parametrize("ahead_s", [0.0, 5.0, -3.0])
def test_a_door_is_known_by_its_nonce_and_tells_the_time(ahead_s: float, capsys: pytest.CaptureFixture[str]) -> None:
    with ports.listening("127.0.0.1", lambda: time.time_ns() + int(ahead_s * 1e9)) as door:
        with contextlib.closing(socket.create_connection((door.address, door.port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")  # and breaks off
        seen = ports.visit(door)
        assert seen.trouble == ""
        assert abs(seen.offset_s - ahead_s) <= seen.bound_s + 0.01
        assert ports.visit(ports.Door(door.address, door.port, "00" * 16)).trouble == "another program answers there"
        assert ports.visit_all({1: door, 2: door})[2].trouble == ""
    assert ports.visit(door).trouble == "connection refused"
    assert capsys.readouterr().err == ""


def test_a_door_that_stays_silent_takes_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        since_s = time.monotonic()
        seen = ports.visit(ports.Door("127.0.0.1", silent.getsockname()[1], "00" * 16), limit_s=0.3)
    assert seen.trouble == "no answer within 0.3 s"
    assert time.monotonic() - since_s < 3


def test_writing_leaves_nothing_behind_and_a_mark_is_seen(tmp_path: Path) -> None:
    found = list(disk.output(tmp_path / "runs" / "new"))
    assert {each.name for each in found} == {"free space", "write speed"}
    assert all(str(tmp_path) in each.words for each in found)
    with disk.marked(tmp_path / "runs") as (mark,):
        assert disk.sees(mark)
        assert not disk.sees(disk.Mark(mark.path, "another"), wait_s=0.1)
    assert not [*tmp_path.iterdir()]
    with disk.marked(Path("/proc/x")) as marks:
        assert marks == []


def test_each_pair_of_devices_is_tried_and_no_copy_begins_too_late() -> None:
    devices = [torch.device("cpu"), torch.device("cpu", 0), torch.device("cpu", 1)]
    sent = copies.random_bytes(1, 4096)
    sources = {"pageable": sent, "pinned": sent.clone()}
    moved: list[torch.device] = []

    def copy(source: Tensor, device: torch.device) -> tuple[Tensor, float]:
        there = source.clone()
        there[5] ^= device == faulty
        return there, 2e9

    def move(values: Tensor, device: torch.device) -> Tensor:
        moved.append(device)
        there = values.clone()
        there[7] ^= len(moved) == flipped
        return there

    def tried(limit_s: float) -> Finding:
        moved.clear()
        return copies.copied(devices, sources, limit_s, copy=copy, move=move)

    faulty, flipped = None, 0
    fine = tried(60)
    assert (fine.state, fine.value, len(moved)) == (GREEN, 2e9, 6)
    flipped = 4
    assert tried(60).words == "copies arrive with other bits: cpu:0 to cpu:1"
    faulty, flipped = devices[2], 0
    told = tried(60)
    assert told.words.endswith("bits: host to cpu:1 and back (pageable memory), host to cpu:1 and back (pinned memory)")
    assert len(moved) == 2  # with a device that has other bytes already, no other one is compared
    faulty = None
    late = tried(0)
    assert (late.state, len(moved)) == (YELLOW, 0)
    assert "11 of 12 copies were not tried" in late.words


def test_a_checksum_sees_one_bit_and_the_order() -> None:
    sent = copies.random_bytes(3, 4096)
    assert torch.equal(sent, copies.random_bytes(3, 4096))
    flipped = sent.clone()
    flipped[77] ^= 1
    assert copies.checksum(flipped) != copies.checksum(sent)
    assert copies.checksum(sent.flip(0)) != copies.checksum(sent)


FINDINGS = [
    Subject("host", "versions", ranks=(0, 1)).green("lockstep 0.1.0, python 3.11.7, torch 2.15.0+cu132 " * 3),
    Subject("host", "shared memory", ranks=(1,)).yellow("64 MiB free " * 12, "docker run --shm-size=2g " * 6),
    Subject("network", "ports").red("[b]rank 0 does not reach rank 1[/]", "open them"),
]


def test_in_a_pipe_a_finding_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    show(FINDINGS, ["a", "b"], "cpu", 1.0)
    lines = capsys.readouterr().out.splitlines()
    (red,) = [line for line in lines if line.startswith("  red")]
    assert red.endswith("[b]rank 0 does not reach rank 1[/]")
    (yellow,) = [line for line in lines if line.startswith("  yellow")]
    assert yellow.endswith("(rank 1 on b)")
    show([Subject("network", "host name", ranks=(0, 1)).yellow("it leads nowhere", "mend it")], ["a", "b"], "cpu", 1.0)
    assert "it leads nowhere (both ranks)\n" in capsys.readouterr().out
    assert len([line for line in lines if "fix:" in line]) == 2
    assert lines[-1].startswith("red: no job can run here")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--epochs", 3), "no use for --epochs"),
        (("--batchnorm", "sync"), "no use for --batchnorm"),
        (("digits",), "'digits' belongs to no flag"),
        (("--json=1",), "--json takes no value"),
        (("--strategy", "no"), "Unknown strategy"),
        (("--rank", 0), "without --world-size"),
    ],
)
def test_what_an_examination_cannot_use_is_refused(
    words: tuple[object, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, "doctor", *words)


def test_ranks_that_fail_are_not_examined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[RunConfig] = []
    monkeypatch.setattr(table, "launch", lambda entry, config: launched.append(config))
    assert main(["doctor", "--devices", "2", "--accelerator", "cpu", "--max-restarts", "1"]) == 0
    (parallel,) = (config.parallel for config in launched)
    assert (parallel.launcher, parallel.max_restarts) == ("elastic", 0)


@pytest.mark.parametrize("gone", [BrokenPipeError(), SystemExit(1)])
def test_a_reader_that_has_gone_does_not_change_the_verdict(
    gone: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    green = SimpleNamespace(findings=[], absent=[])
    shown = []

    def show(visit: object, report: object) -> None:
        shown.append(report)
        raise gone

    monkeypatch.setattr(doctor._Visit, "show", show)
    monkeypatch.setattr("lockstep.cli.doctor.launchers.launch", lambda visit, config: green)
    assert doctor.main(["--accelerator", "cpu"]) == 0
    assert shown == [green]

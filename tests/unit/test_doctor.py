"""What `lockstep doctor` makes of what it finds: each fault is told with its fix, and what is fine is left in peace."""

from __future__ import annotations

import contextlib
import math
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
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
from lockstep.doctor import collectives, copies, devices, disk, host, network, nvml, ports, software
from lockstep.doctor.board import Board
from lockstep.doctor.bounded import look
from lockstep.doctor.collectives import Carrier, Measured
from lockstep.doctor.finding import GREEN, RED, UNCHECKED, YELLOW, Finding, Subject, merged, verdict
from lockstep.doctor.nvml import Driver, GpuState, Link
from lockstep.errors import RunError
from lockstep.launchers import table

from ..command import refusal

MIB, GIB = 2**20, 2**30
ALONE = host.Sharers(local_size=1, size=1, on_cpu=True)
FOUR = host.Sharers(local_size=4, size=4, on_cpu=True)
GPU = GpuState(0, "GPU-0", "H100", 80 * GIB, 79 * GIB, pcie_generation=5, pcie_width=16, pcie_most_width=16)


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
    store, heard, late = HashStore(), {}, []

    def be(rank: int) -> None:
        board = Board(store, rank, 3, 0.5)
        heard[rank] = [board.all("first", rank * 10)]
        if rank == 1:
            time.sleep(1.5)
        try:
            heard[rank].append(board.all("second", rank))
            heard[rank].append(board.all("third", rank))
        except RunError as error:
            late.append((rank, str(error)))

    ranks = [threading.Thread(target=be, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert heard[0] == heard[2] == [[0, 10, 20], [0, None, 2], [0, None, 2]]
    assert heard[1] == [[0, 10, 20]]
    assert [rank for rank, _ in late] == [1]
    assert "came to second more than 0.5 s late" in late[0][1]


def test_the_board_does_not_wait_for_rank_0_for_ever() -> None:
    with pytest.raises(RunError, match="rank 0 has not come to first within"):
        Board(HashStore(), 1, 2, 0.05).all("first", {})


VERSIONS = {
    "lockstep": "0.1.0",
    "python": "3.12.3",
    "torch": "2.12.0+cu130",
    "CUDA": "13.0",
    "NCCL": "2.29.0",
    "torchvision": "0.27.0",
    "driver": "",
}


def test_versions_that_differ_name_the_ranks() -> None:
    (same,) = software.judge({0: VERSIONS, 1: VERSIONS}, "2.11")
    assert same.state == GREEN
    assert "torch 2.12.0+cu130" in same.words
    (torches,) = software.judge({0: VERSIONS, 1: VERSIONS, 2: VERSIONS | {"torch": "2.11.0"}}, "2.11")
    assert (torches.name, torches.state) == ("torch versions", RED)
    assert torches.words == "2.12.0+cu130 on rank 0 and rank 1; 2.11.0 on rank 2"
    (pythons,) = software.judge({0: VERSIONS, 1: VERSIONS | {"python": "3.12.9"}}, "2.11")
    assert (pythons.name, pythons.state) == ("python versions", YELLOW)
    (old,) = software.judge({0: VERSIONS | {"torch": "2.9.1"}}, "2.11")
    assert (old.state, old.fix) == (RED, "pip install 'torch>=2.11'")
    (new,) = software.judge({0: VERSIONS | {"torch": "2.11.0a0+git12"}}, "2.11")
    assert new.state == GREEN


def test_the_least_torch_is_the_package_s_own_word() -> None:
    assert software.least_torch() == "2.11"
    assert software.least_torch("no-such-package") == ""
    assert software.versions("")["torch"] == torch.__version__


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


def test_a_quota_below_the_processors_is_yellow() -> None:
    (fine,) = host.judge_processors(8, math.inf, FOUR, "Xeon", True)
    assert fine.state == GREEN
    (held,) = host.judge_processors(8, 1.5, ALONE, "Xeon", True)
    assert held.state == YELLOW
    assert "gives the time of 1.5" in held.words
    assert "--cpuset-cpus" in held.fix
    (crowded,) = host.judge_processors(2, math.inf, FOUR, "Xeon", True)
    assert crowded.state == YELLOW
    assert "4 ranks share 2" in crowded.words
    (on_gpus,) = host.judge_processors(2, math.inf, host.Sharers(4, 4, on_cpu=False), "Xeon", True)
    assert on_gpus.state == GREEN


def test_docker_s_shared_memory_is_too_little() -> None:
    docker = host.judge_shared_memory(64 * MIB, 64 * MIB, ALONE)
    assert docker.state == YELLOW
    assert "--shm-size=1g" in docker.fix
    assert host.judge_shared_memory(GIB, GIB, ALONE).state == GREEN
    assert "--shm-size=2g" in host.judge_shared_memory(64 * MIB, GIB, host.Sharers(5, 5, on_cpu=True)).fix
    (missing,) = host.shared_memory(ALONE, Path("/no/shm"))
    assert missing.state == RED


def test_low_limits_are_told_with_what_raises_them() -> None:
    low = host.judge_files(256, 4096, ALONE)
    assert (low.state, "ulimit -n 1024" in low.fix) == (YELLOW, True)
    assert "limits.conf" in host.judge_files(256, 256, ALONE).fix
    assert host.judge_files(1024, 4096, ALONE).state == GREEN
    assert host.judge_files(1024, 4096, host.Sharers(8, 512, on_cpu=False)).state == YELLOW
    assert host.judge_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY, ALONE).state == GREEN
    assert host.judge_locked(8 * MIB).state == YELLOW
    assert host.judge_locked(resource.RLIM_INFINITY).state == GREEN
    assert host.judge_threads(100, ALONE).state == YELLOW
    assert host.judge_threads(math.inf, FOUR).state == GREEN
    assert host.judge_memory(500 * MIB, 8 * GIB).state == YELLOW


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


@pytest.mark.parametrize(
    ("found", "is_bound", "others", "state"),
    [
        (["10.0.0.1"], True, True, GREEN),
        (["127.0.1.1"], True, False, GREEN),
        (["127.0.1.1"], True, True, YELLOW),
        (["127.0.1.1", "::1"], False, True, RED),
        (["127.0.1.1", "10.0.0.1"], False, True, GREEN),
        ([], True, False, YELLOW),
        ([], False, True, RED),
    ],
)
def test_a_host_name_that_leads_nowhere(found: list[str], is_bound: bool, others: bool, state: str) -> None:
    judged = network.judge_name("a", found, "Name or service not known", "10.0.0.1", is_bound=is_bound, others=others)
    assert judged.state == state
    if state != GREEN:
        assert "10.0.0.1 a" in judged.fix


def test_a_loopback_address_is_not_told_as_one_for_others() -> None:
    judged = network.judge_name("a", ["127.0.0.1"], "", "127.0.0.1", is_bound=True, others=True)
    assert judged.fix.startswith("add a line to /etc/hosts: ADDRESS a (in place of the one with 127.0.0.1)")


def test_names_are_looked_up() -> None:
    (fine,) = network.names("localhost", "127.0.0.1", is_bound=True, others=False)
    assert fine.state == GREEN
    (strange, *_) = network.names("no-such-host.invalid", "127.0.0.1", is_bound=True, others=False)
    assert strange.state == YELLOW
    assert not [*network.judge_lookups("a", 0.1, 0.1)]
    (slow,) = network.judge_lookups("a", 0.1, 5.0)
    assert "takes 5 s" in slow.words


def test_wires_and_packets(tmp_path: Path) -> None:
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "speed").write_text("25000\n")
    (tmp_path / "lo" / "mtu").write_text("9000\n")
    wire = network.wire("lo", "", tmp_path)
    assert wire == network.Wire("lo", "127.0.0.1", 25e9 / 8, 9000)
    assert [each.state for each in network.judge_wire(wire, others=False)] == [GREEN]
    (kept,) = network.judge_wire(wire, others=True)
    assert (kept.state, "GLOO_SOCKET_IFNAME" in kept.fix) == (YELLOW, True)
    (lost,) = network.judge_wire(network.wire("no0", ""), others=False)
    assert lost.state == RED
    assert "127.0.0.1" in lost.words
    assert not [*network.judge_mtus({0: 9000, 1: 9000, 2: None})]
    (mixed,) = network.judge_mtus({0: 9000, 1: 1500})
    assert (mixed.state, mixed.ranks) == (YELLOW, (1,))
    rate = tmp_path / "mlx5_0" / "ports" / "1"
    rate.mkdir(parents=True)
    assert network.infiniband_bytes_per_s(tmp_path) is None
    (rate / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert network.infiniband_bytes_per_s(tmp_path) == 12.5e9


@pytest.mark.parametrize("ahead_s", [0.0, 5.0, -3.0])
def test_a_door_is_known_by_its_nonce_and_tells_the_time(ahead_s: float) -> None:
    with ports.listening("127.0.0.1", lambda: time.time_ns() + int(ahead_s * 1e9)) as door:
        seen = ports.visit(door)
        assert seen.trouble == ""
        assert abs(seen.offset_s - ahead_s) <= seen.bound_s + 0.01
        assert ports.visit(ports.Door(door.address, door.port, "00" * 16)).trouble == "another program answers there"
        assert ports.visit_all({1: door, 2: door})[2].trouble == ""
    assert ports.visit(door).trouble == "connection refused"


def test_a_door_that_stays_silent_takes_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        since_s = time.monotonic()
        seen = ports.visit(ports.Door("127.0.0.1", silent.getsockname()[1], "00" * 16), limit_s=0.3)
    assert seen.trouble == "no answer within 0.3 s"
    assert time.monotonic() - since_s < 3


def test_a_pair_that_cannot_connect_is_named() -> None:
    doors = {rank: ports.Door(f"10.0.0.{rank}", 4000, "") for rank in range(2)}
    fine = ports.judge({(0, 1): "", (1, 0): ""}, doors, ["a", "b"])
    assert fine.state == GREEN
    shut = ports.judge({(0, 1): "no answer within 3 s", (1, 0): ""}, doors, ["a", "b"])
    assert shut.state == RED
    assert shut.words == "rank 0 (a) does not reach rank 1 (b) at 10.0.0.1: no answer within 3 s"
    assert "from 10.0.0.0 into b" in shut.fix
    inward = ports.judge({(0, 1): "refused"}, {1: ports.Door("127.0.0.1", 4000, "")}, ["a", "b"])
    assert "iptables" not in inward.fix
    many = {(a, b): "refused" for a in range(2) for b in range(2)} | {(0, rank): "x" for rank in (1,)}
    assert "more" not in ports.judge(many, doors, ["a", "b"]).words
    assert ports.judge({}, {}, ["a"]).state == UNCHECKED


def test_a_clock_is_far_only_beyond_doubt() -> None:
    assert network.judge_clock(0.2, 0.01, 1).state == GREEN
    assert network.judge_clock(1.5, 0.8, 1).state == GREEN
    far = network.judge_clock(-7.0, 0.01, 1)
    assert (far.state, far.words) == (YELLOW, "7 s behind rank 0's, ± 10 ms")


def test_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    found = list(disk.output(tmp_path / "runs" / "new"))
    assert {each.name for each in found} == {"free space", "write speed"}
    assert all(str(tmp_path) in each.words for each in found)
    assert not [*tmp_path.iterdir()]


def test_an_output_that_cannot_be_written_is_red(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (taken,) = disk.output(tmp_path / "file")
    assert (taken.state, "is a file" in taken.words) == (RED, True)
    (refused,) = disk.output(Path("/proc/runs"))  # where root cannot make files either; nor is there any room
    assert refused.state == RED
    assert "/proc cannot be written" in refused.words


def test_room_and_speed_are_held_against_a_checkpoint() -> None:
    base = Path("/x")
    assert disk.judge_room(base, 100 * GIB, 5).state == GREEN
    tight = disk.judge_room(base, 2 * GIB, None)
    assert (tight.state, "585 MiB" in tight.words) == (YELLOW, True)
    assert disk.judge_room(base, 100 * MIB, None).state == YELLOW  # enough for smaller models
    assert "inodes" in disk.judge_room(base, 100 * GIB, 0).words
    assert disk.judge_speed(base, 500e6).state == GREEN
    slow = disk.judge_speed(base, 1e6)
    assert (slow.state, "takes 204 s" in slow.words) == (YELLOW, True)


def test_who_sees_the_same_folder(tmp_path: Path) -> None:
    with disk.marked(tmp_path / "runs") as marks:
        (mark,) = marks
        assert disk.sees(mark)
        assert not disk.sees(disk.Mark(mark.path, "another"), wait_s=0.1)
        assert disk.judge_shared(mark, {1: True, 2: True}, hosts=2).state == GREEN
        blind = disk.judge_shared(mark, {1: True, 2: False}, hosts=2)
        assert (blind.state, blind.ranks) == (YELLOW, (2,))
    assert not [*tmp_path.iterdir()]
    with disk.marked(Path("/proc/x")) as marks:
        assert marks == []
    assert disk.judge_shared(None, {1: False}, hosts=2).state == UNCHECKED


def test_the_data_folder(tmp_path: Path) -> None:
    assert [each.state for each in disk.data(tmp_path)] == [GREEN]
    assert [each.state for each in disk.data(tmp_path / "none")] == [YELLOW]


def test_rates_of_links() -> None:
    assert nvml.pcie_bytes_per_s(3, 16) == pytest.approx(15.75e9, rel=1e-3)
    assert nvml.pcie_bytes_per_s(1, 1) == 250e6
    assert nvml.link_kind(30, nvlink=True) == "nvlink"
    assert nvml.link_kind(30, nvlink=False) == "bridge"
    assert nvml.link_kind(None, nvlink=False) == "system"
    bridged = GpuState(0, "", "", 0, pcie_generation=4, pcie_width=16, nvlink_bytes_per_s=300e9)
    joined = Driver("1", (bridged,), (Link(0, 1, "nvlink", True),))
    apart = Driver("1", (bridged,), (Link(0, 1, "nvlink", True), Link(0, 2, "cpu", True)))
    assert devices.link(joined, bridged) == ("NVLink", 300e9)
    assert devices.link(apart, bridged) == ("PCIe", bridged.pcie_bytes_per_s)
    assert devices.link(Driver(), GpuState(0, "", "", 0)) is None


@pytest.mark.parametrize(
    ("changed", "state", "said"),
    [
        ({}, GREEN, "80 GiB, 79 GiB free, PCIe 5 ×16"),
        ({"free_bytes": 10 * GIB}, YELLOW, "another program"),
        ({"prohibited": True}, RED, "keeps every program away"),
        ({"exclusive": True}, YELLOW, "one program at a time"),
        ({"uncorrected": 3}, YELLOW, "3 memory errors"),
        ({"remapping_failed": True}, RED, "rows of its memory"),
        ({"remapping_pending": True}, YELLOW, "waits to be replaced"),
        ({"pcie_width": 4}, YELLOW, "4 of 16 PCIe lanes"),
        ({"persistence": False}, YELLOW, "persistence mode is off"),
        ({"slowed": True}, YELLOW, "heat"),
        ({"free_bytes": None, "pcie_width": None}, GREEN, "H100, 80 GiB"),
    ],
)
def test_what_is_wrong_with_a_gpu(changed: dict[str, object], state: str, said: str) -> None:
    (found,) = devices.gpus([GpuState(**{**vars(GPU), **changed})])
    assert found.state == state
    assert said in found.words


def test_links_between_gpus() -> None:
    nvlink = [Link(a, b, "nvlink", True) for a, b in ((0, 1), (0, 2), (1, 2))]
    (fine,) = devices.links(nvlink, True)
    assert (fine.state, fine.words) == (GREEN, "3 pairs over NVLink")
    (far,) = devices.links([*nvlink, Link(0, 3, "system", False)], True)
    assert far.state == YELLOW
    assert "1 pair over the link between processors, not directly" in far.words
    assert "0–3" in far.words
    assert not [*devices.links([], False)]


def test_gpus_that_torch_cannot_use() -> None:
    plain = devices.judge_unusable(2, "2.12.0+cpu", "", "570.1", chosen_cpu=False)
    assert plain.state == RED
    assert "shows 2 GPUs, but torch 2.12.0+cpu is a build without CUDA" in plain.words
    assert "--accelerator cpu" in plain.fix
    assert devices.judge_unusable(1, "2.12.0+cpu", "", "570.1", chosen_cpu=True).state == YELLOW
    assert "driver is too old" in devices.judge_unusable(1, "2.12.0", "13.0", "470", chosen_cpu=False).words


def test_copies_that_change_bits_are_red() -> None:
    cpu = torch.device("cpu")
    assert [each.state for each in copies.host_and_devices([cpu], 1, 5.0)] == [UNCHECKED]
    assert copies.judge_copies([], 20e9).state == GREEN
    wrong = copies.judge_copies(["cuda:0 to cuda:1"], 20e9)
    assert (wrong.state, "cuda:0 to cuda:1" in wrong.words) == (RED, True)
    assert copies.judge_between({0: [], 1: [], 2: []}, ["a"] * 3, on_cuda=False).state == GREEN
    sent = copies.judge_between({0: [], 1: [0], 2: []}, ["a", "b", "c"], on_cuda=True)
    assert (sent.state, sent.ranks, "rank 0 (a) to rank 1 (b)" in sent.words) == (RED, (0, 1), True)
    assert copies.judge_between({0: []}, ["a"], on_cuda=False).state == UNCHECKED


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


def test_copies_between_many_devices_have_more_time() -> None:
    assert copies.limit_s(1, 7.5, 15) == 7.5
    assert copies.limit_s(4, 7.5, 15) == 10.5
    assert copies.limit_s(8, 7.5, 15) == 15
    assert copies.limit_s(8, 10, 60) == 24
    assert copies.limit_s(8, 2, 1) == 2


def test_a_checksum_sees_one_bit_and_the_order() -> None:
    sent = copies.random_bytes(3, 4096)
    assert torch.equal(sent, copies.random_bytes(3, 4096))
    flipped = sent.clone()
    flipped[77] ^= 1
    assert copies.checksum(flipped) != copies.checksum(sent)
    assert copies.checksum(sent.flip(0)) != copies.checksum(sent)


MEASURED = [Measured(8, 1e-4, 0), Measured(64 * MIB, 0.1, 0)]


def test_all_reduce_is_held_against_its_carrier() -> None:
    bus = MEASURED[1].bus_bytes_per_s(4)
    assert bus == pytest.approx(1.5 * 64 * MIB / 0.1)
    rows = dict.fromkeys(range(4), MEASURED)
    copied = Carrier("memory", "memory copy", 5e9)
    told = list(collectives.judge(rows, copied, ["a"] * 4))
    assert [each.state for each in told] == [GREEN] * 3
    assert told[2].value == bus
    assert "0.2 of memory copy" in told[2].words
    *_, slow = collectives.judge(rows, Carrier("link", "eth0", 100e9), ["a"] * 4)
    assert slow.state == YELLOW
    *_, fast = collectives.judge(rows, Carrier("fast link", "eth0", 100e9), ["a"] * 4)
    assert fast.state == GREEN
    first, *_ = collectives.judge(rows, None, ["a"] * 4)
    assert first.state == UNCHECKED


def test_a_wrong_sum_is_red_and_names_the_rank() -> None:
    rows = {0: MEASURED, 1: [MEASURED[0], Measured(64 * MIB, 0.1, 3)]}
    *_, wrong = collectives.judge(rows, None, ["a", "b"])
    assert (wrong.state, wrong.ranks) == (RED, (1,))
    assert "3 on rank 1 (b)" in wrong.words
    (alone,) = collectives.judge({0: []}, None, ["a"])
    assert (alone.state, "--devices 2" in alone.words) == (UNCHECKED, True)


FINDINGS = [
    Subject("host", "versions", ranks=(0, 1)).green("lockstep 0.1.0, python 3.11.7, torch 2.15.0+cu132 " * 3),
    Subject("host", "shared memory", ranks=(1,)).yellow("64 MiB free " * 12, "docker run --shm-size=2g " * 6),
    Subject("network", "ports").red("[b]rank 0 does not reach rank 1[/]", "open them"),
]


def test_the_table_fits_into_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    show(FINDINGS, ["a", "b"], "cpu", 1.0)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:1] == ["yellow"] for line in lines)
    show(FINDINGS[:2], ["a", "b"], "cpu", 1.0)
    *_, first, second = capsys.readouterr().out.splitlines()
    assert max(len(first), len(second)) <= 80
    assert first.startswith("yellow: a job can run")


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


def test_a_visitor_that_breaks_off_is_no_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    with ports.listening("127.0.0.1") as door:
        for _ in range(3):
            with contextlib.closing(socket.create_connection((door.address, door.port))) as peer:
                peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert ports.visit(door).trouble == ""
    assert capsys.readouterr().err == ""


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

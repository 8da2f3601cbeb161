"""Ranks that people start by hand on several hosts: the same bits as on one, and every fault of a network is told."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from ..command import ROOT, Ended, Running, end, events, gone, sentence, until, weights
from .hosts import Host, hosts

pytestmark = [pytest.mark.usefixtures("namespaces"), pytest.mark.long]

SLOW = pytest.mark.slow
PORT = 29500
RUN = ("--strategy", "ddp", "--accelerator", "cpu", "--batch", "60", "--log-every", "1")
STEPS = ("--max-steps", "4")
PATIENT_S = 180.0


def command(*words: object) -> list[str]:
    """Return `lockstep train digits WORDS`."""
    return [sys.executable, "-m", "lockstep", "train", "digits", *RUN, *map(str, words)]


def start(host: Host, folder: Path, *words: object, **env: str) -> Running:
    """Start one rank on a host; `folder` is its working folder, which all hosts share."""
    return host.popen(command(*words), {"CUDA_VISIBLE_DEVICES": "", **env}, cwd=folder)


def by_hand(where: str, rank: int, size: int, *words: object) -> tuple[object, ...]:
    """Return the flags of one rank."""
    return "--init-method", where, "--rank", rank, "--world-size", size, *words


def tcp(host: Host, port: int = PORT) -> str:
    return f"tcp://{host.address}:{port}"


def start_all(members: Sequence[Host], folder: Path, where: str, *words: object, **env: str) -> list[Running]:
    """Start a rank on each host, in their order."""
    return [
        start(host, folder, *by_hand(where, rank, len(members), *words), **env) for rank, host in enumerate(members)
    ]


def all_end(ranks: Sequence[Running], code: int = 0, limit_s: float = PATIENT_S) -> list[Ended]:
    """Wait for the ranks' own ends, and hold that each has this exit code."""
    ended = [end(rank, limit_s) for rank in ranks]
    assert [each.code for each in ended] == [code] * len(ranks), ended
    return ended


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, bytes]]:
    """Return the weights that so many ranks of one machine come to, which has one processor, as each host here.

    They exchange by gloo, as hosts do: three ranks' sum through shared memory is taken in another order.
    """
    known: dict[tuple[int, object], dict[str, bytes]] = {}

    def of(size: int, *steps: object) -> dict[str, bytes]:
        if (size, steps) not in known:
            folder = tmp_path_factory.mktemp("spawned")
            words = command("--launcher", "spawn", "--devices", size, "--output", folder, *(steps or STEPS))
            words += ["--collectives", "gloo"]
            bound = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]
            done = subprocess.run([*bound, *words], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            known[size, steps] = weights(folder)
            assert known[size, steps]
        return known[size, steps]

    return of


@pytest.mark.parametrize("scheme", ["tcp", pytest.param("file", marks=SLOW), pytest.param("env", marks=SLOW)])
def test_ranks_of_three_hosts_come_to_the_bits_of_one(
    scheme: str, tmp_path: Path, spawned: Callable[..., dict[str, bytes]]
) -> None:
    with hosts(3) as (a, b, c):
        meeting = tmp_path / "meeting"
        where = {"tcp": tcp(a), "file": f"file://{meeting}", "env": "env://"}[scheme]
        at = {"MASTER_ADDR": a.address, "MASTER_PORT": str(PORT)} if scheme == "env" else {}
        first, *others = all_end(start_all((a, b, c), tmp_path, where, "--output", tmp_path / "run", *STEPS, **at))
    assert weights(tmp_path / "run") == spawned(3)
    assert [other.out for other in others] == ["", ""]
    assert first.err == ""
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["topology"]["nodes"], manifest["topology"]["local_size"]) == (3, 1)
    assert not meeting.exists()


@pytest.mark.slow
def test_torchrun_on_two_nodes_comes_to_the_bits_of_one(
    tmp_path: Path, spawned: Callable[..., dict[str, bytes]]
) -> None:
    with hosts(2) as (a, b):
        agents = []
        for number, host in enumerate((a, b)):
            nodes = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2"]
            at = ["--master-addr", a.address, "--master-port", str(PORT)]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes, *at, "-m"]
            words = [*command("--output", tmp_path / "run", *STEPS)[2:]]
            agents.append(host.popen([*torchrun, *words], {"CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path))
        all_end(agents)
    assert weights(tmp_path / "run") == spawned(4)


@pytest.mark.slow
def test_a_slow_and_lossy_network_changes_nothing_but_time(
    tmp_path: Path, spawned: Callable[..., dict[str, bytes]]
) -> None:
    with hosts(3) as members:
        for host in members:
            host.delay(10, loss=1)  # both ways: 20 ms a turn
        all_end(start_all(members, tmp_path, tcp(members[0]), "--output", tmp_path / "run", *STEPS))
    assert weights(tmp_path / "run") == spawned(3)


def test_traffic_takes_the_interface_that_it_is_told(tmp_path: Path) -> None:
    """Rank 1 alone is told; rank 0 follows it. Both meet over the first network, and train over the second."""
    with hosts(2, networks=2) as (a, b):
        ranks = [
            start(a, tmp_path, *by_hand(tcp(a), 0, 2, "--output", tmp_path / "run", *STEPS)),
            start(b, tmp_path, *by_hand(tcp(a), 1, 2, "--interface", "eth1", *STEPS)),
        ]
        all_end(ranks)
        moved = sum(path.stat().st_size for path in (tmp_path / "run/checkpoints/last").glob("*.safetensors"))
        for host in (a, b):
            assert host.sent_bytes(1) > moved  # one all-reduce's gradients, and several were made
            assert host.sent_bytes(0) < host.sent_bytes(1) / 4
    assert "interface" not in (tmp_path / "run" / "config.toml").read_text().replace('interface = ""', "")


def test_an_interface_that_cannot_carry_the_traffic_is_refused(tmp_path: Path) -> None:
    with hosts(2, networks=2) as (a, b):
        b.do("ip link add bare type veth peer name other")
        b.do("ip address add 10.99.0.1/24 dev other")
        for name, words in (
            ("eth7", "--interface eth7: this host, b, has no such one, but bare (no address), eth0 (10.77.0.2), eth1 "),
            ("bare", "--interface bare has no address on b; give it one, or take another of bare (no address), eth0 "),
            ("other", "--interface other is down on b; bring it up, or take another of bare (no address), eth0 "),
        ):
            begun = time.monotonic()
            told = sentence(end(start(b, tmp_path, *by_hand(tcp(a), 1, 2, "--interface", name))))
            assert words in told
            assert time.monotonic() - begun < 10  # it waits for nobody
        told = sentence(
            end(start(b, tmp_path, *by_hand(tcp(a), 1, 2, "--interface", "eth1"), GLOO_SOCKET_IFNAME="eth0"))
        )
        assert "disagrees with the environment, where GLOO_SOCKET_IFNAME is eth0" in told
        apart = [
            start(a, tmp_path, *by_hand(tcp(a), 0, 2, "--interface", "eth1")),
            start(b, tmp_path, *by_hand(tcp(a), 1, 2, "--interface", "eth0")),
        ]
        told_all = [sentence(each) for each in all_end(apart, 2)]
        assert len(set(told_all)) == 1
        assert re.search(
            r"Rank \d \(process \d+ on \w\): --interface eth\d \(10\S+\) does not lead to rank", told_all[0]
        )
        assert "give each rank the interface of one network, of those here: " in told_all[0]


def test_a_name_that_means_loopback_is_explained(tmp_path: Path) -> None:
    """Debian's habit: a host's own name is 127.0.1.1 there, and its address elsewhere."""
    with hosts(2) as (a, b):
        b.knows(master="127.0.0.1")
        timeout = ("--timeout", "8")
        ranks = [start(host, tmp_path, *by_hand("tcp://a:29500", r, 2, *timeout)) for r, host in enumerate((a, b))]
        ranks.append(start(b, tmp_path, *by_hand("tcp://master:29501", 1, 2, *timeout)))
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29502"}
        ranks += [
            start(host, tmp_path, *by_hand("env://", r, 2, *timeout), **variables) for r, host in enumerate((a, b))
        ]
        nodes = ("--nodes", "2", "--timeout", "60")
        at_once = time.monotonic()
        knowing = [start(host, tmp_path, *by_hand("tcp://a:29503", r, 2, *nodes)) for r, host in enumerate((a, a))]
        refused = [sentence(each) for each in all_end(knowing, 2)]
        assert time.monotonic() - at_once < 30
        here, there, meant, serves, looks = [sentence(each) for each in all_end(ranks, 2)]
    assert "1 of 2 ranks came" in here
    remedy = (
        "where ranks run on other hosts, give one of its addresses that they reach (10.77.0.1), or put that in /etc/"
    )
    assert f"a means 127.0.1.1 here, which is this host (a) to itself alone: {remedy}" in here
    assert "(Connection refused); a means 10.77.0.1 on b, and rank 0 may know the name as another" in there
    itself = "here, which is this host (b) itself: if rank 0 runs on another, give that one's address"
    assert f"master means 127.0.0.1 {itself}" in meant
    assert "localhost means 127.0.0.1 here, which is this host (a) to itself alone" in serves
    assert "localhost means" in looks
    assert "is this host (b) itself" in looks
    assert "ranks of other nodes are to come; a means 127.0.1.1 here, which is this host (a) to itself" in refused[0]
    assert "rank 0 is on another host; a means 127.0.1.1 here, which is this host (a) itself" in refused[1]


def test_rank_0_on_the_wrong_host_is_explained(tmp_path: Path) -> None:
    with hosts(2) as (a, b):
        ranks = [start(host, tmp_path, *by_hand(tcp(a), r, 2, "--timeout", "8")) for r, host in ((0, b), (1, a))]
        wrong, waiting = [sentence(each) for each in all_end(ranks, 2)]
    assert "the address is not one of this machine; give the address of the machine that rank 0 runs on" in wrong
    assert "nothing answers there within --timeout 8 s (Connection refused)" in waiting


def test_ports_that_a_firewall_keeps_closed_are_explained_in_time(tmp_path: Path) -> None:
    with hosts(2) as (a, b):
        for host in (a, b):
            host.filter(f"tcp flags & (syn | ack) == syn tcp dport != {PORT} drop")
        begun = time.monotonic()
        ended = all_end(start_all((a, b), tmp_path, tcp(a), "--timeout", "10"), 1)
        assert time.monotonic() - begun < 45
    for each in ended:
        assert "a firewall keeps ports between the nodes closed" in sentence(each, code=1)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=SLOW), 2])
def test_a_host_that_is_cut_off_ends_the_run_in_time(victim: int, tmp_path: Path) -> None:
    with hosts(3) as members:
        words = ("--output", tmp_path / "run", "--stall-timeout", "6", "--max-steps", "100000", "--epochs", "100000")
        ranks = start_all(members, tmp_path, tcp(members[0]), *words)
        until(lambda: len(events(tmp_path / "run", "step")) > 3)
        found = [psutil.Process(rank.pid) for rank in ranks]
        members[victim].cut()
        cut_s = time.monotonic()
        all_end(ranks, 1)
        assert time.monotonic() - cut_s < 6 + 10
        assert gone(found)


def greet(address: tuple[str, int], words: bytes, *, reset: bool = False) -> socket.socket:
    """Connect as a stranger, say something, and hold on, or be gone at once."""
    peer = socket.create_connection(address, 5)
    peer.sendall(words)
    if reset:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
    return peer


_STRANGER = """
import sys
from tests.real.test_by_hand import listening, until, visit
address, process, least = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
until(lambda: len(listening(process)) >= least)
visit(address, listening(process))
"""
_TORCHS = b"\x00" + 0x3C85F7CE.to_bytes(4, "little")
_TLS = bytes.fromhex("16030100c8010000c40303") + bytes(range(190))


def visit(address: str, ports: Sequence[int]) -> None:
    """Talk to ports as anything but a rank: what scanners, browsers and lost clients say, and 200 that say nothing."""
    held = []
    said = (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        _TLS,
        b"SSH-2.0-x\r\n",
        b"\x00" * 300,
        b"\xff" * 300,
        _TORCHS[:3],
    )
    for port in ports:
        for words in (*said, *(random.Random(seed).randbytes(300) for seed in range(20))):
            held.append(greet((address, port), words))
            greet((address, port), words, reset=True)
        held += [greet((address, port), b"") for _ in range(200)]
        for _ in range(200):
            greet((address, port), b"", reset=True)
    print("done", file=sys.stderr, flush=True)
    time.sleep(3)


def test_strangers_at_the_port_are_not_heard(tmp_path: Path, spawned: Callable[..., dict[str, bytes]]) -> None:
    """While rank 0 waits for the others, and while they train: at the store's port, and at gloo's."""
    with hosts(3) as (a, b, stranger):
        steps = ("--max-steps", 100, "--epochs", 100)
        words = ("--output", tmp_path / "run", *steps)
        first = start(a, tmp_path, *by_hand(tcp(a), 0, 2, *words))
        until(lambda: listening(first.pid) == [PORT])
        visited = [visiting(stranger, a, first.pid, 1)]
        visited[0].says("done")
        visited.append(visiting(stranger, a, first.pid, 2))
        second = start(b, tmp_path, *by_hand(tcp(a), 1, 2, *words))
        visited[1].says("done")
        assert (first.poll(), second.poll()) == (None, None)  # they were there to be disturbed
        ended = all_end([first, second])
    assert weights(tmp_path / "run") == spawned(2, *steps)
    assert [each.err for each in ended] == ["", ""]


def listening(process: int) -> list[int]:
    """Return the ports at which somebody listens in the network of a process."""
    try:
        table = Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [row.split() for row in table]
    return sorted(int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A")


def visiting(stranger: Host, host: Host, process: int, least: int) -> Running:
    """Start a stranger who visits all ports of a host's process, once it listens at so many."""
    return stranger.popen([sys.executable, "-c", _STRANGER, host.address, process, least], cwd=ROOT)


def test_two_jobs_at_one_port_or_folder(tmp_path: Path, spawned: Callable[..., dict[str, bytes]]) -> None:
    """The one that trains goes on as if nothing had been; ranks of the other one refuse, in either order."""
    with hosts(3) as (a, b, c):
        run = tmp_path / "run"
        job = start_all((a, b), tmp_path, tcp(a), "--output", run, "--max-steps", "2000", "--epochs", "2000")
        until(lambda: len(events(run, "step")) > 0)
        timeout = ("--timeout", "20")
        # Rank 0 first, then rank 1 first, each on a host of the first job and on one of its own; then one of three.
        seconds = [start(host, tmp_path, *by_hand(tcp(a), 0, 2, *timeout)) for host in (a,)]
        seconds += [start(host, tmp_path, *by_hand(tcp(a), 1, 2, *timeout)) for host in (b, c)]
        seconds.append(start(c, tmp_path, *by_hand(tcp(a), 2, 3, *timeout)))
        told = [sentence(each) for each in all_end(seconds, 2)]
        assert "rank 0 is claimed twice" in told[0]
        assert ["rank 1 is claimed twice" in each for each in told[1:3]] == [True, True]
        assert "disagree on the world size" in told[3]
        folder = [
            start(host, tmp_path, *by_hand(tcp(a, PORT + 1), r, 2, "--output", run)) for r, host in enumerate((a, c))
        ]
        for each in all_end(folder, 2):
            assert f"{run} is in use by another run" in sentence(each)
        assert [rank.poll() for rank in job] == [None, None]
        for rank in job:
            rank.send_signal(signal.SIGTERM)
        for each in all_end(job, 75):
            assert "claimed twice" not in each.err


@pytest.mark.parametrize("when", ["roll call", "training"])
def test_a_file_that_a_dead_run_left_is_explained_and_cleared_on_request(
    when: str, tmp_path: Path, spawned: Callable[..., dict[str, bytes]]
) -> None:
    """Each rank runs where another one did before, so that none can see whether the one in its place is dead."""
    meeting, dead = tmp_path / "meeting", tmp_path / "dead"
    where = f"file://{meeting}"
    with hosts(3) as (a, b, c):
        size = 3 if when == "roll call" else 2  # and so nobody comes as rank 2
        killed = [
            start(host, tmp_path, *by_hand(where, rank, size, "--output", dead, "--max-steps", 5000, "--epochs", 5000))
            for rank, host in enumerate((a, b))
        ]
        if when == "roll call":
            until(lambda: meeting.exists() and meeting.read_bytes().count(b"nonce") >= 3)  # size, and two claims
        else:
            until(lambda: len(events(dead, "step")) > 1)
            # While it lives, no request takes its place, though the one who asks cannot see it.
            asking = ("--clear-meeting", "--timeout", "30")
            refused = [start(host, tmp_path, *by_hand(where, r, 2, *asking)) for r, host in ((0, c), (1, c))]
            for each in all_end(refused, 2):
                assert "is claimed twice" in sentence(each)
        for rank in killed:
            assert rank.poll() is None
            os.killpg(rank.pid, signal.SIGKILL)
        for rank in killed:
            end(rank)
        words = ("--output", tmp_path / "run", *STEPS)
        for each in all_end(start_all((b, a), tmp_path, where, *words), 2):
            assert re.search(rf"left over from another run: .* remove {meeting} or give every rank --clear-", each.err)
        all_end(start_all((b, a), tmp_path, where, *words, "--clear-meeting"))
    assert weights(tmp_path / "run") == spawned(2)
    assert not meeting.exists()

"""Ranks started by hand on several hosts: the bits of one host, and each network fault explained in time."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ..command import ROOT, Ended, Running, end, events, gone, processes, sentence, until, weights
from ..command import command as run_command
from .hosts import Host, hosts

pytestmark = [pytest.mark.usefixtures("namespaces"), pytest.mark.long]

SLOW = pytest.mark.slow
PORT = 29500
DIGITS = ("train", "digits", "--strategy", "ddp", "--accelerator", "cpu", "--batch", 60, "--log-every", 1)
STEPS = ("--max-steps", 4)
ENDLESS = ("--max-steps", 10**6, "--epochs", 10**6)
Spawned = Callable[..., dict[str, bytes]]


def tcp(host: Host, port: int = PORT) -> str:
    return f"tcp://{host.address}:{port}"


def start(host: Host, folder: Path, where: str, rank: int, size: int, *words: object, **env: str) -> Running:
    """Start one rank on a host."""
    by_hand = ("--init-method", where, "--rank", rank, "--world-size", size)
    return host.lockstep(folder, *DIGITS, *by_hand, *words, **env)


def start_all(members: Sequence[Host], folder: Path, where: str, *words: object, **env: str) -> list[Running]:
    """Start a rank on each host, in their order."""
    return [start(host, folder, where, rank, len(members), *words, **env) for rank, host in enumerate(members)]


def all_end(ranks: Sequence[Running], code: int = 0) -> list[Ended]:
    """Wait for the ranks' ends; each has to have this exit code."""
    ended = [end(rank, 180) for rank in ranks]
    assert [each.code for each in ended] == [code] * len(ranks), ended
    return ended


def sentences(ranks: Sequence[Running], code: int = 2) -> list[str]:
    return [sentence(each, code=code) for each in all_end(ranks, code)]


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> Spawned:
    """Return the weights of so many ranks on one host, which exchange by gloo on one processor, as hosts here do."""
    known: dict[object, dict[str, bytes]] = {}

    def of(size: int, *steps: object) -> dict[str, bytes]:
        if (size, steps) not in known:
            folder = tmp_path_factory.mktemp("spawned")
            words = (*DIGITS, "--devices", size, "--collectives", "gloo", "--output", "run", *(steps or STEPS))
            affinity = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {min(affinity)})
            try:
                ended = run_command(folder, *words)
            finally:
                os.sched_setaffinity(0, affinity)
            assert ended.code == 0, ended.err
            known[size, steps] = weights(folder / "run")
        return known[size, steps]

    return of


@pytest.mark.parametrize("way", ["tcp", *(pytest.param(way, marks=SLOW) for way in ("file", "env", "torchrun"))])
def test_ranks_of_three_hosts_come_to_the_bits_of_one(way: str, tmp_path: Path, spawned: Spawned) -> None:
    meeting = tmp_path / "meeting"
    words = ("--output", "run", *STEPS)
    with hosts(3) as members:
        address = members[0].address
        if way == "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--nnodes", "3", "--master-addr", address]
            started = [
                host.lockstep(tmp_path, *DIGITS, *words, through=[*torchrun, "--node-rank", str(rank)])
                for rank, host in enumerate(members)
            ]
        else:
            where = {"tcp": tcp(members[0]), "file": f"file://{meeting}", "env": "env://"}[way]
            env = {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)} if way == "env" else {}
            started = start_all(members, tmp_path, where, *words, **env)
        first, *others = all_end(started)
    assert weights(tmp_path / "run") == spawned(3)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["topology"]["nodes"], manifest["topology"]["local_size"]) == (3, 1)
    if way != "torchrun":
        assert (first.err, [other.out for other in others]) == ("", ["", ""])
    assert not meeting.exists()


def test_traffic_takes_the_interface_that_it_is_told(tmp_path: Path) -> None:
    """Rank 1 alone is told; rank 0 follows it. Both meet over the first network, and train over the second."""
    with hosts(2, networks=2) as (a, b):
        absent = start(b, tmp_path, tcp(a), 1, 2, "--interface", "eth7")
        unlike = [
            start(host, tmp_path, tcp(a, PORT + 1), r, 2, "--interface", f"eth{r}") for r, host in ((0, a), (1, b))
        ]
        (told,) = sentences([absent])
        assert "--interface eth7: this host, b, has no such one, but eth0 (10.77.0.2), eth1 (10.77.1.2)" in told
        for told in sentences(unlike):
            assert re.search(r"--interface eth\d \(10\S+\) does not lead to rank", told)
            assert "give each rank the interface of one network, of those here: " in told
        before = [host.sent_bytes(network) for host in (a, b) for network in (0, 1)]
        ranks = [start(a, tmp_path, tcp(a), 0, 2, "--output", "run", *STEPS)]
        ranks.append(start(b, tmp_path, tcp(a), 1, 2, "--interface", "eth1", *STEPS))
        all_end(ranks)
        after = [host.sent_bytes(network) for host in (a, b) for network in (0, 1)]
    first_a, second_a, first_b, second_b = (ours - theirs for ours, theirs in zip(after, before, strict=True))
    model_bytes = sum(path.stat().st_size for path in (tmp_path / "run/checkpoints/last").glob("*.safetensors"))
    assert min(second_a, second_b) > model_bytes  # one all-reduce's gradients, and there were several
    assert max(first_a, first_b) < min(second_a, second_b) / 4


def test_an_address_that_is_not_rank_0s_is_explained(tmp_path: Path) -> None:
    """Debian's habit: a host's own name is 127.0.1.1 there, and its address elsewhere. And rank 0 on a wrong host."""
    with hosts(2) as (a, b):
        named = start_all((a, b), tmp_path, f"tcp://a:{PORT}", "--timeout", 8)
        swapped = start_all((b, a), tmp_path, tcp(a, PORT + 1), "--timeout", 8)
        here, there, wrong, waiting = sentences([*named, *swapped])
    assert "a means 127.0.1.1 here, which is this host (a) to itself alone" in here
    assert "give one of its addresses that they reach (10.77.0.1), or put that in /etc/" in here
    assert "(Connection refused); a means 10.77.0.1 on b, and rank 0 may know the name as another" in there
    assert "the address is not one of this machine; give the address of the machine that rank 0 runs on" in wrong
    assert "nothing answers there within --timeout 8 s (Connection refused)" in waiting


def test_ports_that_a_firewall_keeps_closed_are_explained_in_time(tmp_path: Path) -> None:
    with hosts(2) as members:
        for host in members:
            host.filter(f"tcp flags & (syn | ack) == syn tcp dport != {PORT} drop")
        begun = time.monotonic()
        for told in sentences(start_all(members, tmp_path, tcp(members[0]), "--timeout", 10), code=1):
            assert "a firewall keeps ports between the nodes closed" in told
        assert time.monotonic() - begun < 45


@pytest.mark.parametrize("victim", [pytest.param(0, marks=SLOW), 2])
def test_a_host_that_is_cut_off_ends_the_run_in_time(victim: int, tmp_path: Path) -> None:
    stall_s = 6
    with hosts(3) as members:
        words = ("--output", "run", "--stall-timeout", stall_s, *ENDLESS)
        ranks = start_all(members, tmp_path, tcp(members[0]), *words)
        until(lambda: len(events(tmp_path / "run", "step")) > 3)
        found = [each for rank in ranks for each in processes(rank)]
        members[victim].cut()
        cut_s = time.monotonic()
        all_end(ranks, 1)
        assert time.monotonic() - cut_s < stall_s + 10
        assert gone(found)


_STRANGER = """
import sys
from tests.real.test_by_hand import visit
visit(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""
_TLS = bytes.fromhex("16030100c8010000c40303") + bytes(range(190))
_TORCHS = b"\x00" + 0x3C85F7CE.to_bytes(4, "little")[:2]  # the beginning of its store's own greeting
_SAID = (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", _TLS, b"SSH-2.0-x\r\n", b"\x00" * 300, b"\xff" * 300, _TORCHS)


def listening(process: int) -> list[int]:
    """Return the ports on which anything listens in the network of a process."""
    try:
        rows = [row.split() for row in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
    except OSError:
        return []
    return sorted(int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A")


def visit(address: str, process: int, least: int) -> None:
    """Once so many ports are open, say there what is no rank's word, and nothing 200 times; hold on, or be gone."""
    until(lambda: len(listening(process)) >= least)
    held = []
    words = [*_SAID, *(random.Random(seed).randbytes(300) for seed in range(20)), *[b""] * 200]
    for port in listening(process):
        for said in words:
            for is_held in (True, False):
                peer = socket.create_connection((address, port), 5)
                peer.sendall(said)
                if is_held:
                    held.append(peer)
                else:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    peer.close()
    print("done", file=sys.stderr, flush=True)
    signal.pause()


def test_strangers_at_the_port_are_not_heard(tmp_path: Path, spawned: Spawned) -> None:
    """While rank 0 waits for the others, and while they train: at the store's port, and at gloo's."""
    with hosts(3) as (a, b, stranger):
        steps = ("--max-steps", 100, "--epochs", 100)
        first = start(a, tmp_path, tcp(a), 0, 2, "--output", "run", *steps)
        until(lambda: listening(first.pid) == [PORT])
        visits = [
            stranger.popen([sys.executable, "-c", _STRANGER, a.address, first.pid, least], cwd=ROOT) for least in (1, 2)
        ]
        visits[0].says("done")
        second = start(b, tmp_path, tcp(a), 1, 2, "--output", "run", *steps)
        visits[1].says("done")
        assert (first.poll(), second.poll()) == (None, None)  # they were there to be disturbed
        assert [each.err for each in all_end([first, second])] == ["", ""]
    assert weights(tmp_path / "run") == spawned(2, *steps)


def test_a_file_that_a_dead_run_left_is_explained_and_cleared_on_request(tmp_path: Path, spawned: Spawned) -> None:
    """Each rank runs where another one did before, so that none can see whether the one in its place is dead."""
    meeting, dead = tmp_path / "meeting", tmp_path / "dead"
    where = f"file://{meeting}"
    with hosts(3) as (a, b, c):
        killed = start_all((a, b), tmp_path, where, "--output", dead, *ENDLESS)
        until(lambda: len(events(dead, "step")) > 1)
        # While it lives, no request takes its place, though the one who asks cannot see it.
        for told in sentences(start_all((c, c), tmp_path, where, "--clear-meeting", "--timeout", 30)):
            assert "is claimed twice" in told
        for rank in killed:
            assert rank.poll() is None
            os.killpg(rank.pid, signal.SIGKILL)
            end(rank)
        words = ("--output", "run", *STEPS)
        for told in sentences(start_all((b, a), tmp_path, where, *words)):
            assert re.search(rf"left over from another run: .* remove {meeting} or give every rank --clear-", told)
        all_end(start_all((b, a), tmp_path, where, *words, "--clear-meeting"))
    assert weights(tmp_path / "run") == spawned(2)
    assert not meeting.exists()

"""Ranks started by hand on two hosts: the bits of one host, and each network fault explained in time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..command import GATED, Ended, Running, at, end, gone, processes, sentence, weights
from .hosts import Host, hosts

pytestmark = pytest.mark.long

PORT = 29500
ENDLESS = ("--epochs", 10**6)


def tcp(host: Host, port: int = PORT) -> str:
    return f"tcp://{host.address}:{port}"


def start(host: Host, folder: Path, where: str, rank: int, *words: object) -> Running:
    """Start one rank of two on a host."""
    by_hand = ("--init-method", where, "--rank", rank, "--world-size", 2)
    return host.lockstep(folder, *GATED, *by_hand, *words)


def start_both(members: Sequence[Host], folder: Path, where: str, *words: object) -> list[Running]:
    return [start(host, folder, where, rank, *words) for rank, host in enumerate(members)]


def all_end(ranks: Sequence[Running], code: int = 0) -> list[Ended]:
    """Wait for the ranks' ends; each has to have this exit code."""
    ended = [end(rank) for rank in ranks]
    assert [each.code for each in ended] == [code] * len(ranks), ended
    return ended


def sentences(ranks: Sequence[Running], code: int = 2) -> list[str]:
    return [sentence(each, code=code) for each in all_end(ranks, code)]


def test_ranks_of_two_hosts_come_to_the_bits_of_one(tmp_path: Path, undisturbed: Path) -> None:
    with hosts(2) as (a, b):
        first, other = all_end(start_both((a, b), tmp_path, tcp(a)))
        assert (first.err, other.out) == ("", "")
    assert weights(tmp_path / "run") == weights(undisturbed)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["topology"]["nodes"], manifest["topology"]["local_size"]) == (2, 1)


def test_traffic_takes_the_interface_that_it_is_told(tmp_path: Path) -> None:
    """Rank 1 alone is told; rank 0 follows it. Both meet over the first network, and train over the second."""
    with hosts(2, networks=2) as (a, b):
        (told,) = sentences([start(b, tmp_path, tcp(a), 1, "--interface", "eth7")])
        assert "this host, b, has no interface of this name with an address; it has eth0 (10.77.0.2), eth1 (" in told
        before = [host.sent_bytes(network) for host in (a, b) for network in (0, 1)]
        ranks = [start(a, tmp_path, tcp(a), 0), start(b, tmp_path, tcp(a), 1, "--interface", "eth1")]
        all_end(ranks)
        after = [host.sent_bytes(network) for host in (a, b) for network in (0, 1)]
    first_a, second_a, first_b, second_b = (ours - theirs for ours, theirs in zip(after, before, strict=True))
    model_bytes = sum(path.stat().st_size for path in (tmp_path / "run/checkpoints/last").glob("model*"))
    assert min(second_a, second_b) > 10 * model_bytes  # of 60 steps, each of which exchanges gradients
    assert max(first_a, first_b) < min(second_a, second_b) / 4


def test_an_address_that_is_not_rank_0s_is_explained(tmp_path: Path) -> None:
    """Debian's habit: a host's own name is 127.0.1.1 there, and its address elsewhere. And rank 0 on a wrong host."""
    with hosts(2) as (a, b):
        named = start_both((a, b), tmp_path, f"tcp://a:{PORT}", "--timeout", 5)
        swapped = start_both((b, a), tmp_path, tcp(a, PORT + 1), "--timeout", 5)
        here, there, wrong, waiting = sentences([*named, *swapped])
    assert "a means 127.0.1.1 here, which is this host (a) to itself alone" in here
    assert "give one of its addresses that they reach (10.77.0.1), or put that in /etc/" in here
    assert "(Connection refused); a means 10.77.0.1 on b, and rank 0 may know the name as another" in there
    assert "the address is not one of this machine; give the address of the machine that rank 0 runs on" in wrong
    assert "nothing answers there within --timeout 5 s (Connection refused)" in waiting


def test_ports_that_a_firewall_keeps_closed_are_explained_in_time(tmp_path: Path) -> None:
    with hosts(2) as members:
        for host in members:
            host.filter(f"tcp flags & (syn | ack) == syn tcp dport != {PORT} drop")
        begun = time.monotonic()
        for told in sentences(start_both(members, tmp_path, tcp(members[0]), "--timeout", 10), code=1):
            assert "a firewall keeps ports between the nodes closed" in told
        assert time.monotonic() - begun < 45


def test_a_host_that_is_cut_off_ends_the_run_in_time(tmp_path: Path) -> None:
    stall_s = 5
    with hosts(2) as members:
        ranks = start_both(members, tmp_path, tcp(members[0]), "--stall-timeout", stall_s, *ENDLESS)
        at(tmp_path, 3)
        found = [each for rank in ranks for each in processes(rank)]
        members[0].cut()
        cut_s = time.monotonic()
        all_end(ranks, 1)
        assert time.monotonic() - cut_s < stall_s + 10
        assert gone(found)

"""The hosts of these tests are apart as real ones are, and leave nothing behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from ..command import gone, until
from .hosts import Host, hosts

pytestmark = [pytest.mark.usefixtures("namespaces"), pytest.mark.long]

_ECHOES = """
import socket
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    while True:
        peer, _ = server.accept()
        while said := peer.recv(100):
            peer.sendall(said)
"""
_TURNS = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=5) as peer:
    for turn in range(5):
        begun = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        print(time.perf_counter() - begun)
"""


def _turn_s(host: Host, address: str) -> float | None:
    """Return the seconds of the fastest turn to an echo and back; None where it cannot be reached."""
    ended = host.run([sys.executable, "-c", _TURNS, address])
    return min(map(float, ended.out.split())) if ended.code == 0 else None


def _echo(host: Host) -> None:
    stdout = host.popen([sys.executable, "-c", _ECHOES]).stdout
    assert stdout is not None
    assert stdout.readline() == "ready\n"


def test_hosts_have_names_addresses_and_networks_of_their_own() -> None:
    with hosts(2, networks=2) as (a, b), hosts(2) as (other, _):
        assert a.run(["hostname"]).out == "a\n"
        assert a.run(["getent", "hosts", "a", "b"]).out.split() == ["127.0.1.1", "a", "10.77.0.2", "b"]
        boots = {host.do("cat /proc/sys/kernel/random/boot_id") for host in (a, b, other)}
        assert len({*boots, Path("/proc/sys/kernel/random/boot_id").read_text()}) == 4
        assert a.do("ip route show default") == ""
        assert other.address == a.address
        _echo(a)
        assert _turn_s(b, a.address) is not None
        assert _turn_s(b, a.addresses[1]) is not None
        assert _turn_s(other, a.address) is None  # refused: it is that one's own


def test_a_link_can_be_slow_and_cut() -> None:
    with hosts(2) as (a, b):
        _echo(a)
        assert (_turn_s(b, a.address) or 1) < 0.02
        b.delay(30)
        a.delay(30)
        assert (_turn_s(b, a.address) or 0) >= 0.06
        b.cut()
        assert _turn_s(b, a.address) is None
        b.join()
        assert (_turn_s(b, a.address) or 0) >= 0.06
        sent = b.sent_bytes()
        assert _turn_s(b, a.address)
        assert b.sent_bytes() > sent
        a.filter("tcp dport 5000 drop")
        assert _turn_s(b, a.address) is None


def test_nothing_outlives_its_host() -> None:
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    with hosts(1) as (a,):
        left = a.popen(["sh", "-c", "trap '' TERM HUP; setsid sleep 600 & sleep 600"])
        until(lambda: len(psutil.Process(left.pid).children(recursive=True)) == 2)
        found = [psutil.Process(left.pid), *psutil.Process(left.pid).children(recursive=True)]
        begun = time.monotonic()
    assert gone(found)
    assert time.monotonic() - begun < 10
    assert {path.name for path in Path("/sys/class/net").iterdir()} == links


_ABANDONS = """
import sys, time
from tests.real.hosts import hosts
with hosts(1) as (a,):
    print(a.popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
"""


def test_nothing_outlives_tests_that_are_killed() -> None:
    with hosts(1) as (outer,):
        tests = outer.popen([sys.executable, "-c", _ABANDONS], cwd=Path(__file__).parents[2])
        assert tests.stdout is not None
        process = psutil.Process(int(tests.stdout.readline()))
        assert process.is_running()
        os.kill(tests.pid, 9)
        until(lambda: gone([process]), 10)

"""The hosts of these tests are as separate as real ones, and leave nothing behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from ..command import ROOT, gone, until
from .hosts import Host, hosts

pytestmark = [pytest.mark.usefixtures("namespaces"), pytest.mark.long]

_LISTENS = "import socket; s = socket.create_server(('', 5000)); print(flush=True); [s.accept() for _ in range(99)]"
_CONNECTS = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=2)"


def _reaches(host: Host, address: str) -> bool:
    return host.popen([sys.executable, "-c", _CONNECTS, address]).wait() == 0


def test_hosts_are_separate_and_can_be_cut_off() -> None:
    with hosts(2, networks=2) as (a, b), hosts(1) as (other,):
        assert a.do("hostname") == "a\n"
        assert a.do("getent hosts a b").split() == ["127.0.1.1", "a", "10.77.0.2", "b"]
        boots = {host.do("cat /proc/sys/kernel/random/boot_id") for host in (a, b, other)}
        assert len({*boots, Path("/proc/sys/kernel/random/boot_id").read_text()}) == 4
        assert a.do("ip route show default") == ""
        listening = a.popen([sys.executable, "-c", _LISTENS]).stdout
        assert listening is not None
        listening.readline()
        assert [_reaches(b, address) for address in a.addresses] == [True, True]
        assert not _reaches(other, a.address)  # its own address, where nobody listens
        b.cut()
        assert [_reaches(b, address) for address in a.addresses] == [False, True]
        b.join()
        assert _reaches(b, a.address)
        a.filter("tcp dport 5000 drop")
        assert not _reaches(b, a.address)


_ABANDONS = """
import time
from tests.real.hosts import hosts
with hosts(1) as (a,):
    print(a.popen(["sh", "-c", "trap '' TERM HUP; setsid sleep 600 & sleep 600"]).pid, flush=True)
    time.sleep(600)
"""


def test_nothing_outlives_tests_that_are_killed() -> None:
    with hosts(1) as (outer,):
        tests = outer.popen([sys.executable, "-c", _ABANDONS], cwd=ROOT)
        assert tests.stdout is not None
        shell = psutil.Process(int(tests.stdout.readline()))
        until(lambda: len(shell.children()) == 2)
        found = [shell, *shell.children()]
        os.kill(tests.pid, 9)
        until(lambda: gone(found), 10)

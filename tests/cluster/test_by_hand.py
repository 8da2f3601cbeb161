"""Ranks that people start by hand on several hosts: the same bits as on one, and every fault of a network is told."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..command import Ended, Running, end, events, gone, sentence, until, weights
from .hosts import Host, hosts

pytestmark = pytest.mark.usefixtures("namespaces")

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
def spawned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, bytes]]:
    """Return the weights that so many ranks of one machine come to, which has one processor, as each host here."""
    known: dict[int, dict[str, bytes]] = {}

    def of(size: int) -> dict[str, bytes]:
        if size not in known:
            folder = tmp_path_factory.mktemp("spawned")
            words = command("--launcher", "spawn", "--devices", size, "--output", folder, *STEPS)
            bound = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]
            done = subprocess.run([*bound, *words], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            known[size] = weights(folder)
            assert known[size]
        return known[size]

    return of


@pytest.mark.parametrize("scheme", ["tcp", "file", "env"])
def test_ranks_of_three_hosts_come_to_the_bits_of_one(
    scheme: str, tmp_path: Path, spawned: Callable[[int], dict[str, bytes]]
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


def test_torchrun_on_two_nodes_comes_to_the_bits_of_one(
    tmp_path: Path, spawned: Callable[[int], dict[str, bytes]]
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


def test_a_slow_and_lossy_network_changes_nothing_but_time(
    tmp_path: Path, spawned: Callable[[int], dict[str, bytes]]
) -> None:
    with hosts(3) as members:
        for host in members:
            host.delay(10, loss=1)  # both ways: 20 ms a turn
        all_end(start_all(members, tmp_path, tcp(members[0]), "--output", tmp_path / "run", *STEPS))
    assert weights(tmp_path / "run") == spawned(3)

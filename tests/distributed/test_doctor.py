"""`lockstep doctor` among real ranks: it ends in bounded time, leaves nothing, and names the rank that is at fault."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from lockstep.config import RunConfig
from lockstep.doctor import collectives, copies, examine, software
from lockstep.errors import LockstepError
from lockstep.launchers.table import launch
from lockstep.topology import Topology
from lockstep.world import World

from ..cluster.hosts import missing
from ..command import ROOT, Ended, command, end, sentence, start
from ..needs import need
from ..pool import RankPool
from ..ports import free_port
from .ranks import config

GROUPS = ["host", "devices", "network", "collectives", "disk"]


def _found(ended: Ended) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(ended.out)["findings"]}


def test_two_ranks_are_examined_and_nothing_stays(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--devices", 2, "--json", "--output", "runs/new")
    assert done.code == 0, done
    told = json.loads(done.out)
    assert told["verdict"] in ("green", "yellow")
    assert told["ranks"] == 2
    assert list(dict.fromkeys(each["group"] for each in told["findings"])) == GROUPS
    found = _found(done)
    assert {"versions", "processors", "shared memory", "open files", "host name", "write speed"} <= found.keys()
    for name in ("ports", "rank to rank", "shared"):
        assert found[name]["state"] == "green"
    assert found["all-reduce 8 B"]["unit"] == "s"
    assert found["all-reduce 8 B"]["value"] > 0
    largest = [each for name, each in found.items() if name.startswith("all-reduce")][-1]
    assert 0 < largest["value"] < 1e12
    assert found["memory copy"]["value"] > 0
    assert not any("  " in each["words"] for each in told["findings"])
    assert not [*tmp_path.iterdir()]


def test_one_rank_is_enough_and_low_limits_are_told(tmp_path: Path) -> None:
    words = f"ulimit -S -n 200; exec {sys.executable} -m lockstep doctor"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["sh", "-c", words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    (limit,) = [at for at, line in enumerate(lines) if "open files" in line]
    assert lines[limit].split()[0] == "yellow"
    assert "ulimit -n 1024" in lines[limit + 1]
    assert any("all-reduce" in line and "--devices 2" in line for line in lines)
    assert lines[-1].startswith("yellow: a job can run")


def test_torchrun_starts_an_examination(tmp_path: Path) -> None:
    through = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    done = command(tmp_path, "doctor", "--json", through=through)
    assert done.code == 0, done
    assert _found(done)["ports"]["state"] == "green"


def test_elastic_ranks_are_examined(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--json", "--devices", 2, "--max-restarts", 1)
    assert done.code == 0, done
    assert _found(done)["rank to rank"]["state"] == "green"
    assert not [*tmp_path.iterdir()]


def test_ranks_that_meet_in_a_file_are_examined(tmp_path: Path) -> None:
    meet = ("doctor", "--json", "--init-method", f"file://{tmp_path}/meeting", "--world-size", 2, "--rank")
    with start(tmp_path, *meet, 1) as other:
        done = command(tmp_path, *meet, 0)
        assert end(other) == Ended(0, "", "")
    assert done.code == 0, done
    assert _found(done)["rank to rank"]["state"] == "green"
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_red_and_nothing_else_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command(tmp_path, "doctor", "--devices", 2, "--output", "file")
    assert "1 finding is red (output)" in sentence(done, code=1)
    assert "rank to rank" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture(autouse=True)
def _own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which interface this process was bound to when it was a rank: what it starts would keep to that."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class _Rank1:
    """Is rank 1 in this process, as `be` has it, while the command is rank 0."""

    def __init__(self, be: Callable[..., Any]) -> None:
        self.before_world = be

    def __call__(self, config: RunConfig, world: World) -> Any:
        raise AssertionError


def _beside(folder: Path, be: Callable[..., Any], *words: object) -> tuple[Ended, float]:
    """Return how rank 0's command ended while this process is rank 1, and how late: the seconds since both met.

    Those that it took them to meet, which say how busy the machine is, are taken off.
    """
    begun_s = time.monotonic()
    url = f"tcp://127.0.0.1:{free_port()}"
    process = start(folder, "doctor", "--json", "--init-method", url, "--rank", 0, "--world-size", 2, *words)
    met_s: list[float] = []

    def ours(*about: Any) -> None:
        met_s.append(time.monotonic())
        be(*about)

    def rank_1() -> None:
        with contextlib.suppress(LockstepError):
            launch(_Rank1(ours), config(init_method=url, rank=1, world_size=2, stall_timeout=_STALL_S), {})

    thread = threading.Thread(target=rank_1)
    thread.start()
    ended = end(process)
    late_s = time.monotonic() - met_s[0] - (met_s[0] - begun_s)
    _LEFT.set()
    thread.join()
    _LEFT.clear()
    return ended, late_s


_STALL_S = 8.0
_LEFT = threading.Event()
_ASKED = examine.Asked(Path("runs"), None, chosen_cpu=False)


def _silent(*about: Any) -> None:
    _LEFT.wait()


def test_a_rank_that_is_silent_is_named_in_bounded_time(tmp_path: Path) -> None:
    ended, late_s = _beside(tmp_path, _silent, "--stall-timeout", _STALL_S)
    assert ended.code == 1
    assert late_s < 3 * _STALL_S
    silent = _found(ended)["ranks"]
    assert (silent["state"], silent["ranks"]) == ("red", [1])
    assert "fell silent at host" in silent["words"]
    assert _found(ended)["write speed"]["state"] in ("green", "yellow")


def _examined(config: RunConfig, topology: Topology, device: torch.device, store: Store) -> None:
    examine.examine(config, topology, device, store, _ASKED)


def test_a_rank_that_fails_in_all_reduce_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[collectives.Measured]:
        raise ValueError("no buffer space")

    monkeypatch.setattr(collectives, "all_reduces", broken)
    ended, late_s = _beside(tmp_path, _examined, "--stall-timeout", _STALL_S)
    assert ended.code == 1
    assert late_s < 3 * _STALL_S
    (failed,) = [each for each in json.loads(ended.out)["findings"] if each["state"] == "red"]
    assert (failed["name"], failed["ranks"]) == ("all-reduce", [1])
    assert "ValueError: no buffer space" in failed["words"]
    assert _found(ended)["write speed"]["state"] in ("green", "yellow")


def test_ranks_with_another_torch_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = software.versions("") | {"torch": "2.11.0+other"}
    monkeypatch.setattr(software, "versions", lambda driver: ours)
    ended, _ = _beside(tmp_path, _examined, "--stall-timeout", 30)
    assert ended.code == 1
    assert "2.11.0+other on rank 1" in _found(ended)["torch versions"]["words"]
    assert _found(ended)["ports"]["state"] == "green"


def _wrong_sums(world: World, faulty: int) -> list[int]:
    if world.rank == faulty:
        total = World.sum

        def flip(self: World, tensor: Tensor) -> Tensor:
            found = total(self, tensor)
            found[-1] += 1
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(World, "sum", flip)
            return [each.wrong for each in collectives.all_reduces(world, 60)]
    return [each.wrong for each in collectives.all_reduces(world, 60)]


def test_a_wrong_sum_is_seen_on_its_rank(pool: RankPool) -> None:
    one, two, three = pool.run(3, _wrong_sums, 1)
    assert set(one) == set(three) == {0}
    assert set(two) == {1}


def _changed_on_the_way(world: World, faulty: int) -> list[int]:
    """Send as rank `faulty` would over a network that flips one bit."""
    if world.rank != faulty:
        return copies.between_ranks(world, 1)
    plan = dist.P2POp

    def spoiled(operation: Callable[..., Any], tensor: Tensor, *where: Any, **how: Any) -> Any:
        if operation is dist.isend:
            tensor[tensor.numel() // 2] ^= 4
        return plan(operation, tensor, *where, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "P2POp", spoiled)
        return copies.between_ranks(world, 1)


def test_a_flipped_bit_is_seen_by_every_receiver(pool: RankPool) -> None:
    assert pool.run(3, _changed_on_the_way, 2) == [[2], [2], []]
    assert pool.run(3, copies.between_ranks, 1) == [[], [], []]


@pytest.fixture
def two_hosts() -> Iterator[Callable[..., list[str]]]:
    """Two hosts as network namespaces, 10.78.0.1 and 10.78.0.2: gives what runs a command on one of them."""
    need([why] if (why := missing()) else [tool for tool in ("iptables",) if shutil.which(tool) is None])
    names = [f"lockstep-{os.getpid()}-{side}" for side in "ab"]

    def call(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    try:
        for name in names:
            call("ip", "netns", "add", name)
        ends = [("ip", "link", "add", "v0", "netns", names[0]), ("peer", "name", "v0", "netns", names[1])]
        call(*ends[0], "type", "veth", *ends[1])
        for number, name in enumerate(names, start=1):
            call("ip", "-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "v0")
            for link in ("lo", "v0"):
                call("ip", "-n", name, "link", "set", link, "up")
        yield lambda host, *words: ["ip", "netns", "exec", names[host], *words]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _on_both(on: Callable[..., list[str]], folder: Path) -> list[Ended]:
    meet = ["--init-method", "tcp://10.78.0.1:29500", "--world-size", "2", "--timeout", "60", "--rank"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    ranks = []
    for rank in range(2):
        named = f'hostname host{rank} && exec "$@"'
        what = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            named,
            "sh",
            sys.executable,
            "-m",
            "lockstep",
            "doctor",
            "--json",
            *meet,
            str(rank),
        ]
        ranks.append(subprocess.Popen(on(rank, *what), cwd=folder, env=env, stdout=-1, stderr=-1, text=True))
    return [end(rank) for rank in ranks]


def test_a_firewall_between_hosts_is_named_with_what_opens_it(
    two_hosts: Callable[..., list[str]], tmp_path: Path
) -> None:
    first, second = _on_both(two_hosts, tmp_path)
    assert (first.code, second.code) == (0, 0), first.out + first.err
    assert second.out == ""
    found = _found(first)
    assert found["ports"]["state"] == "green"
    assert found["clock"]["state"] == "green"
    assert abs(found["clock"]["value"]) < 0.1
    assert found["v0"]["unit"] == "bytes/s"
    assert json.loads(first.out)["hosts"] == ["host0", "host1"]

    shut = ("iptables", "-I", "INPUT", "-p", "tcp", "--syn", "--dport", "30000:65535", "-j", "DROP")
    subprocess.run(two_hosts(1, *shut), check=True)
    first, _ = _on_both(two_hosts, tmp_path)
    assert first.code == 1
    found = _found(first)
    assert found["ports"]["state"] == "red"
    assert found["ports"]["words"].startswith("rank 0 (host0) does not reach rank 1 (host1) at 10.78.0.2: no answer")
    assert "from 10.78.0.1 into host1" in found["ports"]["fix"]
    assert found["all-reduce"]["state"] == "unchecked"
    assert json.loads(first.out)["seconds"] < 60

"""`lockstep doctor` under each launcher, and between hosts of which one has a firewall."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..command import ROOT, Ended, command, end, start
from ..needs import need
from ..ports import free_port
from .hosts import missing

GROUPS = ["host", "devices", "network", "collectives", "disk"]


def _found(ended: Ended) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(ended.out)["findings"]}


def test_two_ranks_are_examined_and_nothing_stays(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--devices", 2, "--json", "--output", "runs/new")
    assert done.code == 0, done
    told = json.loads(done.out)
    states = {each["state"] for each in told["findings"]}
    assert "red" not in states
    assert told["verdict"] == ("yellow" if "yellow" in states else "green"), "the worst of them"
    assert told["ranks"] == 2
    assert list(dict.fromkeys(each["group"] for each in told["findings"])) == GROUPS
    found = _found(done)
    assert {"versions", "processors", "shared memory", "open files", "host name", "write speed"} <= found.keys()
    assert {found[name]["state"] for name in ("ports", "rank to rank", "shared")} == {"green"}
    assert found["all-reduce 8 B"]["unit"] == "s"
    assert found["all-reduce 8 B"]["value"] > 0
    largest = [each for name, each in found.items() if name.startswith("all-reduce")][-1]
    assert 0 < largest["value"] < 1e12
    assert found["memory copy"]["value"] > 0
    assert not any("  " in each["words"] for each in told["findings"])
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "elastic", "file"])
def test_ranks_of_every_launcher_are_examined(tmp_path: Path, launcher: str) -> None:
    if launcher == "torchrun":
        through = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
        done = command(tmp_path, "doctor", "--json", through=through)
    elif launcher == "elastic":
        done = command(tmp_path, "doctor", "--json", "--devices", 2, "--max-restarts", 1)
    else:
        meet = ("doctor", "--json", "--init-method", f"file://{tmp_path}/meeting", "--world-size", 2, "--rank")
        with start(tmp_path, *meet, 1) as other:
            done = command(tmp_path, *meet, 0)
            assert end(other) == Ended(0, "", "")
    assert done.code == 0, done
    found = _found(done)
    assert (found["ports"]["state"], found["rank to rank"]["state"]) == ("green", "green")
    assert not [*tmp_path.iterdir()]


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
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    meet = "--init-method tcp://10.78.0.1:29500 --world-size 2 --timeout 60 --rank"
    ranks = []
    for rank in range(2):
        named = f"hostname host{rank} && exec {sys.executable} -m lockstep doctor --json {meet} {rank}"
        what = on(rank, "unshare", "--uts", "sh", "-c", named)
        ranks.append(subprocess.Popen(what, cwd=folder, env=env, stdout=-1, stderr=-1, text=True))
    return [end(rank) for rank in ranks]


@pytest.mark.long
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

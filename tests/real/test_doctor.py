"""`lockstep doctor` under each launcher, and between hosts of which one has a firewall."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..command import Ended, command, end
from ..ports import free_port
from .hosts import Host, hosts

GROUPS = ["host", "devices", "network", "collectives", "disk"]


def _found(ended: Ended) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(ended.out)["findings"]}


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.long)])
def test_two_ranks_are_examined_and_nothing_stays(launcher: str, tmp_path: Path) -> None:
    if launcher == "spawn":
        done = command(tmp_path, "doctor", "--devices", 2, "--json", "--output", "runs/new")
    else:
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
        done = command(tmp_path, "doctor", "--json", "--output", "runs/new", through=torchrun)
    assert done.code == 0, done
    told, found = json.loads(done.out), _found(done)
    assert told["verdict"] == ("yellow" if "yellow" in {each["state"] for each in found.values()} else "green")
    assert told["ranks"] == 2
    assert list(dict.fromkeys(each["group"] for each in told["findings"])) == GROUPS
    assert {found[name]["state"] for name in ("versions", "ports", "shared", "bytes sent")} == {"green"}
    assert {"shared memory", "open files", "free space"} <= found.keys()
    assert "through shared memory" in found["all-reduce"]["words"], "what a run would use is what is measured"
    assert found["all-reduce 512 B"]["unit"] == "s"
    assert 0 < found["all-reduce 512 B"]["value"] < 10
    assert not [*tmp_path.iterdir()]


def _on_both(a: Host, b: Host, folder: Path) -> list[Ended]:
    meet = ("--init-method", f"tcp://{a.address}:29500", "--world-size", 2, "--timeout", 60, "--rank")
    ranks = [host.lockstep(folder, "doctor", "--json", *meet, rank) for rank, host in enumerate((a, b))]
    return [end(each) for each in ranks]


@pytest.mark.long
def test_a_firewall_between_hosts_is_named_with_what_opens_it(tmp_path: Path) -> None:
    with hosts(2) as (a, b):
        first, second = _on_both(a, b, tmp_path)
        assert (first.code, second.code, second.out) == (0, 0, ""), first.out + first.err
        assert _found(first)["ports"]["state"] == "green"
        assert json.loads(first.out)["hosts"] == ["a", "b"]

        b.filter("tcp flags & (syn | ack) == syn tcp dport 30000-65535 drop")
        first, _ = _on_both(a, b, tmp_path)
    assert first.code == 1
    found = _found(first)
    assert found["ports"]["state"] == "red"
    assert f"rank 0 (a) does not reach rank 1 (b) at {b.address}: no answer" in found["ports"]["words"]
    assert f"from {a.address} into b" in found["ports"]["fix"]
    assert found["all-reduce"]["state"] == "unchecked"
    assert json.loads(first.out)["seconds"] < 60

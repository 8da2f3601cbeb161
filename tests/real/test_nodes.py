"""A node is lost while a run trains: those that are left go on, and it is taken in again when it comes back."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..command import Running, command, end, events, gone, losses, processes, ranks_of, sentence, until
from ..curves import apart, of_run
from .conftest import CODE
from .hosts import Host, hosts

pytestmark = [pytest.mark.usefixtures("namespaces"), pytest.mark.long]

PORT = 29500
STALL_S = 5
RUN = (
    "train --data tests.own_data:slow --model mlp --strategy ddp --accelerator cpu --epochs 40 --checkpoint-every 30 "
    "--batch 16 --log-every 5 --workers 0 --precision fp64 --output run"
)
ENDS_S = 40.0
"""For a node that was cut off to find out and end."""
PATIENT_S = 240.0


def tcp(host: Host) -> str:
    return f"tcp://{host.address}:{PORT}"


def start(host: Host, folder: Path, *words: object) -> Running:
    """Start one node's agent; all nodes share the folder, as on a disk that another network leads to."""
    return host.popen(
        [sys.executable, "-m", "lockstep", *map(str, words)], {"CUDA_VISIBLE_DEVICES": "", **CODE}, cwd=folder
    )


def elastic(meets_at: Host, *words: object) -> tuple[object, ...]:
    """Return the command of each node."""
    nodes = ("--nodes", "2:3", "--devices", 1, "--max-restarts", 3, "--init-method", tcp(meets_at))
    return (*RUN.split(), *nodes, *words)


def start_all(members: Sequence[Host], meets_at: Host, folder: Path, *words: object) -> list[Running]:
    """Start the agents of all members, the first of which serves the store, and wait until they train."""
    agents = []
    for host in members:
        agents.append(start(host, folder, *elastic(meets_at, *words)))
    at(folder, 40)
    return agents


def at(folder: Path, step: int) -> None:
    """Return once the run has made so many steps."""
    until(lambda: bool(rows := losses(folder / "run")) and rows[-1][0] >= step)


def ranks_of_starts(folder: Path) -> list[int]:
    """Return the number of ranks of each start of the run."""
    return [row["plan"]["ranks"] for row in events(folder / "run", "start")]


def alike(folder: Path, other: Path) -> bool:
    """Whether two runs have the same curve and come to the same weights, in float64."""
    return apart(of_run(folder), of_run(other)) < 1e-9


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = command(folder, *RUN.split(), "--devices", 2, **CODE)
    assert ended.code == 0, ended.err
    return folder / "run"


def test_nodes_that_are_left_go_on_and_the_lost_one_is_taken_in_again(undisturbed: Path, tmp_path: Path) -> None:
    with hosts(3) as (a, b, c):
        agents = start_all((a, b, c), a, tmp_path, "--stall-timeout", STALL_S)
        fenced = ranks_of(agents[2])
        c.cut()
        until(lambda: ranks_of_starts(tmp_path) == [3, 2])
        assert gone(fenced)  # before others write
        told = is_told_that_it_is_cut_off(agents[2])
        c.join()
        again = start(c, tmp_path, *elastic(a, "--stall-timeout", STALL_S))
        ended = [end(agent, PATIENT_S) for agent in (*agents[:2], again)]
    assert [each.code for each in ended] == [0, 0, 0], ended
    assert f"{tcp(a)}: the agent there, which all nodes need, has not answered c for 6 s" in told
    assert "Rank 2 (node c) was stopped, died or was cut off 5 s ago, last heard of in " in ended[0].err
    assert "the ranks start again (restart 1 of 3)" in ended[0].err
    assert "Another node has come: the ranks save, and start again with it." in ended[0].err + ended[1].err
    assert ended[2].err == ""
    assert ranks_of_starts(tmp_path) == [3, 2, 3]
    assert alike(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_a_node_with_rank_0_is_lost_while_ranks_wait_in_a_collective(undisturbed: Path, tmp_path: Path) -> None:
    """Nodes are numbered by their addresses, wherever they meet; and by default ranks wait ten minutes for one."""
    with hosts(3) as (a, b, c):
        agents = start_all((c, a, b), c, tmp_path)
        first, *left = agents[1], agents[0], agents[2]
        fenced = ranks_of(first)
        assert (tmp_path / "run" / ".lock").read_text() == f"process {fenced[0].pid} on a"
        a.cut()
        until(lambda: ranks_of_starts(tmp_path) == [3, 2])
        assert gone(fenced)
        is_told_that_it_is_cut_off(first)
        ended = [end(agent, PATIENT_S) for agent in left]
    assert [each.code for each in ended] == [0, 0], ended
    for each in ended:
        assert re.search(r"Nodes? 10\.77\.0\.1\b.* died, left or cannot be reached .* start again \(restart", each.err)
    assert alike(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_all_end_where_the_node_is_lost_at_which_they_meet(tmp_path: Path) -> None:
    with hosts(3) as (a, b, c):
        agents = start_all((a, b, c), a, tmp_path, "--timeout", 10)
        found = [each for agent in agents for each in ranks_of(agent)]
        a.cut()
        for agent in agents[1:]:
            is_told_that_it_is_cut_off(agent)
        alone = end(agents[0], ENDS_S)
        assert gone(found)
    assert "fewer than --nodes 2 are left, and no others came within 15 s; con" in sentence(alone, code=1)


def is_told_that_it_is_cut_off(agent: Running) -> str:
    """Return what an agent says at its end, which comes soon, and leaves nothing behind."""
    found = processes(agent)
    told = sentence(end(agent, ENDS_S), code=1)
    until(lambda: gone(found), 5)
    assert "this node is cut off, or that one is down" in told
    return told


@pytest.mark.slow
def test_an_address_that_means_loopback_is_explained(tmp_path: Path) -> None:
    """Each host would serve a store of its own there, and wait: by number, by Debian's habit, by /etc/hosts."""
    with hosts(2) as (a, b):
        b.knows(meeting="127.0.0.1")
        a.knows(meeting="127.0.0.1")
        asked = ("--nodes", 2, "--devices", 1, "--timeout", 8, "--init-method")
        agents = [
            start(host, tmp_path, *RUN.split(), *asked, f"tcp://{name}:{PORT + number}")
            for number, name in enumerate(("127.0.0.1", "meeting", "a"))
            for host in (a, b)
        ]
        told = [sentence(end(agent, PATIENT_S)) for agent in agents]
    for number, meaning in (
        (0, "127.0.0.1"),
        (2, "meeting means 127.0.0.1 here, which"),
        (4, "a means 127.0.1.1 here, wh"),
    ):
        assert "fewer than --nodes 2 came within 15 s; start the command on every node, or " in told[number]
        assert meaning in told[number]
        assert "is this host (a) to itself alone: where ranks run on other hosts, give one of its addr" in told[number]
        assert "that they reach (10.77.0.1), or put that in /etc/hosts." in told[number]
    assert "is this host (b) to itself alone" in told[1]
    assert "is this host (b) to itself alone" in told[3]
    assert "(Connection refused); a means 10.77.0.1 on b, and rank 0 may know the name as another" in told[5]


@pytest.mark.slow
def test_a_node_that_joins_or_leaves_torchrun_is_taken_in_or_done_without(undisturbed: Path, tmp_path: Path) -> None:
    """With torchrun's own agents, which by themselves let nobody join: they look for an address that nobody tells."""
    with hosts(2) as (a, b):
        first = torchrun(a, a, tmp_path)
        at(tmp_path, 40)
        second = torchrun(b, a, tmp_path)
        until(lambda: ranks_of_starts(tmp_path) == [1, 2])
        at(tmp_path, losses(tmp_path / "run")[-1][0] + 40)
        b.cut()
        until(lambda: ranks_of_starts(tmp_path) == [1, 2, 1])
        ended = end(first, PATIENT_S)
        assert ended.code == 0, ended.err
        second.kill()
    assert alike(tmp_path / "run", undisturbed)


def torchrun(host: Host, meets_at: Host, folder: Path) -> Running:
    """Start torchrun's agent of a node."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    agent += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", host.address]
    agent += ["--rdzv-endpoint", f"{meets_at.address}:{PORT}", "--rdzv-conf"]
    # torchrun looks for the endpoint among the addresses of the host's own name, which here is Debian's 127.0.1.1.
    serves = str(host is meets_at).lower()
    agent += [f"is_host={serves},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5", "-m", "lockstep"]
    # torch 2.15: an agent that joins waits for the address of a store that was told to those before it alone.
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    resumed = ("--resume", "auto", "--stall-timeout", STALL_S)
    words = map(str, [*agent, *RUN.split(), *resumed])
    return host.popen([*words], {"CUDA_VISIBLE_DEVICES": "", **apart, **CODE}, cwd=folder)

"""A node is lost while a run trains: the others go on, and it is taken in again when it comes back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..command import Running, end, events, gone, losses, processes, ranks_of, sentence, until
from ..curves import apart, of_run
from .conftest import PACED
from .hosts import Host, hosts

pytestmark = [pytest.mark.usefixtures("namespaces"), pytest.mark.long]

PORT = 29500
ENDS_S = 40.0
"""For a node that was cut off to find out and end."""


def start(host: Host, meets_at: Host, folder: Path, *words: object) -> Running:
    """Start one node's agent; all nodes share the folder, as on a disk that another network leads to."""
    nodes = ("--nodes", "2:3", "--devices", 1, "--max-restarts", 3)
    return host.lockstep(folder, *PACED, *nodes, "--init-method", f"tcp://{meets_at.address}:{PORT}", *words)


def start_all(members: Sequence[Host], folder: Path, *words: object) -> list[Running]:
    """Start the agents of all members, the first of which serves the store, and wait until they train."""
    agents = [start(host, members[0], folder, *words) for host in members]
    until(lambda: bool(rows := losses(folder / "run")) and rows[-1][0] >= 40)
    return agents


def have_started(folder: Path, *ranks: int) -> bool:
    """Whether the starts of the run had these numbers of ranks."""
    return [row["plan"]["ranks"] for row in events(folder / "run", "start")] == [*ranks]


def is_told_that_it_is_cut_off(agent: Running) -> None:
    found = processes(agent)
    told = sentence(end(agent, ENDS_S), code=1)
    assert "the agent there, which all nodes need, has not" in told
    assert "this node is cut off, or that one is down" in told
    until(lambda: gone(found), 5)


def go_on(agents: Sequence[Running], folder: Path, undisturbed: Path) -> list[str]:
    """Let agents train to the end, on the curve of an undisturbed run in float64; return what each said."""
    (folder / "hurry").touch()
    ended = [end(agent, 240) for agent in agents]
    assert [each.code for each in ended] == [0] * len(agents), ended
    assert apart(of_run(folder / "run"), of_run(undisturbed)) < 1e-9
    return [each.err for each in ended]


def test_nodes_that_are_left_go_on_and_the_lost_one_is_taken_in_again(undisturbed: Path, tmp_path: Path) -> None:
    stall = ("--stall-timeout", 5)
    with hosts(3) as (a, b, c):
        agents = start_all((a, b, c), tmp_path, *stall)
        fenced = ranks_of(agents[2])
        c.cut()
        until(lambda: have_started(tmp_path, 3, 2))
        assert gone(fenced)  # before others write
        is_told_that_it_is_cut_off(agents[2])
        c.join()
        agents[2] = start(c, a, tmp_path, *stall)
        until(lambda: have_started(tmp_path, 3, 2, 3))
        first, second, third = go_on(agents, tmp_path, undisturbed)
    assert "Rank 2 (node c) was stopped, died or was cut off 5 s ago, last heard of in " in first
    assert "the ranks start again (restart 1 of 3)" in first
    assert "Another node has come: the ranks save, and start again with it." in first + second
    assert third == ""


@pytest.mark.slow
def test_a_node_with_rank_0_is_lost_while_ranks_wait_in_a_collective(undisturbed: Path, tmp_path: Path) -> None:
    """Nodes are numbered by their addresses, wherever they meet; and by default ranks wait ten minutes for one."""
    with hosts(3) as (a, b, c):
        last, first, middle = start_all((c, a, b), tmp_path)
        fenced = ranks_of(first)
        assert (tmp_path / "run" / ".lock").read_text() == f"process {fenced[0].pid} on a"
        a.cut()
        until(lambda: have_started(tmp_path, 3, 2))
        assert gone(fenced)
        is_told_that_it_is_cut_off(first)
        for said in go_on((last, middle), tmp_path, undisturbed):
            assert re.search(r"Nodes? 10\.77\.0\.1\b.* died, left or cannot be reached .* start again \(restart", said)


@pytest.mark.slow
def test_all_end_where_the_node_is_lost_at_which_they_meet(tmp_path: Path) -> None:
    with hosts(3) as (a, b, c):
        agents = start_all((a, b, c), tmp_path, "--timeout", 10)
        found = [each for agent in agents for each in ranks_of(agent)]
        a.cut()
        for agent in agents[1:]:
            is_told_that_it_is_cut_off(agent)
        alone = end(agents[0], ENDS_S)
        assert gone(found)
    assert "fewer than --nodes 2 are left, and no others came within 15 s; con" in sentence(alone, code=1)

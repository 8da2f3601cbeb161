"""A node is cut off while a run trains: the others go on, or say why they cannot, and nobody is left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..command import GATED, OPEN, Running, at, end, events, gate, gone, processes, ranks_of, sentence, until
from ..curves import apart, of_run
from .hosts import Host, hosts

PORT = 29500
ENDS_S = 40.0
"""For a node that was cut off to find out and end."""


def start_all(members: Sequence[Host], folder: Path, *words: object) -> list[Running]:
    """Start the agents of all members, the first of which serves the store, and wait until they train."""
    gate(folder, 10)
    nodes = ("--nodes", "2:3", "--devices", 1, "--max-restarts", 3)
    meets = ("--init-method", f"tcp://{members[0].address}:{PORT}")
    agents = [host.lockstep(folder, *GATED, *nodes, *meets, *words) for host in members]
    at(folder, 10)
    return agents


def is_told_that_it_is_cut_off(agent: Running) -> None:
    found = processes(agent)
    told = sentence(end(agent, ENDS_S), code=1)
    assert "the agent there, which all nodes need, has not" in told
    assert "this node is cut off, or that one is down" in told
    until(lambda: gone(found), 5)


@pytest.mark.long
def test_the_nodes_that_are_left_go_on_without_the_one_that_is_cut_off(tmp_path: Path, undisturbed: Path) -> None:
    """It has rank 0: nodes are numbered by their addresses, wherever they meet. By default, ranks wait ten minutes."""
    with hosts(3) as (a, b, c):
        last, first, middle = start_all((c, a, b), tmp_path)
        fenced = ranks_of(first)
        assert (tmp_path / "run" / ".lock").read_text() == f"process {fenced[0].pid} on a"
        a.cut()
        gate(tmp_path, OPEN)
        until(lambda: len(events(tmp_path / "run", "start")) == 2)
        assert gone(fenced)  # before others write
        is_told_that_it_is_cut_off(first)
        ended = [end(agent) for agent in (last, middle)]
    assert [each.code for each in ended] == [0, 0], ended
    assert [row["plan"]["ranks"] for row in events(tmp_path / "run", "start")] == [3, 2]
    assert apart(of_run(tmp_path / "run"), of_run(undisturbed)) < 1e-9
    # Ranks, or their agent: whoever sees it first.
    lost = r"(Nodes? 10\.77\.0\.1\b.* died, left|Rank 0 \(.*\ba\).* died) or .* start again"
    for each in ended:
        assert re.search(lost, each.err), each.err


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
    assert "fewer than --nodes 2 are left, and no others came; con" in sentence(alone, code=1)

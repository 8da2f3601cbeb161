"""Ranks started by hand: they meet, and the others report a lost rank in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ..command import end
from ..ports import free_port
from ..starting import start_rank


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_started_by_hand_meet_and_leave_nothing(scheme: str, tmp_path: Path) -> None:
    rendezvous = tmp_path / "meeting"
    url = f"file://{rendezvous}" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    for _ in range(2 if scheme == "file" else 1):  # a second run at the same place follows at once
        late, first = (start_rank("total", init_method=url, rank=rank, world_size=2) for rank in (1, 0))
        ended = [end(rank) for rank in (first, late)]
        assert [(each.code, bool(each.out)) for each in ended] == [(0, True), (0, False)], ended
        told = json.loads(ended[0].out)
        assert (told["sum"], told["interface"]) == ([2, 1], "lo")
        assert [rank[:3] for rank in told["ranks"]] == [[0, 0, 2], [1, 1, 2]]
        assert not rendezvous.exists()


@pytest.mark.parametrize("way", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.long)])
def test_the_loss_of_the_rank_with_the_store_is_one_sentence_on_the_others(way: str, tmp_path: Path) -> None:
    url, output = f"tcp://127.0.0.1:{free_port()}", str(tmp_path)
    lost, *others = (
        start_rank("lose", init_method=url, rank=rank, world_size=3, stall_timeout=2, data_dir=way, output=output)
        for rank in range(3)
    )
    for number, rank in enumerate(others, 1):
        ended = end(rank)
        assert ended.code == 1
        # torch, which the entries have imported before lockstep could quiet it, may say something before.
        told = r"^\w+: Rank 0 was stopped, died or was cut off \d s ago, .*; continue with --resume auto, or .*\.\n$"
        assert re.search(told, ended.err, re.MULTILINE), ended.err
        if way == "SIGKILL":
            assert "Traceback" in (tmp_path / "failures" / f"rank_{number}.txt").read_text()
    lost.kill()
    lost.communicate()


def test_a_rank_that_dies_while_the_others_are_in_no_collective_is_noticed(tmp_path: Path) -> None:
    values: dict[str, Any] = {"init_method": f"tcp://127.0.0.1:{free_port()}", "world_size": 2, "stall_timeout": 2}
    ranks = [start_rank("read_long", rank=rank, output=str(tmp_path), **values) for rank in range(2)]
    ended = end(ranks[0])  # which would read for ten minutes
    ranks[1].communicate()
    assert ended.code == 1
    told = r"lockstep: Rank 1 was stopped, died or was cut off \d+ s ago, last heard of in .* --resume auto, .*\n"
    assert re.fullmatch(told, ended.err), ended.err
    assert "in read_long" in (tmp_path / "failures" / "rank_0.txt").read_text()


def test_a_rank_that_fails_is_told_by_the_others_in_its_own_words(tmp_path: Path) -> None:
    values: dict[str, Any] = {"init_method": f"tcp://127.0.0.1:{free_port()}", "world_size": 2, "data_dir": "raise"}
    ranks = [start_rank("fail", rank=rank, output=str(tmp_path), **values) for rank in range(2)]
    for rank in ranks:
        ended = end(rank)
        assert ended.code == 1
        assert re.search(r"^\w+: Rank 1 failed at .*entries\.py:\d+: ValueError: labels reach 10", ended.err, re.M)

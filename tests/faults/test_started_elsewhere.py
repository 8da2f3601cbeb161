"""Ranks that torchrun or a person has started: they meet, and one that is lost is one sentence on the others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ..command import ROOT, end
from ..ports import free_port
from ..starting import start_rank


def test_torchrun_shows_the_root_cause(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    ended = end(start_rank("fail", through=torchrun, data_dir="raise", output=str(tmp_path)))
    assert ended.code != 0
    assert "RunError: Rank 1 failed at" in ended.err
    assert "labels reach 10" in ended.err[ended.err.index("Root Cause") :]


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_started_by_hand_meet_and_leave_nothing(scheme: str, tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    url = f"file://{meeting}" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    for _ in range(2 if scheme == "file" else 1):  # a second run at the same place follows at once
        late, first = (start_rank("total", init_method=url, rank=rank, world_size=2) for rank in (1, 0))
        ended = [end(rank) for rank in (first, late)]
        assert [(each.code, bool(each.out)) for each in ended] == [(0, True), (0, False)], ended
        told = json.loads(ended[0].out)
        assert (told["sum"], told["interface"]) == ([2, 1], "lo")
        assert [rank[:3] for rank in told["ranks"]] == [[0, 0, 2], [1, 1, 2]]
        assert not meeting.exists()


@pytest.mark.parametrize(
    ("way", "victim", "words"),
    [
        ("SIGKILL", 0, r"Rank 0 \(process \d+ on \S+\) died or was cut off.*"),
        ("SIGKILL", 1, r"Rank 1 \(process \d+ on \S+\) died or was cut off.*"),
        ("SIGSTOP", 0, r"Rank 0 was stopped, died or was cut off [1-5] s ago, .*"),
        ("SIGSTOP", 1, r"Rank 1 was stopped, died or was cut off [1-5] s ago, .*"),
    ],
    ids=["killed-0", "killed-1", "stopped-0", "stopped-1"],
)
def test_a_rank_that_is_lost_is_one_sentence_on_the_others(way: str, victim: int, words: str, tmp_path: Path) -> None:
    url, others = f"tcp://127.0.0.1:{free_port()}", [rank for rank in range(3) if rank != victim]
    values: dict[str, Any] = {
        "init_method": url,
        "world_size": 3,
        "stall_timeout": 2,
        "seed": victim,
        "output": str(tmp_path),
    }
    ranks = [start_rank("lose", rank=rank, data_dir=way, **values) for rank in range(3)]
    for rank in others:
        ended = end(ranks[rank])
        assert ended.code == 1
        told = rf"\w+: {words}; continue with --resume auto\.\n"
        assert re.fullmatch(told, ended.err), ended.err
        assert re.search(r"wait(s|ed)? (for it )?in ", ended.err), ended.err
        if way == "SIGKILL":
            assert "Traceback" in (tmp_path / "failures" / f"rank_{rank}.txt").read_text()
    ranks[victim].kill()
    ranks[victim].communicate()


def test_a_rank_that_dies_while_the_others_are_in_no_collective_is_noticed(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    ranks = [
        start_rank("read_long", rank=rank, init_method=url, world_size=2, output=str(tmp_path)) for rank in range(2)
    ]
    ended = end(ranks[0])  # which would read for ten minutes
    ranks[1].communicate()
    assert ended.code == 1
    told = r"lockstep: Rank 1 \(process \d+ on \S+\) died, last heard of in .*; continue with --resume auto\.\n"
    assert re.fullmatch(told, ended.err), ended.err
    assert "in read_long" in (tmp_path / "failures" / "rank_0.txt").read_text()


def test_a_rank_lost_between_the_roll_call_and_the_group_is_noticed(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'meeting'}"
    waiting = start_rank("total", init_method=url, rank=0, world_size=2)
    deserting = [sys.executable, "-c", f"from tests import entries; entries.desert({url[7:]!r}, 1, 2)"]
    assert subprocess.run(deserting, cwd=ROOT, check=False).returncode == 3
    lost_s = time.monotonic()
    ended = end(waiting)
    assert time.monotonic() - lost_s < 30  # of --timeout 60 and --stall-timeout 600
    assert ended.code == 1
    assert re.match(r"RankLostError: Rank 0: rank 1 \(process \d+ on \S+\) came, but ended before tra", ended.err)

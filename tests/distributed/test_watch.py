"""Ranks that hang in a real run: one sentence names who stopped where, all end, and every stack is kept."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from ..command import Ended, command, end, start, until
from ..ports import free_port

STALL_S = 4
RUN = "train digits --model mlp --strategy ddp --accelerator cpu --batch 32 --epochs 1000 --log-every 1 --no-download"


def _ended(folder: Path, data: str, *words: object) -> Ended:
    """Return how two ranks ended that read data of ours themselves."""
    run = f"train --data tests.own_data:{data} --model mlp --batch 8 --accelerator cpu --strategy ddp --devices 2"
    return command(folder, *run.split(), "--workers", 0, "--output", "run", *words)


def test_a_rank_that_hangs_in_data_loading_is_named_with_its_line(tmp_path: Path) -> None:
    ended = _ended(tmp_path, "hanging", "--stall-timeout", STALL_S)
    assert ended.code == 1
    found = re.search(
        r"^lockstep: Rank (\d) stopped (\d+) s ago in data loading at own_data\.py:\d+ \(step \d\); "
        r"rank (\d) waits in all-reduce at step \d; continue with --resume auto\.$",
        ended.err,
        re.MULTILINE,
    )
    assert found, ended.err
    assert {found[1], found[3]} == {"0", "1"}
    assert int(found[2]) <= STALL_S + 1
    for rank in range(2):
        kept = (tmp_path / "run" / "failures" / f"rank_{rank}.txt").read_text()
        assert kept.startswith("Rank ")
        assert ("in __getitem__" in kept) == (str(rank) == found[1])


def test_a_rank_that_hangs_with_pythons_lock_leaves_its_stacks(tmp_path: Path) -> None:
    ended = _ended(tmp_path, "holding", "--stall-timeout", STALL_S)
    assert ended.code == 1
    found = re.search(
        r"^lockstep: Rank (\d) was stopped, died or was cut off \d s ago, last heard of in .*; "
        r"rank \d waits in all-reduce at step \d+; continue with --resume auto\.$",
        ended.err,
        re.MULTILINE,
    )
    assert found, ended.err
    kept = (tmp_path / "run" / "failures" / f"rank_{found[1]}.txt").read_text()
    assert kept.startswith(f"Rank {found[1]} ")
    assert re.search(r'File ".*own_data\.py", line \d+ in __getitem__', kept), kept


@pytest.mark.parametrize("launcher", ["spawn", "elastic"])
def test_a_rank_that_crashes_in_c_code_leaves_its_stacks(launcher: str, tmp_path: Path) -> None:
    ended = _ended(tmp_path, "crashing", "--launcher", launcher)
    assert ended.code == 1
    found = re.search(
        r"^lockstep: Rank (\d) was killed by SIGSEGV \(if it trained, its stacks are in the run's "
        r"output/rank_\1\.txt\); continue with --resume auto\.$",
        ended.err,
        re.MULTILINE,
    )
    assert found, ended.err
    kept = (tmp_path / "run" / "output" / f"rank_{found[1]}.txt").read_text()
    assert re.search(r'File ".*own_data\.py", line \d+ in __getitem__', kept), kept


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_was_stopped_is_named_and_all_end(victim: int, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    words = [*RUN.split(), "--init-method", url, "--world-size", 3, "--output", "run", "--stall-timeout", STALL_S]
    ranks = [start(tmp_path, *words, "--rank", rank) for rank in range(3)]
    try:
        steps = tmp_path / "run" / "steps.jsonl"
        until(lambda: steps.exists() and steps.read_text().count('"event": "step"') > 5, 60)
        ranks[victim].send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        others = [rank for rank in range(3) if rank != victim]
        ended = [end(ranks[rank]) for rank in others]
        assert time.monotonic() - stopped_s < STALL_S + 5
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    waiting = ", ".join(map(str, others)) if victim == 1 else "1–2"
    for each in ended:
        assert each.code == 1
        assert re.search(
            rf"^lockstep: Rank {victim} was stopped, died or was cut off \d+ s ago, last heard of in .*; "
            rf"ranks {waiting} wait in ",
            each.err,
            re.MULTILINE,
        ), each.err

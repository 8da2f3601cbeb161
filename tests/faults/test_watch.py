"""Ranks that hang in a real run: one sentence names who stopped where, all end, and every stack is kept."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from ..command import Ended, command, end, gone, ranks_of, start, until
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
        r"rank (\d) waits in all-reduce at step \d; give more --stall-timeout where it was only slow; "
        r"continue with --resume auto\.$",
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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_alone_that_hangs_is_named_as_well(workers: int, tmp_path: Path) -> None:
    run = "train --data tests.own_data:hanging --model mlp --batch 8 --accelerator cpu --devices 1"
    words = ("--workers", workers, "--stall-timeout", STALL_S, "--output", "run")
    ended = end(start(tmp_path, *run.split(), *words))
    assert ended.code == 1
    assert re.search(
        r"^lockstep: Rank 0 stopped \d s ago in data loading at own_data\.py:\d+ \(step \d\); "
        r"give more --stall-timeout where it was only slow; continue with --resume auto\.$",
        ended.err,
        re.MULTILINE,
    ), ended.err
    assert "in __getitem__" in (tmp_path / "run" / "failures" / "rank_0.txt").read_text()


def test_a_long_evaluation_of_a_rank_alone_is_no_stall(tmp_path: Path) -> None:
    run = "train --data tests.own_data:evaluated_slowly --model mlp --batch 8 --accelerator cpu --devices 1 --workers 0"
    ended = command(tmp_path, *run.split(), "--epochs", 1, "--stall-timeout", STALL_S)
    assert ended.code == 0, ended
    assert ended.err == ""


def test_a_rank_in_the_debugger_is_left_alone(tmp_path: Path) -> None:
    run = "train --data tests.own_data:debugged --model mlp --batch 8 --accelerator cpu --devices 1 --workers 0"
    words = [*run.split(), "--epochs", 1, "--stall-timeout", STALL_S]
    with start(tmp_path, *words) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        said = ""
        while not said.endswith("(Pdb) "):
            said += (letter := running.stdout.read(1))
            assert letter, f"it ended without a prompt: {said}"
        time.sleep(STALL_S + 3)
        assert running.poll() is None
        running.stdin.write("continue\n")
        running.stdin.flush()
        ended = end(running)
    assert ended.code == 0, ended


@pytest.mark.parametrize("launcher", ["spawn", "elastic"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_were_all_stopped_are_told_by_their_parent(ranks: int, launcher: str, tmp_path: Path) -> None:
    words = [*RUN.split(), "--launcher", launcher, "--devices", ranks, "--stall-timeout", STALL_S, "--output", "run"]
    with start(tmp_path, *words) as parent:
        steps = tmp_path / "run" / "steps.jsonl"
        until(lambda: steps.exists() and steps.read_text().count('"event": "step"') > 5, 60)
        found = ranks_of(parent)
        assert len(found) == ranks
        for each in found:
            each.suspend()
        stopped_s = time.monotonic()
        ended = end(parent)
        assert time.monotonic() - stopped_s < STALL_S + 8
        until(lambda: gone(found), 5)
    assert ended.code == 1
    who = "Rank 0, all that live here, was" if ranks == 1 else "Ranks 0–1, all that live here, were"
    assert f"lockstep: {who} stopped (SIGSTOP) " in ended.err


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

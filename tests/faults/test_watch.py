"""Ranks that hang in a real run: one sentence names who stopped where, all end, and every stack is kept."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from ..command import OPEN, at, command, end, events, gate, gone, ranks_of, sentence, start, until

STALL_S = 2
WORDS = f"--model mlp --batch 8 --accelerator cpu --stall-timeout {STALL_S} --output run --data"
PLACE = r"\d s ago in data loading at own_data\.py:\d+ \(step \d\)"


@pytest.mark.parametrize(
    ("data", "ranks", "workers", "keeps", "words"),
    [
        ("hanging", 2, 0, "failures", rf"Rank (\d) stopped {PLACE};.* wait"),
        ("hanging", 1, 2, "output", r"Rank (0) stopped \d s ago in data loading at .*; raise --stall-timeout"),
        ("holding", 2, 0, "output", r"Rank (\d) was stopped, died or was cut off \d s ago, .* waits in all-reduce"),
        ("crashing", 2, 0, "output", r"Rank (\d) was killed by SIGSEGV .*output/rank_\1\.txt"),
    ],
    ids=["hanging", "worker-hanging", "holding", "crashing"],
)
def test_a_rank_that_hangs_or_crashes_is_named_and_leaves_its_stacks(
    data: str, ranks: int, workers: int, keeps: str, words: str, tmp_path: Path
) -> None:
    more = ("--strategy", "ddp", "--devices", ranks, "--workers", workers)
    ended = command(tmp_path, "train", *WORDS.split(), f"tests.own_data:{data}", *more)
    found = re.match(words, told := sentence(ended, code=1))
    assert found, told
    assert told.endswith('continue with --resume auto, or lockstep.session(…, resume="auto").')
    assert "in __getitem__" in (tmp_path / "run" / keeps / f"rank_{found[1]}.txt").read_text()
    if data == "hanging":  # so that rank 0 can still write
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["exit"], summary["error"]) == (1, told)


@pytest.mark.long
def test_a_rank_alone_that_evaluates_long_and_is_stopped_meanwhile_goes_on(tmp_path: Path) -> None:
    words = (*WORDS.split(), "tests.own_data:evaluated_slowly", "--workers", 0, "--epochs", 1, "--stall-timeout", 1)
    with start(tmp_path, "train", *words) as run:
        until(lambda: bool(events(tmp_path / "run", "step")))
        for _ in range(5):
            for number, seconds in ((signal.SIGSTOP, 1.2), (signal.SIGCONT, 0.2)):  # as a laptop's lid does
                run.send_signal(number)
                time.sleep(seconds)
        ended = end(run)
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize(
    ("fault", "collectives", "words"),
    [
        ("kill", "gloo", "Rank 1 was killed by SIGKILL"),
        pytest.param("suspend", "gloo", "Rank 1 was stopped, died or was cut off", marks=pytest.mark.long),
        ("suspend", "shared-memory", "Rank 1 was stopped, died or was cut off"),
    ],
)
def test_a_lost_rank_is_named(fault: str, collectives: str, words: str, tmp_path: Path) -> None:
    more = ("tests.own_data:gated", "--strategy", "ddp", "--devices", 2, "--epochs", 1000, "--workers", 0)
    gate(tmp_path, 3)
    with start(tmp_path, "train", *WORDS.split(), *more, "--log-every", 1, "--collectives", collectives) as parent:
        at(tmp_path, 3)
        ranks = ranks_of(parent)
        getattr(ranks[1], fault)()
        lost_s = time.monotonic()
        gate(tmp_path, OPEN)
        told = sentence(end(parent), code=1)
        assert time.monotonic() - lost_s < STALL_S + 15
        until(lambda: gone(ranks), 5)
    assert told.startswith(words)
    assert "continue with --resume auto" in told

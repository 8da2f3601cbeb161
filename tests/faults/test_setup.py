"""What comes before the first step may take its time, while others wait; who is lost in it is told all the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ..command import Running, command, end, gone, losses, ranks_of, sentence, start, until

STALL_S = 2
TRAIN = (
    *("train", "--data", "tests.own_data:built_slowly", "--model", "mlp", "--batch", 8, "--epochs", 1, "--workers", 0),
    *("--strategy", "ddp", "--devices", 2, "--accelerator", "cpu", "--stall-timeout", STALL_S, "--output", "run"),
)


def _builds(folder: Path, seconds: float) -> None:
    (folder / "builds").write_text(str(seconds))


@pytest.mark.parametrize(
    ("collectives", "seconds"),
    [
        pytest.param("shared-memory", 3 * STALL_S, marks=pytest.mark.long),
        pytest.param("gloo", 8 * STALL_S, marks=pytest.mark.slow),
    ],
)
def test_a_data_set_that_takes_long_to_build_is_waited_for(collectives: str, seconds: float, tmp_path: Path) -> None:
    _builds(tmp_path, seconds)
    ended = command(tmp_path, *TRAIN, "--collectives", collectives)
    assert (ended.code, ended.err) == (0, "")
    assert len(losses(tmp_path / "run")) == 5


def _builder(run: Running, folder: Path) -> int:
    """Return which of the run's two ranks builds the data, once it does."""
    until(lambda: (folder / "builder").exists() and (folder / "builder").read_text() != "")
    builder = int((folder / "builder").read_text())
    return [rank.pid for rank in ranks_of(run)].index(builder)


@pytest.mark.parametrize(
    ("fault", "which", "words"),
    [
        ("kill", "builds", "was killed by SIGKILL"),
        ("suspend", "waits", "was stopped, died or was cut off"),
    ],
)
def test_who_is_lost_before_the_first_step_is_told(fault: str, which: str, words: str, tmp_path: Path) -> None:
    _builds(tmp_path, 600)
    with start(tmp_path, *TRAIN) as run:
        builder = _builder(run, tmp_path)
        victim, ranks = builder if which == "builds" else 1 - builder, ranks_of(run)
        time.sleep(STALL_S)  # so that somebody has waited for long already
        getattr(ranks[victim], fault)()
        lost_s = time.monotonic()
        told = sentence(end(run), code=1)
        assert time.monotonic() - lost_s < STALL_S + 10
        until(lambda: gone(ranks), 5)
    assert told.startswith(f"Rank {victim} {words}")

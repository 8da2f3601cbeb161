"""What a run says: all of it is kept, and no terminal, reader or disk that takes less ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..command import LIMIT_S, command, start

TALKING = (
    "train --data tests.own_data:talking --model mlp --batch 8 --accelerator cpu --epochs 1 --output run --strategy ddp"
)


def test_a_run_on_a_terminal_of_plain_ascii_trains(tmp_path: Path) -> None:
    words = ("train", "digits", "--model", "mlp", "--max-steps", 1, "--strategy", "ddp", "--devices", 2)
    ended = command(tmp_path, *words, PYTHONIOENCODING="ascii")
    assert (ended.code, ended.err) == (0, "")
    assert "global batch 64 = 2 ranks ? 1 micro-batch ?" in ended.out


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 1)])
def test_all_that_ranks_and_their_workers_say_is_in_the_run_folder(tmp_path: Path, ranks: int, workers: int) -> None:
    ended = command(tmp_path, *TALKING.split(), "--devices", ranks, "--workers", workers)
    assert ended.code == 0, ended.err
    kept = [(tmp_path / "run" / "output" / f"rank_{rank}.txt").read_text() for rank in range(ranks)]
    (speaker,) = [rank for rank in range(ranks) if "by print\n" in kept[rank]]
    assert "by C code\n" in kept[speaker]
    assert "by a program\n" in kept[speaker]
    on_console = ("by print\n" in ended.out, "by a program\n" in ended.out, "by C code\n" in ended.err)
    assert on_console == (speaker == 0,) * 3
    assert "done after 5 steps" in ended.out
    assert "done after 5 steps" in kept[0]


def test_a_working_folder_that_changes_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "further").mkdir(parents=True)
    words = ("--data", "tests.own_data:moving", "--model", "mlp", "--batch", 8, "--accelerator", "cpu", "--epochs", 1)
    ended = command(tmp_path, "train", *words, "--workers", 0)
    assert (ended.code, ended.err) == (0, "")
    run = tmp_path / "runs" / "tests.own_data.moving-mlp"
    assert (run / "checkpoints" / "last" / "state.json").exists()
    assert f"written to {run}: summary.json" in ended.out  # from there, by its whole name
    assert [path.name for path in (tmp_path / "elsewhere").rglob("*")] == ["further"]


_AGAIN = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
"""What a command goes `through` after something was done to its process."""


def test_results_that_cannot_be_written_are_told_of_on_stderr(tmp_path: Path) -> None:
    to_full = ("-c", f"import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); {_AGAIN}")
    ended = command(tmp_path, "train", "digits", "--model", "mlp", "--max-steps", 1, "--output", "run", through=to_full)
    assert ended.code == 0
    (told,) = ended.err.splitlines()
    assert "results cannot be written to the output (No space left on device)" in told
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_reader_who_has_seen_enough_ends_no_run(tmp_path: Path) -> None:
    with start(tmp_path, *TALKING.split(), "--workers", 0, "--devices", 1) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("global batch")
        run.stdout.close()
        assert run.wait(LIMIT_S) == 0
    assert "by print\n" in (tmp_path / "run" / "output" / "rank_0.txt").read_text()


def test_no_other_file_takes_the_place_of_a_closed_one(tmp_path: Path) -> None:
    closed = ("-c", f"import os, sys; os.closerange(1, 3); {_AGAIN}")
    assert command(tmp_path, *TALKING.split(), "--workers", 0, "--devices", 2, through=closed).code == 0
    kept = [path.read_text() for path in sorted((tmp_path / "run" / "output").glob("rank_*.txt"))]
    assert sum("by C code\n" in text for text in kept) == 1

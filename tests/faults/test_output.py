"""What a run says: all of it is kept, and no terminal, reader or disk that takes less ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..command import LIMIT_S, command, start

TALKING = (
    "train --data tests.own_data:talking --model mlp --batch 8 --accelerator cpu --epochs 1 --output run --strategy ddp"
)


@pytest.mark.parametrize(
    ("ranks", "workers", "encoding"), [(2, 1, "utf-8"), pytest.param(1, 0, "ascii", marks=pytest.mark.long)]
)
def test_all_that_ranks_and_their_workers_say_is_in_the_run_folder(
    tmp_path: Path, ranks: int, workers: int, encoding: str
) -> None:
    words = (*TALKING.split(), "--devices", ranks, "--workers", workers)
    more = {} if encoding == "utf-8" else {"PYTHONIOENCODING": encoding}  # which takes a cold process
    ended = command(tmp_path, *words, **more)
    assert ended.code == 0, ended.err
    assert f"global batch 8 = {ranks} rank" in ended.out
    assert (" × " in ended.out) == (encoding == "utf-8")
    kept = [(tmp_path / "run" / "output" / f"rank_{rank}.txt").read_text() for rank in range(ranks)]
    (speaker,) = [rank for rank in range(ranks) if "by print\n" in kept[rank]]
    if speaker:  # rank 0's goes to the console
        assert "by C code\n" in kept[speaker]
        assert "by a program\n" in kept[speaker]
    on_console = ("by print\n" in ended.out, "by a program\n" in ended.out, "by C code\n" in ended.err)
    assert on_console == (speaker == 0,) * 3
    assert "done after 5 steps" in ended.out
    assert "done after 5 steps" in kept[0]


def test_a_reader_who_has_seen_enough_ends_no_run(tmp_path: Path) -> None:
    with start(tmp_path, *TALKING.split(), "--workers", 0, "--devices", 1) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("global batch")
        run.stdout.close()
        assert run.wait(LIMIT_S) == 0
    assert "by print\n" in (tmp_path / "run" / "output" / "rank_0.txt").read_text()

"""What a run says, on terminals that cannot show all of it."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from ..command import CODE, LIMIT_S, command, start


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_a_terminal_of_plain_ascii_trains(tmp_path: Path, ranks: int) -> None:
    words = ("train", "digits", "--model", "mlp", "--max-steps", 1, "--strategy", "ddp", "--devices", ranks)
    ended = command(tmp_path, *words, PYTHONIOENCODING="ascii")
    assert (ended.code, ended.err) == (0, "")
    assert f"global batch 64 = {ranks} rank" in ended.out
    assert "? 1 micro-batch ?" in ended.out


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_that_ranks_and_their_workers_say_is_in_the_run_folder(tmp_path: Path, ranks: int, workers: int) -> None:
    words = ("--data", "tests.own_data:talking", "--model", "mlp", "--batch", 8, "--accelerator", "cpu", "--epochs", 1)
    how = ("--strategy", "ddp", "--devices", ranks, "--workers", workers, "--output", "run")
    ended = command(tmp_path, "train", *words, *how)
    assert ended.code == 0, ended.err
    kept = [(tmp_path / "run" / "output" / f"rank_{rank}.txt").read_text() for rank in range(ranks)]
    (speaker,) = [rank for rank in range(ranks) if "by print\n" in kept[rank]]
    assert "by C code\n" in kept[speaker]
    assert "by a program\n" in kept[speaker]
    assert ("by print\n" in ended.out, "by a program\n" in ended.out) == (speaker == 0, speaker == 0)
    assert ("by C code\n" in ended.err) == (speaker == 0)
    assert "done after 5 steps" in ended.out
    assert "done after 5 steps" in kept[0]


def test_results_that_cannot_be_written_are_told_of_on_stderr(tmp_path: Path) -> None:
    words = ["train", "digits", "--model", "mlp", "--max-steps", "1", "--output", "run"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *words],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    (told,) = done.stderr.splitlines()
    assert told.startswith("warning: results cannot be written to the output (No space left on device)")
    assert done.returncode == 0
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("output", [(), ("--output", "run")])
def test_a_working_folder_that_changes_changes_nothing_else(tmp_path: Path, output: tuple[str, ...]) -> None:
    (tmp_path / "elsewhere" / "further").mkdir(parents=True)
    words = ("--data", "tests.own_data:moving", "--model", "mlp", "--batch", 8, "--accelerator", "cpu", "--epochs", 1)
    ended = command(tmp_path, "train", *words, "--workers", 0, *output)
    assert (ended.code, ended.err) == (0, "")
    folder = tmp_path / (output[-1] if output else "runs/tests.own_data.moving-mlp")
    assert (folder / "checkpoints" / "last" / "state.json").exists()
    assert f"written to {folder}: summary.json" in ended.out  # from there, by its whole name
    assert [path.name for path in (tmp_path / "elsewhere").rglob("*")] == ["further"]


TALKING = (
    "train --data tests.own_data:talking --model mlp --batch 8 --accelerator cpu --epochs 1 --workers 0 --output run"
)


def test_a_reader_who_has_seen_enough_ends_no_run(tmp_path: Path) -> None:
    with start(tmp_path, *TALKING.split(), "--devices", 1) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("global batch")
        run.stdout.close()
        assert run.wait(LIMIT_S) == 0
    assert "by print\n" in (tmp_path / "run" / "output" / "rank_0.txt").read_text()


_CONTROLLED = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_terminal_that_is_closed_stops_a_run_as_a_signal_does(tmp_path: Path, devices: int) -> None:
    ours, theirs = pty.openpty()
    words = ("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--epochs", "1000", "--output", "run")
    with subprocess.Popen(
        # What it takes for a terminal to be closed over a process: to be the one that controls it.
        [sys.executable, "-c", _CONTROLLED, "-m", "lockstep", *words, "--strategy", "ddp", "--devices", str(devices)],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as run:
        try:
            os.close(theirs)
            steps = tmp_path / "run" / "steps.jsonl"
            while not (steps.exists() and b'"event": "step"' in steps.read_bytes()):
                assert run.poll() is None
                if select.select([ours], [], [], 0.1)[0]:
                    os.read(ours, 65536)
            os.close(ours)
            assert run.wait(LIMIT_S) == 75
        finally:
            run.kill()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == 75
    assert not list((tmp_path / "run").glob("failures/*"))


def test_ranks_find_something_in_the_place_of_what_was_closed() -> None:
    asked = (
        "import os; os.closerange(0, 3); from lockstep.__main__ import _open_all; _open_all()\n"
        "os._exit(all(map(os.get_inheritable, range(3))))"
    )
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 1


@pytest.mark.parametrize("numbers", [(2,), (1, 2)])
def test_no_other_file_takes_the_place_of_a_closed_one(numbers: tuple[int, ...], tmp_path: Path) -> None:
    closes = "; ".join(f"os.close({number})" for number in numbers)
    closed = ("-c", f"import os, sys; {closes}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    words = [sys.executable, *closed, "-m", "lockstep", *TALKING.split(), "--strategy", "ddp", "--devices", "2"]
    env = {**os.environ, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    kept = [path.read_text() for path in sorted((tmp_path / "run" / "output").glob("rank_*.txt"))]
    assert sum("by C code\n" in text for text in kept) == 1

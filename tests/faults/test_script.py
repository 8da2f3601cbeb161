"""A script of the user's on every rank, by `lockstep run`: how it ends, and what is told of it."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from ..command import COLD, command, sentence

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
from lockstep import errors
from lockstep.sessions import script
from lockstep.config.schema import RunConfig
from lockstep.config.options import override

class Numbers:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return float(index)

def read():
    loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
    say(f"read {[batch.item() for batch in loader]}")

def say(words):
    sys.stdout.write(f"{words}\\n")
    sys.stdout.flush()

def broken():
    raise ValueError("labels reach 10")

def unread():
    held = iter(DataLoader(Numbers(), num_workers=1, persistent_workers=True))
    next(held)
    broken()

def stopped():
    raise errors.Stopped("It was stopped.")

def quits():
    quit(3)

def main():
    way, *words = sys.argv[1:]
    pairs = (word.split("=") for word in words if "=" in word)
    options = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    if way == "early":
        sys.exit(int(words[0]))
    if way == "never":
        return
    started = script.take() or script.own_process(override(RunConfig(), accelerator="cpu", **options))
    world = started.world
    if way == "unclosed":
        started.closing.append(lambda error: broken())
    started.closing.append(lambda error: say(f"rank {world.rank} ends with {error!r}"))
    say(f"rank {world.rank}: {world.sum(torch.ones(1)).item():g} {words} {__name__} {sys.path[0]}")
    if world.rank == world.size - 1:
        acts = {"exit": lambda: sys.exit(3), "words": lambda: sys.exit("no more"), "twice": script.take}
        acts.get(way, globals().get(way, lambda: None))()
    world.sum(torch.ones(1))

if GUARD:
    main()
"""
RANKS = ("--accelerator", "cpu", "--devices", 2)


def written(folder: Path, *, guard: str = '__name__ == "__main__"') -> Path:
    """Write the script; return its path."""
    (path := folder / "train.py").write_text(SCRIPT.replace("GUARD", guard))
    return path


def frames(shown: str) -> list[tuple[str, str]]:
    """Return the files of the frames that are shown, and the functions, in their order."""
    return re.findall(r'File "(.+)", line \d+, in (.+)', shown)


@pytest.mark.parametrize(("ranks", "named"), [(1, ("train.py",)), (2, ("-m", "train"))])
def test_a_script_runs_as_under_python_and_is_closed_before_the_world_is_left(
    ranks: int, named: tuple[str, ...], tmp_path: Path
) -> None:
    written(tmp_path)
    ended = command(tmp_path, "run", *RANKS[:3], ranks, *named, "read", "--its", "own")
    assert (ended.code, ended.err) == (0, ""), ended
    begun = [f"rank {rank}: {ranks} ['--its', 'own'] __main__ {tmp_path}" for rank in range(ranks)]
    closed = [f"rank {rank} ends with None" for rank in range(ranks)]
    assert sorted(ended.out.splitlines()) == sorted([*begun, *closed, "read [0.0, 1.0, 2.0, 3.0]"])


@pytest.mark.parametrize(("flags", "rank"), [((), 0), ((*RANKS, "--max-restarts", 1), 1)], ids=["alone", "elastic"])
def test_the_frames_of_the_rank_that_failed_are_shown_once_and_no_others(
    flags: tuple[object, ...], rank: int, tmp_path: Path
) -> None:
    path = written(tmp_path)
    ended = command(tmp_path, "run", *flags, "train.py", "broken")
    restarts = ended.err.count("labels reach 10; the ranks start again (restart 1 of 1).\n")
    assert (ended.code, restarts) == (1, int("--max-restarts" in flags))
    assert frames(ended.err) == [(str(path), name) for name in ("<module>", "main", "broken")]
    told = rf"ValueError: labels reach 10\nlockstep: Rank {rank} failed at {path}:\d+: ValueError: labels reach 10\n$"
    assert re.search(told, ended.err), ended.err
    assert f"rank {rank} ends with ValueError('labels reach 10')" in ended.out


@pytest.mark.long
def test_data_workers_of_a_script_that_fails_leave_nothing(tmp_path: Path) -> None:
    written(tmp_path)
    with tempfile.TemporaryDirectory() as left:  # a short name: workers make sockets there, whose names have a limit
        ended = command(tmp_path, "run", *RANKS, "train.py", "unread", through=COLD, TMPDIR=left)
        assert "ValueError: labels reach 10" in sentence(ended, code=1)
        assert list(Path(left).iterdir()) == []


@pytest.mark.parametrize(
    ("ranks", "words", "code", "told"),
    [
        (1, "exit", 3, ""),
        (1, "early 0", 0, ""),
        (2, "early 0", 0, ""),
        (2, "exit", 1, "lockstep: Rank 1 failed at .*: it called sys.exit.3. before it was done\n"),
        (1, "never", 2, "lockstep: train.py never calls lockstep.session.*\n"),
        (2, "never", 2, "lockstep: train.py never .* each of 2 processes ran it separately; .*\n"),
        (2, "twice", 2, r"lockstep: lockstep.session.. was called twice: .* The call is at train.py:\d+\.\n"),
        (2, "stopped", 75, "lockstep: It was stopped.\n"),
        (1, "unclosed", 1, "(.*\n)*lockstep: Rank 0 failed at .*: ValueError: labels reach 10\n"),
    ],
)
def test_each_end_has_its_exit_code(ranks: int, words: str, code: int, told: str, tmp_path: Path) -> None:
    written(tmp_path)
    ended = command(tmp_path, "run", *RANKS[:3], ranks, "train.py", *words.split())
    assert ended.code == code, ended
    assert re.fullmatch(told, ended.err), ended.err
    if words == "unclosed":  # whose failing comes last
        assert "rank 0 ends with None\n" in ended.out

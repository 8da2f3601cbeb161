"""A script that python or torchrun has started: one rank, until its process ends."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..command import CODE, Ended, Running, command, end, losses
from ..faults.test_script import frames, written
from ..ports import free_port

LOOP = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lockstep

def labels():
    raise ValueError("labels reach 10")

def main(output, *way):
    session = lockstep.session(precision="fp64", output=output)
    x = torch.randn(61, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(x, torch.arange(61) % 4), batch_size=20, shuffle=True)
    net, optimizer, loader = session.prepare(net, optimizer, loader)
    for epoch in session.epochs(3):
        for x, y in loader:
            if way and session.step == 5 and session.rank == session.world.size - 1:
                ways = {"stop": lambda: os.kill(os.getpid(), signal.SIGTERM), "exit": lambda: sys.exit(3)}
                ways.get(way[0], labels)()
            session.backward(nn.functional.cross_entropy(net(x), y))
            optimizer.step()
            optimizer.zero_grad()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""
"""A loop of a user's own: `train.py OUTPUT`; where a second word follows, its last rank fails at step 5, exits, or is
asked to stop."""


def looped(folder: Path) -> tuple[Path, list[tuple[int, float]]]:
    """Write `LOOP` as train.py; return its path, and the (step, loss) of its steps on one rank."""
    (path := folder / "train.py").write_text(LOOP)
    ended = command(folder, "run", "--accelerator", "cpu", "train.py", "alone")
    assert ended.code == 0, ended
    return path, losses(folder / "alone")


def are_alike(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
    """Whether all steps are there, with losses that agree within 1e-9."""
    pairs = zip(found, expected, strict=True)
    return len(found) == 12 and all(a == b and math.isclose(x, y, rel_tol=1e-9) for (a, x), (b, y) in pairs)


def check_failed_once(told: str, path: Path) -> None:
    """Fail unless `told` shows the frames of rank 1's error in `LOOP` once, and no others."""
    assert frames(told) == [(str(path), name) for name in ("<module>", "main", "labels")], told
    assert re.search(rf"lockstep: Rank 1 failed at {path}:\d+: ValueError: labels reach 10\n", told), told


def _start(folder: Path, *words: str) -> Running:
    """Start `python WORDS` in the folder."""
    pipe = subprocess.PIPE
    env = {"PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    return Running([sys.executable, *words], cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def _alone(folder: Path, way: str, **guard: str) -> Ended:
    written(folder, **guard)
    return end(_start(folder, "train.py", way))


def _torchrun() -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))


@pytest.mark.parametrize(
    ("way", "code", "told"),
    [
        ("stopped", 75, "lockstep: It was stopped.\n"),
        pytest.param("quits", 3, "", marks=pytest.mark.long),
        pytest.param("words", 1, "no more\n", marks=pytest.mark.long),
        pytest.param("read", 0, "", marks=pytest.mark.long),
    ],
)
def test_a_script_alone_ends_as_it_should(way: str, code: int, told: str, tmp_path: Path) -> None:
    ended = _alone(tmp_path, way)
    assert (ended.code, ended.err) == (code, told)
    assert ended.out.count("\nrank 0 ends with ") == 1
    assert ended.out.endswith("ends with None\n") == (way in ("quits", "words", "read"))


def test_an_error_of_a_script_alone_looks_as_under_python(tmp_path: Path) -> None:
    ended = _alone(tmp_path, "broken")
    files = {file for file, _ in frames(ended.err)}
    assert (ended.code, files, ended.err.count("lockstep:")) == (1, {str(tmp_path / "train.py")}, 0)
    assert ended.err.endswith("\nValueError: labels reach 10\n")


@pytest.mark.long
def test_a_data_worker_that_would_run_an_unguarded_script_is_told(tmp_path: Path) -> None:
    ended = _alone(tmp_path, "read", guard="True")
    assert ended.code == 1
    assert 'put the script\'s code under `if __name__ == "__main__":`' in ended.err


@pytest.mark.long
def test_an_error_is_told_where_another_excepthook_has_taken_its_place(tmp_path: Path) -> None:
    hook = "sys.excepthook = lambda kind, error, trace: say(f'hooked {error}')"
    path = written(tmp_path)
    path.write_text(path.read_text().replace("def broken():\n", f"def broken():\n    {hook}\n"))
    ended = end(_start(tmp_path, "train.py", "broken"))
    assert ended.code == 1
    assert "hooked labels reach 10\nrank 0 ends with ValueError('labels reach 10')\n" in ended.out


@pytest.mark.long
def test_ranks_of_torchruns_are_one_world_and_the_root_cause_is_shown_once(tmp_path: Path) -> None:
    path = written(tmp_path)
    ended = end(_start(tmp_path, *_torchrun(), "train.py", "read"))
    assert ended.code == 0, ended
    assert sorted(re.findall(r"rank (\d): 2 ", ended.out)) == ["0", "1"]
    assert ended.out.count("ends with None") == 2
    by_itself = end(_start(tmp_path, *_torchrun(), "train.py", "broken"))
    by_command = end(_start(tmp_path, *_torchrun(), "-m", "lockstep", "run", "train.py", "broken"))
    for failed in (by_itself, by_command):
        assert failed.code == 1
        ours, _, torchs = failed.err.partition(f"lockstep: Rank 1 failed at {path}:")
        assert frames(ours) == [(str(path), name) for name in ("<module>", "main", "broken")], ours
        assert str(path) not in "".join(file for file, _ in frames(torchs))
        assert "labels reach 10" in torchs[torchs.index("Root Cause") :]


@pytest.mark.long
def test_a_rank_that_exits_by_itself_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    ended = end(_start(tmp_path, *_torchrun(), "train.py", "run", "exit"))
    assert ended.code == 1
    assert re.search(r"lockstep: .*every rank has to (take|train) the same ", ended.err), ended.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit"] == 1


def test_a_loop_that_is_asked_to_stop_is_saved_and_continued(tmp_path: Path) -> None:
    path, expected = looped(tmp_path)
    stopped = end(_start(tmp_path, str(path), "run", "stop"))
    assert stopped.code == 75
    assert "Stopped on request at step 6 of 12 and saved; continue with the same command and lockstep.s" in stopped.err
    ended = command(tmp_path, "run", "--accelerator", "cpu", "--resume", "auto", "train.py", "run")
    assert ended.code == 0, ended
    assert losses(tmp_path / "run") == expected

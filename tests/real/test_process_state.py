"""A program of the user's that uses lockstep: what belongs to its process is afterwards what it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..command import CODE, Running, end

PROGRAM = """
import logging, multiprocessing, os, signal, sys

def state():
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    return {
        # One variable is torch's own doing, whoever imports its compiler.
        "environment": {name: each for name, each in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"},
        "silenced loggers": [each.name for each in [logging.root, *loggers] if each.level >= logging.CRITICAL],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "excepthook": sys.excepthook,
        "exit": (sys.exit, exit, quit),
    }

def train():
    session = lockstep.session(deterministic=True)
    return session.sum(1)

def same(when):
    for what, now in state().items():
        assert now == before[what], f"{what} after {when}: {now} in place of {before[what]}"

before = state()
import lockstep

if __name__ == "__main__":
    same("import")
    assert lockstep.launch(train, devices=2) == 2
    same("spawn")
    assert lockstep.launch(train, devices=1) == 1
    same("inline")
    assert lockstep.launch(train, devices=2, max_restarts=1) == 2
    same("elastic")
    import torch.distributed.elastic.multiprocessing  # after which a session finds torch's loggers
    session = lockstep.session(deterministic=True)
    assert state()["exit"] == before["exit"]
    assert session.sum(1) == 1
    session.close()
    same("a session")
    multiprocessing.set_start_method("spawn")  # which can be chosen but once
"""


@pytest.mark.long
def test_a_program_gets_its_process_back(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    pipe = subprocess.PIPE
    env = {"PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": ""}
    run = Running([sys.executable, "program.py"], cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True)
    ended = end(run)
    assert ended.code == 0, ended

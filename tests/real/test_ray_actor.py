"""What Ray makes an actor of, without Ray: however a rank ends, its actor hears of it, and nothing of it is left."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.config import RunConfig
from lockstep.launchers import ray_actor
from lockstep.launchers.ray_actor import Rank
from lockstep.topology import Topology
from lockstep.world import World

from ..command import ROOT, gone, until
from ..starting import config

_HEARD_S = 30.0  # for a rank to import torch and to be heard of, on a busy machine; what it leaves lives ten minutes
_PATIENCE_S = 2.0
_SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def _note(folder: Path, pid: int) -> None:
    (folder / "part").write_text(str(pid))
    (folder / "part").rename(folder / "left")


def killed_beside_a_program(config: RunConfig, world: World) -> None:
    """Start a program that keeps stdout, and be killed."""
    _note(config.data.dir, subprocess.Popen(_SLEEP).pid)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_beside_a_fork(config: RunConfig, world: World) -> None:
    """Fork a process that keeps all that is open here, and be killed."""
    if (child := os.fork()) == 0:
        time.sleep(600)
    _note(config.data.dir, child)
    os.kill(os.getpid(), signal.SIGKILL)


def done_beside_a_thread(config: RunConfig, world: World) -> str:
    """Be done while a thread that Python waits for goes on."""
    _note(config.data.dir, os.getpid())
    print("done", flush=True)
    threading.Thread(target=time.sleep, args=(600,)).start()
    return "value"


def done_beside_a_daemon(config: RunConfig, world: World) -> str:
    """Be done while a program of a session of its own keeps stdout."""
    _note(config.data.dir, subprocess.Popen(_SLEEP, start_new_session=True).pid)
    print("done", flush=True)
    return "value"


def stops(config: RunConfig, world: World) -> None:
    """Be stopped, for ever."""
    os.kill(os.getpid(), signal.SIGSTOP)


def waits_beside_a_program(config: RunConfig, world: World) -> None:
    """Wait with a program that it has started."""
    _note(config.data.dir, subprocess.Popen(_SLEEP).pid)
    time.sleep(600)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Callable[[], psutil.Process]]:
    """Give the process that the rank has noted, and end it after the test."""

    def find() -> psutil.Process:
        return psutil.Process(int((tmp_path / "left").read_text()))

    yield find
    try:
        find().kill()
    except (psutil.NoSuchProcess, FileNotFoundError):
        return


def _began(rank: Rank, entry: Callable[..., Any], folder: Path) -> tuple[threading.Thread, list[Any]]:
    """Run `entry` as a world of one rank, in a thread as Ray does; return it and what it gives."""
    address, port = rank.listen("127.0.0.1")
    payload = pickle.dumps((entry, config(data_dir=folder, strategy="ddp")))
    given: list[Any] = []

    def run() -> None:
        topology = Topology(address=address, port=port)
        given.append(rank.run(topology, payload, str(ROOT), [str(ROOT)], _PATIENCE_S, "start again"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, given


def _last_word(rank: Rank, entry: Callable[..., Any], folder: Path) -> Any:
    thread, given = _began(rank, entry, folder)
    thread.join(_HEARD_S)
    assert given, "its actor does not hear of its end"
    return given[0]


@pytest.mark.parametrize("entry", [killed_beside_a_program, killed_beside_a_fork])
def test_a_killed_rank_is_heard_of_and_what_it_started_ends(
    entry: Callable[..., Any], tmp_path: Path, left: Callable[[], psutil.Process]
) -> None:
    assert _last_word(Rank(), entry, tmp_path) == -signal.SIGKILL
    until(lambda: _ended(left), 5)


def test_a_rank_that_was_stopped_is_heard_of(tmp_path: Path) -> None:
    report = _last_word(Rank(), stops, tmp_path)
    told = r"Rank 0, all that live here, was stopped \(SIGSTOP\) \d s ago; start again\."
    assert re.fullmatch(told, report.failure.sentence)


@pytest.mark.parametrize("entry", [done_beside_a_thread, done_beside_a_daemon])
def test_a_rank_that_is_done_is_not_waited_for_without_end(
    entry: Callable[..., Any], tmp_path: Path, left: Callable[[], psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor, "LEAVE_S", 1.0)
    rank = Rank()
    report = _last_word(rank, entry, tmp_path)
    assert pickle.loads(report.value) == "value"
    assert b"".join(data for number, data in rank.read() if number == 1).endswith(b"done\n")
    assert _ended(left) == (entry is done_beside_a_thread)  # who leads a session of its own is left alone


def test_an_actor_ends_its_rank_with_what_it_started(tmp_path: Path, left: Callable[[], psutil.Process]) -> None:
    rank = Rank()
    thread, given = _began(rank, waits_beside_a_program, tmp_path)
    until((tmp_path / "left").exists, _HEARD_S)
    rank.end()
    thread.join(_HEARD_S)
    assert given == [-signal.SIGKILL]
    until(lambda: _ended(left), 5)
    Rank().end()  # where none was started


def _ended(left: Callable[[], psutil.Process]) -> bool:
    try:
        return gone([left()])
    except psutil.NoSuchProcess:
        return True

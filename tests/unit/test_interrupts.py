"""The first signal asks, the second ends, and afterwards the handlers are what they were."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.monitor.signals import _ECHO_S, STOPPING, UNSAVED, StopRequest

from ..command import Running, end, until


def test_a_run_without_a_folder_does_not_say_that_it_saves(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest(saves=False):
        signal.raise_signal(signal.SIGUSR1)
    assert capfd.readouterr().err == f"\nlockstep: {UNSAVED}\n"


def test_a_signal_that_was_held_back_while_a_rank_started_asks_its_loop() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        signal.raise_signal(signal.SIGUSR1)
        with StopRequest(quiet=True) as stop:
            assert stop.asked
        signal.raise_signal(signal.SIGUSR1)  # and kills nobody after the loop
        assert signal.sigtimedwait({signal.SIGUSR1}, 0) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_under_nohup_a_terminal_that_goes_changes_nothing_and_any_thread_may_ask() -> None:
    def asked() -> bool:
        with StopRequest(quiet=True) as stop:
            signal.raise_signal(signal.SIGHUP)
            return stop.asked

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not asked()
        with ThreadPoolExecutor() as threads:
            assert not threads.submit(asked).result()
    finally:
        signal.signal(signal.SIGHUP, before)


_STUBBORN = """
import pathlib, time
from lockstep.monitor.signals import StopRequest
with StopRequest():
    pathlib.Path("ready").touch()
    while True:
        try: time.sleep(60)
        except Exception: pass
"""


def test_the_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    with Running([sys.executable, "-c", _STUBBORN], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGINT)
        process.says(STOPPING)
        time.sleep(2 * _ECHO_S)
        process.send_signal(signal.SIGINT)
        ended = end(process, 10)
    assert ended.code == 1
    assert "Killed by a second signal, without saving" in ended.err

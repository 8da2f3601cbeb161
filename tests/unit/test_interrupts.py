"""The first signal asks, the second ends, and afterwards the handlers are what they were."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lockstep.interrupts import _ECHO_S, INSIST, STOPPING, Heard, Interrupts, StopRequest

from ..command import until


def test_what_a_signal_means_depends_on_when_the_first_one_came() -> None:
    times_s = iter((100.0, 100.0, 100.0 + _ECHO_S, 100.0 + _ECHO_S + 0.001))
    interrupts = Interrupts(lambda: next(times_s))
    before = (interrupts.asked, interrupts.insisted)
    found = [(interrupts.hear(), interrupts.asked, interrupts.insisted) for _ in range(4)]
    assert before == (False, False)
    assert found == [
        (Heard.FIRST, True, False),
        (Heard.ECHO, True, False),
        (Heard.ECHO, True, False),
        (Heard.SECOND, True, True),
    ]


# However slowly it runs, the second signal of this process is soon after the first.
_ASKED_TWICE = """
import signal
from lockstep import interrupts
interrupts._ECHO_S = 600
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
with interrupts.StopRequest() as stop:
    asked = [stop.asked]
    for _ in range(2):
        signal.raise_signal(signal.{})
        asked.append(stop.asked)
after = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
print(*asked, after == before)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_the_first_signal_asks(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ASKED_TWICE.format(name)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False True True True\n")
    assert done.stderr.strip() == f"lockstep: {STOPPING}{'' if name == 'SIGUSR1' else INSIST}"


def test_under_nohup_a_terminal_that_goes_changes_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(quiet=True) as stop:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_an_exception_the_handlers_are_back_and_another_thread_changes_none() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="x"), StopRequest():
        raise ValueError("x")
    assert signal.getsignal(signal.SIGTERM) == before
    seen = []

    def enter() -> None:
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.asked))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


_STUBBORN = """
import pathlib, time
from lockstep.interrupts import StopRequest
with StopRequest():
    pathlib.Path("ready").touch()
    while True:
        try: time.sleep(60)
        except Exception: pass
"""


@pytest.mark.parametrize("full", [False, True])
def test_the_second_signal_ends_the_process_at_once(tmp_path: Path, full: bool) -> None:
    told = Path("/dev/full") if full else tmp_path / "told"  # where nothing can be said, too
    with (
        told.open("w") as err,
        subprocess.Popen([sys.executable, "-c", _STUBBORN], cwd=tmp_path, stderr=err) as process,
    ):
        try:
            until((tmp_path / "ready").exists)
            process.send_signal(signal.SIGINT)
            until(lambda: full or STOPPING in told.read_text())
            time.sleep(3 * _ECHO_S)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 1
        finally:
            process.kill()
    if not full:
        asked, killed = filter(None, told.read_text().splitlines())
        assert asked == f"lockstep: {STOPPING}{INSIST}"
        assert killed.startswith("lockstep: Killed by a second signal, without saving;")

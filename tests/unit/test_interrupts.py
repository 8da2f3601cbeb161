"""The first signal asks, the second ends, and afterwards the handlers are what they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lockstep.interrupts import STOPPING, StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        asked = [stop.asked]
        os.kill(os.getpid(), number)
        asked.append(stop.asked)
        os.kill(os.getpid(), number)  # so soon, it is the first one passed on by a launcher
        asked.append(stop.asked)
        assert asked == [False, True, True]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert capfd.readouterr().err.strip() == f"lockstep: {STOPPING}"


def test_under_nohup_a_terminal_that_goes_changes_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(quiet=True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_an_exception_the_handlers_are_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="x"), StopRequest():
        raise ValueError("x")
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_another_thread_nothing_changes() -> None:
    seen = []

    def enter() -> None:
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.asked))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


def test_the_second_signal_ends_the_process_at_once() -> None:
    code = (
        "import time\nfrom lockstep.interrupts import StopRequest\n"
        "with StopRequest():\n"
        "    print('ready', flush=True)\n"
        "    while True:\n"
        "        try: time.sleep(60)\n"
        "        except Exception: pass\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.7)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=5)
    assert process.returncode == 1
    asked, killed = filter(None, err.decode().splitlines())
    assert asked == f"lockstep: {STOPPING}"
    assert killed.startswith("lockstep: Killed by a second signal, without saving;")

"""The first signal asks, and afterwards the handlers are what they were."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.monitor import signals
from lockstep.monitor.signals import INSIST, SIGNALS, STOPPING, StopRequest


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "_ECHO_S", 600)  # however slowly this runs, the second one is soon after the first
    before = signal.getsignal(number)
    with contextlib.suppress(KeyError), StopRequest() as stop:
        assert not stop.asked
        for _ in range(2):
            signal.raise_signal(number)
            assert stop.asked
        raise KeyError  # after which the handlers are back as well
    assert signal.getsignal(number) == before
    assert capfd.readouterr().err == f"\nlockstep: {STOPPING}{'' if number == signal.SIGUSR1 else INSIST}\n"


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

"""Calls that do not come back: how long they are waited for, and what they do to the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from lockstep import bounded


def test_a_call_is_waited_for_so_long_and_no_longer() -> None:
    goes_on = threading.Event()
    assert bounded.within(20, lambda: 7, "soon") == 7
    with pytest.raises(ZeroDivisionError):
        bounded.within(20, lambda: 1 // 0, "raises")
    with pytest.raises(bounded.Late, match=r"^late: no answer within 0\.05 s$"):
        bounded.within(0.05, goes_on.wait, "late")
    assert bounded.any_left()
    goes_on.set()
    for thread in threading.enumerate():
        if isinstance(thread, bounded.Call):
            thread.join()
    assert not bounded.any_left()


_HANGS = """
import sys, time, types
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from lockstep import __main__ as command, bounded

class Slow:  # what is left of the interpreter takes long to end, so that the call comes back before it has
    def __del__(self, sleep=time.sleep):
        sleep(4)

sys.modules["held"] = types.ModuleType("held")
sys.modules["held"].slow = Slow()

def fails():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    try:
        bounded.within(0.2, lambda: store.get("what never comes"), "hangs")
    except bounded.Late:
        return 1

command.run = fails
{end}
"""


def _ends(end: str) -> int:
    code = _HANGS.replace("{end}", end)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode


def test_a_call_that_comes_back_at_the_end_does_not_change_the_exit_code() -> None:
    assert _ends("command.main()") == 1
    assert _ends("sys.exit(command.run())") == -6  # what it is about; no longer so, and `bounded.any_left` may go

"""The folder of a run, which an earlier start of the same run may still hold."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep import folders
from lockstep.config import RunConfig
from lockstep.errors import RequestError, RunError
from lockstep.options import override

_HOLDER = """
import sys
from pathlib import Path
from lockstep import locks
held = getattr(locks, sys.argv[2])(Path(sys.argv[1]))
assert held
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def _held(folder: Path, how: str = "acquire") -> Iterator[subprocess.Popen[str]]:
    """Have another process lock the folder, until its input ends."""
    words = [sys.executable, "-c", _HOLDER, str(folder), how]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def _config(folder: Path, stall_timeout: float) -> RunConfig:
    return override(RunConfig(), output=folder, stall_timeout=stall_timeout)


def _named(process: subprocess.Popen[str]) -> str:
    return f"process {process.pid} on {platform.node()}"


def test_a_run_that_starts_again_where_its_folder_is_not_is_refused(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()  # of a rank of this node, in the start before
    with pytest.raises(RequestError, match="is not the folder in which this run was begun, on another node"):
        folders.claim(_config(tmp_path, 60), before=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_run_that_starts_again_waits_for_a_rank_0_that_has_not_ended_yet(tmp_path: Path) -> None:
    with _held(tmp_path) as process:
        until_s = time.monotonic() + 1
        ending = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {process.pid}"])
        claimed = folders.claim(_config(tmp_path, 60), before=tmp_path, holder=_named(process))
        assert time.monotonic() >= until_s - 0.2
        claimed.release()
        ending.wait()


def test_a_folder_is_its_runs_also_while_no_rank_holds_it(tmp_path: Path) -> None:
    folders.claim(_config(tmp_path, 60)).release()
    taken = r"is in use by another run \(its rank 0, process \d+ on .*, has ended, and its ranks are started again\)"
    with _held(tmp_path, "acquire_for_agent"):
        with pytest.raises(RequestError, match=taken):
            folders.claim(_config(tmp_path, 60))
        with pytest.raises(RequestError, match=taken):
            folders.check(_config(tmp_path, 60))
        folders.claim(_config(tmp_path, 60), before=tmp_path, holder="process 1 on a host").release()
        with _held(tmp_path, "acquire_for_agent"):  # another one of the same run
            pass
    folders.check(_config(tmp_path, 60))


def test_a_rank_0_that_does_not_end_keeps_the_next_start_from_writing(tmp_path: Path) -> None:
    with _held(tmp_path) as process:
        with pytest.raises(RunError, match=rf"held by rank 0 of the start before this one \(process {process.pid} on "):
            folders.claim(_config(tmp_path, 1), before=tmp_path, holder=_named(process))
        with pytest.raises(RequestError, match=rf"is in use by another run \(process {process.pid} on "):
            folders.claim(_config(tmp_path, 60), before=tmp_path, holder="process 1 on another host")
        begun_s = time.monotonic()
        with pytest.raises(RequestError, match="is in use by another run"):
            folders.claim(_config(tmp_path, 60))
        assert time.monotonic() - begun_s < 5  # another run is told at once

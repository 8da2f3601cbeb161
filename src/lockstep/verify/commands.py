"""Commands that are run to their end: none of them outlives the call, and the first that fails is told in its words."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import psutil

from ..errors import ProofError, RequestError, RunError, Stopped
from ..files import lines_of, ours

Command = tuple[str, ...]
_LOOK_S = 0.05
_LATE = -1
_GRACE_S = 5.0  # for a command to end the ranks that it has started, before all of them are killed


def run(
    name: str,
    stage: Sequence[Command],
    logs: Sequence[Path],
    *,
    grace_s: float = _GRACE_S,
    limit_s: float = math.inf,
    enough: Callable[[], bool] | None = None,
) -> None:
    """Run commands at once, to their end; none of them, nor what they start, outlives this call.

    Raises the error of the one that failed first, which `name` tells in the sentence, and `RunError` where they are
    ended since they have not by `limit_s`. As soon as `enough` says so they are asked to stop; having stopped is then
    no failure.
    """
    with contextlib.ExitStack() as files:
        children: list[subprocess.Popen[bytes]] = []
        try:
            for command, log in zip(stage, logs, strict=True):
                children.append(_start(command, files.enter_context(open(log, "wb", buffering=0, opener=ours))))
            failed = _first_failure(children, limit_s, enough)
        finally:
            _end(children, grace_s)
    if failed == _LATE:
        raise RunError(f"The variant {name} failed: it was ended after {limit_s:.0f} s; its output is in {logs[0]}.")
    if failed is not None:
        raise _error(name, children[failed].returncode, logs[failed])


class Running(contextlib.AbstractContextManager["Running"]):
    """One command that runs while the block does, and does not outlive it."""

    def __init__(self, name: str, command: Command, log: Path) -> None:
        """Start it; what it says goes to `log`."""
        self._name, self._log = name, log
        with open(log, "wb", buffering=0, opener=ours) as file:
            self._child = _start(command, file)
        self._left = [self._child]

    def __exit__(self, *_: object) -> None:
        left, self._left = self._left, []
        _end(left, 0.0)

    def check(self) -> None:
        """Raise the error that the command has ended with, if it has ended."""
        if self._child.poll() is not None:
            raise _error(self._name, self._child.returncode, self._log)


def _start(command: Command, log: IO[bytes]) -> subprocess.Popen[bytes]:
    log.write(f"$ {shlex.join(command)}\n".encode())
    # A session of its own: Ctrl-C reaches this process alone, which ends the others.
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def _first_failure(
    children: Sequence[subprocess.Popen[bytes]], limit_s: float, enough: Callable[[], bool] | None
) -> int | None:
    """Return the index of the first child that has failed, `_LATE` after the limit; None once all have ended well."""
    until_s = time.monotonic() + limit_s
    fine: tuple[int | None, ...] = (None, 0)
    while True:
        if time.monotonic() > until_s:
            return _LATE
        if enough is not None and enough():
            enough, fine = None, (*fine, Stopped.exit_code)
            for child in children:
                child.terminate()
        codes = [child.poll() for child in children]
        failed = [index for index, code in enumerate(codes) if code not in fine]
        if failed:
            return failed[0]
        if None not in codes:
            return None
        time.sleep(_LOOK_S)


def _end(children: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """End the children that are left, and all that they started: asked first, then killed."""
    living = [child for child in children if child.poll() is None]
    try:
        for child in living:
            child.terminate()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(child.poll() is None for child in living):
            time.sleep(_LOOK_S)
    finally:  # also where Ctrl-C comes again
        for child in living:
            if child.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found = psutil.Process(child.pid)
                    for each in (found, *found.children(recursive=True)):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            each.kill()
                child.wait()
        for child in children:  # data workers whose rank was killed, which may be stopped
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)


def _error(name: str, code: int, log: Path) -> Exception:
    """Return the error of a command that failed, with its own sentence."""
    lines = [line.decode(errors="replace").rstrip() for line in lines_of(log) if line.strip()]
    # Of ranks that share a log, the first to speak is the one that failed; the others tell that they lost it.
    told = [line.removeprefix("lockstep: ") for line in lines if line.startswith("lockstep: ")]
    how = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
    said = told[0] if told else f"{how} and no word; its output is in {log}."
    kinds = {each.exit_code: each for each in (RequestError, ProofError, Stopped)}
    return kinds.get(code, RunError)(f"The variant {name} failed: {said}")

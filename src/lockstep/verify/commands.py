"""Run commands to completion. No command outlives the call; the message of the first failure is raised."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from ..errors import ProofError, RequestError, RunError, Stopped
from ..files import lines_of, unlinked
from ..launchers.process import end_with_parent

Command = tuple[str, ...]
_LOOK_S = 0.05
_GRACE_S = 5.0  # for a command to end its ranks before all are killed


def python(*words: str) -> Command:
    """Return the command `python -m` with these words."""
    return (sys.executable, "-P", "-m", *words)  # -P: modules of the current folder must not shadow ours


class Running(contextlib.AbstractContextManager["Running"]):
    """A command that runs within the block. The exit ends it and its descendants."""

    def __init__(self, name: str, command: Command, log: Path, *, grace_s: float = 0.0) -> None:
        """Start the command, with its output in `log`. It may take `grace_s` to end after a request."""
        self._name, self._log, self._grace_s = name, log, grace_s
        self._asked_s = math.inf
        with open(log, "wb", buffering=0, opener=unlinked) as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            # In a new session: Ctrl-C reaches this process alone, which ends the commands. If this process is killed,
            # the kernel ends them. The function called between fork and exec takes no lock.
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def ask(self) -> None:
        """Ask the command to end."""
        self._asked_s = min(self._asked_s, time.monotonic())
        if self._child.poll() is None:
            self._child.terminate()

    def check(self, *, fine: tuple[int, ...] = ()) -> bool:
        """Return whether the command has ended. Raises its error for an exit code not in `fine`."""
        code = self._child.poll()
        if code is None or code in fine:
            return code is not None
        lines = [line.decode(errors="replace").rstrip() for line in lines_of(self._log) if line.strip()]
        # In a log that ranks share, the first message is the failed rank's; the others report that they lost it.
        messages = [line.removeprefix("lockstep: ") for line in lines if line.startswith("lockstep: ")]
        ending = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
        kinds = {error.exit_code: error for error in (RequestError, ProofError, Stopped)}
        reason = messages[0] if messages else f"{ending} and no word; its output is in {self._log}."
        raise kinds.get(code, RunError)(f"The variant {self._name} failed: {reason}")

    def __exit__(self, *_: object) -> None:
        child = self._child
        try:
            self.ask()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, self._asked_s + self._grace_s - time.monotonic()))
        finally:  # also after a second Ctrl-C
            if child.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(child.pid)
                    for descendant in (process, *process.children(recursive=True)):  # its ranks lead separate sessions
                        with contextlib.suppress(psutil.NoSuchProcess):
                            descendant.kill()
                child.wait()
            # Data workers of a killed rank, which may be stopped. A living process with this id is another one.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if not psutil.pid_exists(child.pid):
                    os.killpg(child.pid, signal.SIGKILL)


def run(
    name: str,
    stage: Sequence[Command],
    logs: Sequence[Path],
    *,
    grace_s: float = _GRACE_S,
    limit_s: float = math.inf,
    enough: Callable[[], bool] | None = None,
) -> None:
    """Run commands concurrently to completion; no descendant outlives the call.

    Raises the error of the first command that fails, with `name` in the sentence, and `RunError` after `limit_s`. When
    `enough` returns True, the commands are asked to stop, and stopping is no failure.
    """
    deadline_s = time.monotonic() + limit_s
    fine: tuple[int, ...] = (0,)
    with contextlib.ExitStack() as stack:
        runs = (Running(name, *pair, grace_s=grace_s) for pair in zip(stage, logs, strict=True))
        children = [stack.enter_context(child) for child in runs]
        for child in children:
            stack.callback(child.ask)  # ask all before waiting for the first
        while sum(child.check(fine=fine) for child in children) < len(children):
            if time.monotonic() > deadline_s:
                raise RunError(f"The variant {name} failed: it was ended after {limit_s:.0f} s; see {logs[0]}.")
            if enough is not None and enough():
                enough, fine = None, (0, Stopped.exit_code)
                for child in children:
                    child.ask()
            time.sleep(_LOOK_S)

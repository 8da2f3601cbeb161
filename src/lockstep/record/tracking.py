"""Trackers of a run, each in a process of its own, which costs the run nothing.

    record ──> queue ──> thread ──> pipe ──> python -m lockstep.record.tracking NAME FOLDER ──> the tracker

Trackers replace `sys.exit`, `sys.excepthook` and signal handlers, start threads, and wait for servers. In this process
they would change the user's; data workers that are forked would inherit held locks. A tracker's process ends with its
pipe: if rank 0 is killed, the tracker still ends its run, as failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..files import DEFECTS, own_folder, parse_json, read, unlinked, write_json
from ..monitor.failures import one_line
from . import trackers
from .base import Recorder, curves
from .trackers import RunInfo

FOLDER = "trackers"
"""In a run's folder: each tracker's output, and the id of its run."""
_ATTACHED = ("proof.md", "summary.json")
_MOST = 1000  # waiting records
_PATIENCE_S = 10.0  # for a tracker at the run's end
_STARTING_S = 30.0  # for its start: MLflow took 16 s to make a database
_LAST_S = 1.0  # for the kernel to end a killed process
_USER_INFO = re.compile(r"(?<=//)[^/@\s]*@")  # a password in a URL


class Tracking(Recorder):
    """Sends a run's config, curves and end to one tracker."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        """Start the process of the tracker `name`. `config` is {option: value}."""
        own_folder(folder / FOLDER)
        self._name, self._folder, self._config = name, folder, config
        self._note = folder / FOLDER / f"{name}.json"
        self._queue: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._exit_code: int | None = 1
        self._begun_s = self._ended_s = time.monotonic()
        self._problem = ""
        self._sent = self._received = 0
        self._has_ended = False
        with open(folder / FOLDER / f"{name}.txt", "ab", opener=unlinked) as output:
            self._process = subprocess.Popen(
                # -P: modules of the current folder must not shadow ours
                [sys.executable, "-P", "-m", __name__, name, str(folder), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self._thread = threading.Thread(target=self._send, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return f"The record of {self._name}"

    def record(self, event: str, **fields: Any) -> None:
        """Queue the event. Raises OSError for a tracker that has failed, or is too slow."""
        if event == "start":
            run_id = ""
            with contextlib.suppress(*DEFECTS):
                run_id = str(parse_json(read(self._note))["id"])
            config = {key: value for key, value in (self._config | fields["chosen"]).items() if value is not None}
            self._queue.put(("start", self._folder.name, str(self._folder), config, run_id))
        elif event in ("finish", "failed"):
            self._exit_code = fields["exit"]
        elif values := curves(event, fields):
            self._sent += 1
            if self._queue.qsize() < _MOST:
                self._queue.put(("log", values, fields["step"]))
            else:
                self._problem = self._problem or "it is slower than the run"
        if self._problem:
            raise OSError(self._problem)

    def end(self) -> None:
        """Queue the end of the tracker's run."""
        self._ended_s = time.monotonic()
        self._queue.put(("finish", self._exit_code))

    def close(self) -> None:
        """Wait for the tracker, in bounded time. Raises OSError with the number of lost points."""
        deadline_s = max(self._ended_s + _PATIENCE_S, self._begun_s + _STARTING_S)
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._problem = self._problem or f"it did not end within {deadline_s - self._ended_s:.0f} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._thread.join(_LAST_S)
        if not self._has_ended or self._received < self._sent:
            raise OSError(f"{self._sent - self._received} of {self._sent} points are lost: {self._problem}")

    def _send(self) -> None:
        """Pass on each message, and wait for its reply."""
        with contextlib.suppress(OSError), self._process as process:  # whose pipe may be broken
            assert process.stdin is not None
            assert process.stdout is not None
            method = ""
            while method != "finish":
                method, *_ = message = self._queue.get()
                try:
                    process.stdin.write(json.dumps(message).encode() + b"\n")
                    process.stdin.flush()
                    reply = json.loads(process.stdout.readline())
                    if reply.get("id"):
                        write_json(self._note, {"id": reply["id"]})
                except (OSError, ValueError):
                    reply = {"error": f"its process has ended, see {FOLDER}/{self._note.stem}.txt"}
                if "error" in reply:
                    self._problem = self._problem or reply["error"]
                else:
                    self._received += method == "log"
                    self._has_ended = method == "finish"


def main(name: str, folder: Path) -> None:
    """Serve the tracker `name`: read messages from standard input, write replies to standard output."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run decides when it ends
        signal.signal(number, signal.SIG_IGN)
    replies = os.dup(1)
    with os.fdopen(os.dup(0)) as messages:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # libraries ask
        os.dup2(2, 1)  # and print
        tracker = None
        for line in messages:
            method, *arguments = json.loads(line)
            reply: dict[str, Any] = {}
            try:
                if tracker is None:
                    tracker = trackers.make(name)
                    reply["id"] = tracker.start(RunInfo(*arguments))
                elif method == "log":
                    tracker.log(*arguments)
                else:
                    tracker.finish(arguments[0], [folder / file for file in _ATTACHED if (folder / file).is_file()])
            except Exception as error:
                print(_USER_INFO.sub("", traceback.format_exc()), file=sys.stderr)
                reply["error"] = _USER_INFO.sub("", one_line(error))
            os.write(replies, json.dumps(reply).encode() + b"\n")
            if method == "finish" or (method == "start" and "error" in reply):
                return
        if tracker is not None:  # rank 0 has been killed, without a proof of this start
            signal.alarm(round(_PATIENCE_S))
            tracker.finish(1, [])


if __name__ == "__main__":
    sys.path += sys.argv[3:]  # after the libraries: where a script lies that has a tracker beside it
    main(sys.argv[1], Path(sys.argv[2]))

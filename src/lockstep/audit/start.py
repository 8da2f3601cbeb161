"""Start an audited command. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from ..launchers.process import end_with_parent
from . import BEGUN, VARIABLE

_STARTUP = Path(__file__).parent / "startup"
_PORTS = range(10_000, 30_000)
_LOOK_S = 0.1
_GRACE_S = 2.0  # for messages of the other ranks after one has failed


class Process(NamedTuple):
    """A command, and its environment beside this process's."""

    command: Sequence[str]
    env: dict[str, str]


def ranks(command: Sequence[str], count: int) -> list[Process]:
    """Return `count` ranks of a command, with the variables that torchrun would give them."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{_free_port()}", "TORCHELASTIC_RUN_ID": "audit"}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), f"{count}")
    shared |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    variables = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    return [Process(command, shared | dict.fromkeys(variables, f"{rank}")) for rank in range(count)]


def _free_port() -> int:
    """Return a free port below those that the kernel gives to others before the ranks listen."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run(
    mode: str, processes: Sequence[Process], folder: Path, *, limit_s: float = 300.0, **options: object
) -> int | None:
    """Run processes with the observer in each Python among them; return the first exit code that is not 0, or 0.

    `mode` is record or replay, `options` are the observer's. The output goes to MODE.txt in `folder`. If one process
    fails, the others are killed, and in the end their children. None if all were killed because `folder` had no new
    file for `limit_s` seconds.
    """
    if not (folder / BEGUN).exists():
        (folder / BEGUN).touch()
    path = os.pathsep.join(filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH"))))
    request = json.dumps({"mode": mode, "folder": str(folder), **options})
    env = {"OMP_NUM_THREADS": "1", **os.environ, VARIABLE: request, "PYTHONPATH": path}
    children: list[subprocess.Popen[bytes]] = []
    with (folder / f"{mode}.txt").open("wb") as file:
        try:
            for process in processes:
                children.append(
                    subprocess.Popen(
                        process.command,
                        env=env | process.env,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=end_with_parent,
                    )
                )
            return _wait(children, folder, limit_s)
        finally:
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):  # a launcher's ranks have other sessions
                    for grandchild in psutil.Process(child.pid).children(recursive=True):
                        grandchild.kill()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _wait(children: Sequence[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> int | None:
    changed_s, count, failed_s = time.monotonic(), 0, 0.0
    while True:
        codes = [child.poll() for child in children]
        failed = next((code for code in codes if code), 0)
        now_s, files = time.monotonic(), sum(1 for _ in folder.rglob("*"))
        failed_s = failed_s or now_s * bool(failed)
        if None not in codes or (failed and now_s > failed_s + _GRACE_S):
            return failed
        if files != count:
            changed_s, count = now_s, files
        if now_s > changed_s + limit_s:
            return None
        time.sleep(_LOOK_S)


def remove_new_files(folder: Path) -> None:
    """Remove the script's new files, which it made by torch.save or as a copy."""
    for note in folder.glob("saved/*.made"):
        Path(note.read_text()).unlink(missing_ok=True)

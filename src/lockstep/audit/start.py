"""Start an audited command. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from . import VARIABLE

_STARTUP = Path(__file__).parent / "startup"
_LOOK_S = 0.1


def run(mode: str, command: Sequence[str], folder: Path, *, limit_s: float = 300.0, **asked: object) -> int | None:
    """Run the command with the observer in each of its Python processes; return its exit code.

    `mode` is record or replay, `asked` what the observer takes. The output goes to MODE.txt in `folder`; processes that
    it leaves are killed. None if it was ended because `folder` had no new file for `limit_s` seconds.
    """
    path = os.pathsep.join(filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH"))))
    request = json.dumps({"mode": mode, "folder": str(folder), **asked})
    env = {"OMP_NUM_THREADS": "1", **os.environ, VARIABLE: request, "PYTHONPATH": path}
    with (folder / f"{mode}.txt").open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            changed_s, count = time.monotonic(), 0
            while process.poll() is None:
                files = sum(1 for _ in folder.rglob("*"))
                if files != count:
                    changed_s, count = time.monotonic(), files
                if time.monotonic() > changed_s + limit_s:
                    return None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
            return process.returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

"""Start an audited command. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import VARIABLE

_STARTUP = Path(__file__).parent / "startup"


def run(mode: str, command: Sequence[str], folder: Path, steps: int) -> bool:
    """Run the command with the observer in each of its Python processes; return whether it ended well.

    `mode` is record or replay. Its output goes to MODE.txt in `folder`; processes that it leaves are killed.
    """
    path = os.pathsep.join(filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH"))))
    request = json.dumps({"mode": mode, "folder": str(folder), "steps": steps})
    env = {"OMP_NUM_THREADS": "1", **os.environ, VARIABLE: request, "PYTHONPATH": path}
    with (folder / f"{mode}.txt").open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

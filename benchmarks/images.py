"""Where the real CIFAR-10 is: nothing is downloaded, and nothing is written into the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .harness import Skipped

FOLDER = "cifar-10-batches-py"
VARIABLE = "LOCKSTEP_TEST_DATA"


def cifar10() -> Path:
    """Return the folder that holds cifar-10-batches-py.

    It is the one that the variable names, or shared/data beside the repository. Where the images lie there packed,
    beside a program `unpack`, they are unpacked once into a cache in the temporary folder. Raises `Skipped`.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    source = Path(os.environ.get(VARIABLE, beside)).resolve()
    if (source / FOLDER).is_dir():
        return source
    unpack = source / "unpack"
    if not unpack.is_file():
        raise Skipped(f"no CIFAR-10 in {source}; set {VARIABLE} to the folder that holds {FOLDER}")
    cache = Path(tempfile.gettempdir()) / f"lockstep-benchmarks-{os.getuid()}"
    done = subprocess.run([sys.executable, str(unpack), str(cache)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Skipped(f"{unpack} failed: {(done.stderr or done.stdout).strip()}")
    return cache

"""The environment of other libraries: `.venv-peers`, over the packages of the one that runs the benchmarks."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path

from .harness import Skipped

FOLDER = Path(__file__).parents[1] / ".venv-peers"
VERSIONS = {"accelerate": "1.15.0", "lightning": "2.6.6"}


def python() -> str:
    """Return the interpreter that has other libraries besides what there is here; make it if need be.

    Raises `Skipped` where they cannot be installed.
    """
    found = FOLDER / "bin" / "python"
    wanted = [f"{name}=={version}" for name, version in VERSIONS.items()]
    mark = FOLDER / "installed"
    if not mark.exists() or mark.read_text(encoding="utf-8").split() != wanted:
        venv.create(FOLDER, clear=True, with_pip=True)
        (packages,) = FOLDER.glob("lib/python3*/site-packages")
        # A site folder of its own, whose .pth files are read as well: torch is not installed twice.
        here = sysconfig.get_path("purelib")
        (packages / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n", encoding="utf-8")
        done = subprocess.run([found, "-m", "pip", "install", "--quiet", *wanted], capture_output=True, text=True)
        if done.returncode != 0:
            raise Skipped(f"{', '.join(wanted)} cannot be installed: {done.stderr.strip()[-300:]}")
        mark.write_text("\n".join(wanted), encoding="utf-8")
    return str(found)

"""The secret of a job, by which its ranks know one another.

LOCKSTEP_SECRET in the environment of every rank is the job's own. Without it, ranks that are known to be all on one
host have one of this user there. Ranks of several hosts have none then: they trust the network between them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..files import foreign

VARIABLE = "LOCKSTEP_SECRET"
_BYTES = 32


def of_job(env: Mapping[str, str], *, on_one_host: bool) -> bytes:
    """Return the job's secret; empty where nobody has given one, and the ranks are on several hosts or have no home."""
    if given := env.get(VARIABLE, ""):
        return given.encode(errors="surrogateescape")
    return _of_user() if on_one_host else b""


def _of_user() -> bytes:
    try:
        # Not among temporary files, which are tidied away while a job goes on, and where others take names first.
        path = Path.home() / ".cache" / "lockstep" / "secret"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), tempfile.NamedTemporaryFile(dir=path.parent) as part:
            part.write(secrets.token_bytes(_BYTES))
            part.flush()
            os.link(part.name, path)  # whole at once; unlike a rename it leaves what another rank has just put there
        with open(path, "rb", opener=foreign) as file:
            return file.read(_BYTES)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return b""

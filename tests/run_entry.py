"""`python -m tests.run_entry ENTRY '{"devices": 2}'`: launch an entry as a command would, for tests."""

from __future__ import annotations

import json
import sys

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import LockstepError, RunError
from lockstep.launchers.start import launch

from . import entries


def main() -> int:
    """Print what rank 0 returned, or the failure as the command does; return the exit code."""
    try:
        value = launch(getattr(entries, sys.argv[1]), override(RunConfig(), **json.loads(sys.argv[2])))
    except LockstepError as error:
        if isinstance(error, RunError):
            print(error.trace, file=sys.stderr, end="")
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    if value is not None:
        print(json.dumps(value))
    return 0


if __name__ == "__main__":
    sys.exit(main())

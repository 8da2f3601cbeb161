"""`python -m tests.limited WORDS`: the command, with 2 GiB of memory beside what its imports take."""

from __future__ import annotations

import resource
import sys

import psutil

from lockstep.cli.main import main

ROOM = 2 << 30

if __name__ == "__main__":
    most = psutil.Process().memory_info().vms + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sys.exit(main())

"""Passes what comes through pipes on to the console and to a file, until nobody is left who could write.

`said` starts it as a program of its own. So it still has the last words of a rank that C code ends, and writing to it
waits for nothing in that rank. It imports nothing that takes time.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

_AT_ONCE = 65_536


def main(file: int, *pipes: int) -> None:
    """Pass on what comes through two pipes to stdout and stderr, and write it to `file`; all are descriptors.

    What a console or a disk does not take is lost there alone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # whoever is signalled may have something to say about it
    consoles = dict(zip(pipes, (1, 2), strict=True))
    while consoles:
        for pipe in select.select(list(consoles), [], [])[0]:
            said = os.read(pipe, _AT_ONCE)
            if not said:
                del consoles[pipe]
                continue
            for where in (consoles[pipe], file):
                with suppress(OSError):
                    _write(where, said)


def _write(where: int, said: bytes) -> None:
    while said:
        said = said[os.write(where, said) :]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

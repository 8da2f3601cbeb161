"""The command: `lockstep`, or `python -m lockstep`. torchrun starts it as well: `torchrun -m lockstep train …`."""

import atexit
import contextlib
import os
import signal
import sys
from typing import NoReturn

from .cli.main import main as run
from .errors import Stopped
from .monitor import bounded
from .monitor.signals import SIGNALS


def main() -> NoReturn:
    """Run the command and end the process with its exit code."""
    _open_all()
    atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS)  # the first to be registered is the last to run
    code = run()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # too late to change how it ended, and soon enough to end it
            signal.signal(number, lambda *_: os._exit(code))
    # A call that is left may come back at any moment, and Python remembers a KeyboardInterrupt that came as it ran the
    # text of a program, as libraries have it do, and ends by a signal.
    if bounded.any_left() or code == Stopped.exit_code:
        bounded.leave(code)
    sys.exit(code)


def _open_all() -> None:
    """Open /dev/null for closed stdin, stdout and stderr. Otherwise other files would take their descriptors."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                # Takes the lowest number that is free; a rank is to find something there as well.
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


if __name__ == "__main__":
    main()

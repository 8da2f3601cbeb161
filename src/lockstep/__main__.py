"""`lockstep`, or `python -m lockstep`, which is also what torchrun starts: `torchrun -m lockstep train …`."""

import os
import signal
import sys
from typing import NoReturn

from . import bounded, said
from .cli.main import main as run
from .interrupts import SIGNALS


def main() -> NoReturn:
    """Run the command and end the process with its exit code."""
    code = run()
    said.flush()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # too late to change how it ended, and soon enough to end it
            signal.signal(number, lambda *_: os._exit(code))
    if bounded.any_left():  # after a failure: what it waits for may come at any moment
        bounded.leave(code)
    sys.exit(code)


if __name__ == "__main__":
    main()

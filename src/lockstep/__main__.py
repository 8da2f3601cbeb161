"""`lockstep`, or `python -m lockstep`, which is also what torchrun starts: `torchrun -m lockstep train …`."""

import signal
import sys
from typing import NoReturn

from . import bounded
from .cli.main import main as run
from .interrupts import SIGNALS


def main() -> NoReturn:
    """Run the command and end the process with its exit code."""
    code = run()
    for number in SIGNALS:  # one that comes now comes too late to change how it ended
        signal.signal(number, signal.SIG_IGN)
    if bounded.any_left():  # after a failure: what it waits for may come at any moment
        bounded.leave(code)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""`lockstep VERB …`: find the verb, print errors, return the exit code.

This module imports no torch, so that help and refusals answer at once; each verb is a file beside this one.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from importlib import import_module

from ..errors import LockstepError, RequestError, RunError, Stopped, unknown
from ..monitor.output import survive
from ..monitor.signals import OUTSIDE, heeded
from ..printable import one_line, visible
from ..screen import Screen
from . import output, usage

VERBS = (
    *("train", "run", "submit"),
    *("audit", "verify", "diff", "doctor"),
    *("compare", "forecast", "runs"),
    *("eval", "export", "eject", "info"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code. 0 done, 1 failed, 2 refused, 3 a proof failed, 75 stopped."""
    survive()
    try:
        with heeded(signal.default_int_handler):  # SIGTERM and SIGHUP end like Ctrl-C, with a message
            return _dispatch(sys.argv[1:] if arguments is None else arguments)
    except LockstepError as error:
        return _say(error)
    except KeyboardInterrupt as stop:
        if _lost_another(stop):
            # torchrun ends the remaining ranks with SIGTERM while they look for the lost one.
            return _say(RunError("ended by a signal after another rank was lost, whose own message gives the reason."))
        return _say(Stopped(OUTSIDE))
    except BrokenPipeError:
        return 1  # the reader, such as `head`, has seen enough
    except OSError as error:
        if error.filename is None:
            raise
        # The user's path is in another user's folder, or its name is too long.
        return _say(RequestError(f"{error.filename} cannot be used: {error.strerror}; give another path."))
    finally:
        output.let_go()


def _lost_another(stop: BaseException) -> bool:
    """Return whether this rank was already ending because another was lost."""
    from ..monitor.failures import is_echo  # late: it imports the options, which takes time

    error = stop.__context__
    return error is not None and (is_echo(error) or _lost_another(error))


def _dispatch(words: list[str]) -> int:
    verb, *arguments = words or ["--help"]
    if name := usage.requested(verb, arguments):
        output.show(usage.text(name))
    elif verb in VERBS:
        code: int = import_module(f".{verb}", __package__).main(arguments)
        return code
    elif verb in ("-V", "--version"):
        output.show(f"lockstep {usage.version()}\n")
    else:
        raise unknown("verb", verb, VERBS)
    return 0


def _say(error: LockstepError) -> int:
    with contextlib.suppress(OSError):  # the exit code still reports the failure
        if isinstance(error, RunError):
            print(visible(error.trace), file=sys.stderr, end="")
        screen = Screen(stderr=True)
        screen.show_cursor()  # a rank killed while it drew a bar leaves it hidden
        screen.say(("lockstep:", "bold"), f" {one_line(str(error))}")
    return error.exit_code

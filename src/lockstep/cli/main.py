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
from ..versions import version_of
from . import output

VERBS = {
    "train": "train a model: lockstep train RECIPE [flags]",
    "run": "run your own script on every device: lockstep run [flags] SCRIPT [its flags]",
    "eval": "evaluate a checkpoint: lockstep eval RUN [flags]",
    "audit": "judge any training script: lockstep audit --devices 2 SCRIPT [its flags]",
    "verify": "compare gradients and curves with one process: lockstep verify WHAT",
    "compare": "compare methods on this machine: lockstep compare RECIPE [--vary OPTION=VALUES]",
    "forecast": "predict more devices: lockstep forecast RECIPE --devices 1:64 --network 100GbE",
    "runs": "list the runs of a folder: lockstep runs [FOLDER]",
    "eject": "write plain PyTorch without lockstep: lockstep eject RECIPE|RUN|SCRIPT.py > train.py",
    "diff": "compare two checkpoints: lockstep diff A B",
    "submit": "submit a run to a cluster: lockstep submit slurm [its flags] RECIPE [flags]",
    "doctor": "check whether a job can run here: lockstep doctor [flags]",
    "info": "list versions, hardware, recipes, models, data sets, strategies, launchers",
}

_USAGE = """\
lockstep {version}: one PyTorch model, on any number of devices, provably the same model.

usage: lockstep VERB [flags]

{verbs}

lockstep VERB --help lists a verb's flags. To start: lockstep train digits --strategy ddp --devices 2
"""


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
    if verb in VERBS:
        return output.call(import_module(f".{verb}", __package__), arguments)
    version = version_of("lockstep-torch") or "(not installed)"
    if verb in ("-V", "--version"):
        text = f"lockstep {version}\n"
    elif verb in ("-h", "--help", "help"):
        verbs = "\n".join(f"  {name:<8} {phrase}" for name, phrase in VERBS.items())
        text = _USAGE.format(version=version, verbs=verbs)
    else:
        raise unknown("verb", verb, VERBS)
    output.show(text)
    return 0


def _say(error: LockstepError) -> int:
    with contextlib.suppress(OSError):  # the exit code still reports the failure
        if isinstance(error, RunError):
            print(visible(error.trace), file=sys.stderr, end="")
        screen = Screen(stderr=True)
        screen.show_cursor()  # a rank killed while it drew a bar leaves it hidden
        screen.say(("lockstep:", "bold"), f" {one_line(str(error))}")
    return error.exit_code

"""`lockstep VERB …`: finds the verb, says what went wrong in one sentence, and returns the exit code.

Nothing here imports torch, so that help and refusals answer at once; a verb is a file beside this one.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version

from rich.console import Console

from ..errors import LockstepError, RunError, Stopped, unknown

VERBS = {
    "train": "train a model: lockstep train RECIPE [flags]",
    "eval": "evaluate a checkpoint exactly: lockstep eval RUN [flags]",
    "info": "what there is: versions, hardware, recipes, models, data sets, strategies, launchers",
}

_USAGE = """\
lockstep {version}: one PyTorch model, on any number of devices, provably the same model.

usage: lockstep VERB [flags]

{verbs}

lockstep VERB --help shows a verb's flags. To start: lockstep train digits --strategy ddp --devices 2
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 refused, 3 a proof failed, 75 stopped."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return _dispatch(given)
    except RunError as error:
        print(error.trace, file=sys.stderr, end="")
        return _say(error)
    except LockstepError as error:
        return _say(error)
    except KeyboardInterrupt:
        print("lockstep: stopped before training began.", file=sys.stderr)
        return Stopped.exit_code


def _dispatch(given: list[str]) -> int:
    verb = given[0] if given else "--help"
    if verb in ("-h", "--help", "help"):
        lines = [f"  {name:<8} {phrase}" for name, phrase in VERBS.items()]
        print(_USAGE.format(version=version("lockstep-torch"), verbs="\n".join(lines)), end="")
        return 0
    if verb in ("-V", "--version"):
        print(f"lockstep {version('lockstep-torch')}")
        return 0
    if verb not in VERBS:
        raise unknown("verb", verb, VERBS)
    code: int = import_module(f".{verb}", __package__).main(given[1:])
    return code


def _say(error: LockstepError) -> int:
    # soft_wrap: one sentence stays one line for whoever greps it.
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.show_cursor()  # a rank that was killed while it drew a bar could not
    console.print(f"[bold]lockstep:[/] {_escaped(str(error))}")
    return error.exit_code


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")

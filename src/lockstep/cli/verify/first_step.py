"""`lockstep verify first_step run|train …`: the command after that, whose first gradients are kept in its folder.

`verify gradients` starts it for each variant of a loop of the user's own, and prints it; people have no need of it.
"""

from __future__ import annotations

from ...errors import RequestError
from ...launchers import table as launchers
from ...runs import folders
from ...verify.first_step import FirstStep
from .. import flags, run
from ..train import entry


def main(given: list[str]) -> int:
    """Run the command on every rank, and return the exit code."""
    verb, *words = given or [""]
    if verb not in ("run", "train"):
        raise RequestError(f"lockstep verify first_step takes the command to watch, run or train; found {verb!r}.")
    if verb == "run":
        config, script = run.asked(words, prog="lockstep run")
        watched = FirstStep(script)
    else:
        config, watched = flags.parse(words, prog="lockstep train"), FirstStep(entry)
    if launchers.starts_here(config):
        folders.check(config)
    launchers.launch(watched, config)
    return 0

"""Script of each rank: a session, and a loop of the catalogue or a generated program.

lockstep run --devices 2 tests/bring/script.py passes-two
lockstep run --devices 2 tests/bring/script.py '{"seed": 1, "number": 7}'
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PREFIX = "NUMBERS "
CODE = 9
"""The exit code of a killed rank."""


class Killed(BaseException):
    """Stands for the end of the process."""


def kill_at(session: Any, step: int, folder: Path, leave: Callable[[], Any]) -> None:
    """Call `leave` in the backward pass after `step` steps, once there is a checkpoint."""
    backward = session.backward

    @functools.wraps(backward)  # a loop may ask for its parameters
    def wrapped(*arguments: Any, **options: Any) -> None:
        if session.step >= step:
            deadline_s = time.monotonic() + 10
            while not (folder / "checkpoints" / "last").exists() and time.monotonic() < deadline_s:
                time.sleep(0.002)
            leave()
        backward(*arguments, **options)

    session.backward = wrapped


def leave_by_error() -> None:
    raise Killed


def leave_by_exit() -> None:
    os._exit(CODE)


def main(task: str, kill_step: str = "", folder: str = "", way: str = "exit") -> None:
    """Run the task; print its numbers."""
    import lockstep
    from tests.bring import catalogue, program

    torch.set_num_threads(1)
    session = lockstep.session()
    if kill_step:
        kill_at(session, int(kill_step), Path(folder), leave_by_exit if way == "exit" else leave_by_error)
    if task.startswith("{"):
        numbers = program.interpret(program.loads(task), session)
    else:
        case = catalogue.cases()[task]
        numbers = case.function()(session, case.how)
    print(PREFIX + json.dumps(numbers))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(*sys.argv[1:])

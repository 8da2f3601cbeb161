"""How long it takes until something happens: the command's help, and the first training step."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .harness import Report, Series, interleave, verdict

HELP_GOAL_S = 0.3
STEP_GOAL_S = {"single": 1.0, "ddp": 1.5}
ROUNDS = 5
_LOOK_S = 0.002
_LIMIT_S = 120.0


def measure() -> Report:
    """Return the seconds of help, of importing torch, and to the first step."""
    found = interleave(
        {
            "help": lambda: _ends("-m", "lockstep", "--help"),
            "train help": lambda: _ends("-m", "lockstep", "train", "--help"),
            "torch": lambda: _ends("-c", "import torch"),
            "single": lambda: _first_step("--strategy", "single"),
            "ddp": lambda: _first_step("--strategy", "ddp", "--devices", "2"),
        },
        rounds=ROUNDS,
    )
    over = {name: found[name].minus(found["torch"]) for name in STEP_GOAL_S}
    holds = found["help"].median <= HELP_GOAL_S and all(over[name].median <= goal for name, goal in STEP_GOAL_S.items())
    return Report(
        title="How long it takes to start",
        finding=f"`lockstep --help` answers in {found['help'].median:.2f} s (goal {HELP_GOAL_S}); the first step is "
        f"done {over['single'].median:+.2f} s after what `import torch` alone takes on one process (goal "
        f"{STEP_GOAL_S['single']:+}) and {over['ddp'].median:+.2f} s on two ranks (goal {STEP_GOAL_S['ddp']:+}); "
        f"{verdict(holds)}.",
        columns=("from the start of the process to", "seconds", "over `import torch`"),
        rows=(
            ("the end of `lockstep --help`", found["help"].text(), ""),
            ("the end of `lockstep train --help`", found["train help"].text(), ""),
            ("the end of `import torch`", found["torch"].text(), ""),
            _row("the first step of `lockstep train digits`", found["single"], over["single"]),
            _row("the same with `--strategy ddp --devices 2`", found["ddp"], over["ddp"]),
        ),
        method="Wall-clock seconds of new processes, files in the page cache. The first step is done when its line "
        "is in steps.jsonl, where it is looked for every 2 ms.",
        n=f"{ROUNDS} starts of each",
    )


def _row(what: str, whole: Series, over: Series) -> tuple[str, str, str]:
    return what, whole.text(), over.text("+.2f")


def _ends(*arguments: str) -> float:
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin_s


def _first_step(*flags: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run" / "steps.jsonl"
        command = [sys.executable, "-m", "lockstep", "train", "digits", "--max-steps", "1", *flags]
        begin_s = time.perf_counter()
        with subprocess.Popen(
            [*command, "--output", str(path.parent)], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        ) as process:
            seconds = _wait_for(lambda: path.exists() and b'"event": "step"' in path.read_bytes(), begin_s)
            code = process.wait()
        assert code == 0, f"{' '.join(command)} ended with {code}"
        return seconds


def _wait_for(holds: Callable[[], bool], begin_s: float) -> float:
    while not holds():
        time.sleep(_LOOK_S)
        assert time.perf_counter() - begin_s < _LIMIT_S, f"no step within {_LIMIT_S} s"
    return time.perf_counter() - begin_s

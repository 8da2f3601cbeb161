"""The command as a person uses it: real processes in a folder of their own, and what they leave there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.cli.main import main

from . import warm
from .warm import CODE, ROOT

__all__ = ["CODE", "ROOT"]
COLD = ("-X", "cold")
"""What a command goes `through` where it is to be a new process of Python: an option that means nothing."""
GATED = (
    *("train", "--data", "tests.own_data:gated", "--model", "mlp", "--strategy", "ddp", "--accelerator", "cpu"),
    *("--epochs", 6, "--checkpoint-every", 6, "--batch", 16, "--log-every", 1, "--workers", 0, "--precision", "fp64"),
    *("--output", "run"),
)
"""A run of 60 steps, which `gate` holds."""
LIMIT_S = 120.0
OPEN = 10**9
"""No step that `gate` holds a run at."""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


class Running(subprocess.Popen[str]):
    """A command under way; at the end of a `with` block it is killed, whatever has failed there."""

    def __exit__(self, *failed: Any) -> None:
        self.kill()
        super().__exit__(*failed)

    def says(self, words: str) -> None:
        """Return once a line on stderr has these words; that line and those before it are taken away."""
        assert self.stderr is not None
        while line := self.stderr.readline():
            if words in line:
                return
        raise AssertionError(f"it ended without {words!r}")


class _Warm(warm.Warm, Running):
    pass


def start(folder: Path, *words: object, through: Sequence[str] = (), module: str = "lockstep", **env: str) -> Running:
    """Start `python -m lockstep WORDS` in `folder`; the tests' own models are importable there, and no GPU is seen.

    The process comes from a server that has imported torch, unless it goes `through` something, such as `COLD`.
    """
    args = [*through, "-m", module, *map(str, words)]
    env = {**os.environ, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": "", **env}
    kind = Running if through or not warm.has(args, env) else _Warm
    return kind(
        [sys.executable, *args],
        cwd=folder,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Ended:
    """Wait for the command's own end."""
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return Ended(process.returncode, out, err)


def command(folder: Path, *words: object, through: Sequence[str] = (), **env: str) -> Ended:
    """Run the command to its end."""
    return end(start(folder, *words, through=through, **env))


def refusal(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    """Run the command in this process; return the one sentence with which it refuses."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    told = capsys.readouterr()
    return sentence(Ended(code, told.out, told.err), code=code)


def sentence(ended: Ended, *, code: int = 2) -> str:
    """Return the one sentence of a command that failed as it should: nothing but that is on stderr."""
    assert ended.code == code, ended
    lines = [line for line in ended.err.splitlines() if line.strip()]
    assert lines, ended
    assert lines[-1].startswith("lockstep: "), ended.err
    if code == 2:
        assert len(lines) == 1, ended.err
        assert lines[-1].endswith((".", "?")), lines[-1]
    return lines[-1].removeprefix("lockstep: ")


def until(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Return as soon as `holds()`; fail if it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.01)


def events(folder: Path, event: str) -> list[dict[str, Any]]:
    """Return the run's events of one kind; a line that is still being written is left out."""
    path = folder / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["event"] == event]


def losses(folder: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of every line for an optimizer step."""
    return [(row["step"], row["loss"]) for row in events(folder, "step")]


def weights(folder: Path) -> dict[str, bytes]:
    """Return the digests of all tensors in the run's last checkpoint, by file."""
    last = folder / "checkpoints" / "last"
    return {path.name: hashlib.sha256(path.read_bytes()).digest() for path in last.glob("*.safetensors")}


def gate(folder: Path, step: int, below: int = OPEN) -> None:
    """Hold a run of `own_data.gated` in this folder at a step, or at any from there that is `below` another."""
    (folder / "gate.part").write_text(f"{step} {below}")
    (folder / "gate.part").replace(folder / "gate")


def at(folder: Path, step: int) -> None:
    """Return once the run in this folder has made so many steps."""
    until(lambda: len(losses(folder / "run")) >= step)


def processes(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the command's process and all that it started."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def ranks_of(process: subprocess.Popen[str], word: str = "spawn_main") -> list[psutil.Process]:
    """Return what the command started, by a word of its command line: ranks as a rule; not what ends meanwhile."""
    found = []
    for each in processes(process)[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if word in " ".join(each.cmdline()):
                found.append(each)
    return found


def gone(found: Sequence[psutil.Process]) -> bool:
    """Whether none of the processes lives."""
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in found)

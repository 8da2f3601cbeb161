"""`lockstep audit [--devices N] SCRIPT [its flags]`: whether N ranks train one process's model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ProofError, RequestError, RunError
from ..files import write_json, write_whole
from ..screen import Screen
from . import flags, output, run

if TYPE_CHECKING:
    from ..audit.judge import Verdict

USAGE = """\
usage: lockstep audit [--devices N] [--steps K] [--output FOLDER] SCRIPT [its own flags]

Runs SCRIPT, which need not know lockstep, on N ranks as torchrun would, for K optimizer steps; then in one process, on
the ranks' samples, random draws and weights, and compares the gradients. Says whether N ranks train the model that one
process would train, and what makes them differ.

  --devices N       ranks (default: 2)
  --steps K         optimizer steps (default: 3)
  --output FOLDER   also write audit.md and audit.json there

Exit code: 0 sound, 3 unsound, 2 cannot be judged, 1 the script fails by itself.
"""
_OWN = dict.fromkeys(("--devices", "--steps", "--output"), str)
_STARTUP = Path(__file__).parents[1] / "audit" / "startup"


def main(given: list[str]) -> int:
    """Audit a script; return 0 where it is sound. Raises `ProofError` where it is not."""
    ours, script = run.split(given)
    own, rest = flags.take(ours, _OWN, prog="lockstep audit")
    if rest:
        raise RequestError(f"lockstep audit has no flag {rest[0]}; flags of the script follow it.")
    if not script or not Path(script[0]).is_file():
        raise RequestError("lockstep audit lacks the script to audit, as in lockstep audit --devices 2 train.py.")
    ranks, steps = (_whole(own, name, usual) for name, usual in (("--devices", 2), ("--steps", 3)))
    if ranks < 2:
        raise RequestError(f"--devices {ranks}: an audit compares several ranks with one process; give 2 or more.")
    with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as name:
        folder = Path(name)
        _start("record", ranks, script, folder, steps)
        _start("replay", 1, script, folder, steps)
        from ..audit.judge import judge  # late: it imports torch

        try:
            verdict = judge(folder)
        except ValueError as error:
            raise RequestError(f"{script[0]} cannot be judged: {error}.") from error
    _print(verdict, script, Path(own["--output"]) if "--output" in own else None)
    if not verdict.is_sound:
        raise ProofError(f"{script[0]} on {ranks} ranks does not train the model that one process would train.")
    return 0


def _whole(own: Mapping[str, str], name: str, usual: int) -> int:
    text = own.get(name, f"{usual}")
    if not text.isdecimal() or not int(text):
        raise RequestError(f"{name} {text}: give a whole number from 1 up.")
    return int(text)


def _start(mode: str, ranks: int, script: Sequence[str], folder: Path, steps: int) -> None:
    """Run the script under torchrun and the observer. Raises `RunError` where it fails by itself."""
    from ..audit import VARIABLE

    asked = json.dumps({"mode": mode, "folder": str(folder), "steps": steps})
    path = os.pathsep.join(filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}", *script]
    env = {"OMP_NUM_THREADS": "1", **os.environ, VARIABLE: asked, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, check=False)
    if done.returncode:
        raise RunError(f"{script[0]} failed on {ranks} ranks: its own message is above.")


def _print(verdict: Verdict, script: Sequence[str], folder: Path | None) -> None:
    about = f"{' '.join(script)}: {verdict.steps} steps on {verdict.ranks} ranks against one process"
    lines = [f"{'by design' if each.by_design else 'FAULT'}: {each.sentence}" for each in verdict.findings]
    if verdict.is_sound and not lines:
        lines = [
            f"sound: the ranks' gradients are one process's (largest difference {verdict.largest_gap:.1e}, tolerance "
            f"{verdict.tolerance:g})."
        ]
    with output.written():
        screen = Screen()
        for line in (about, *lines):
            screen.say(line)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "audit.md", "\n".join([f"# {about}", "", *(f"- {line}" for line in lines), ""]).encode())
        write_json(
            folder / "audit.json",
            {
                "script": list(script),
                "ranks": verdict.ranks,
                "steps": verdict.steps,
                "sound": verdict.is_sound,
                "largest_gap": verdict.largest_gap,
                "tolerance": verdict.tolerance,
                "findings": [dataclasses.asdict(each) for each in verdict.findings],
            },
        )

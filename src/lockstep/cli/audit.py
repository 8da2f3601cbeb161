"""`lockstep audit [--devices N] SCRIPT [its flags]`: whether N ranks train one process's model."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..audit import start
from ..audit.measure import Audited, measure
from ..errors import ProofError, RequestError
from ..files import write_json, write_whole
from ..screen import Screen
from . import flags, output, run
from .variants import whole_number

if TYPE_CHECKING:
    from ..audit.judge import Verdict

_FLAGS = {**dict.fromkeys(("--devices", "--steps", "--output", "--timeout"), str), "--float64": bool}


def main(words: list[str]) -> int:
    """Audit a script; return 0 if it is sound. Raises `ProofError` if it is not."""
    is_script = "--" not in words
    if is_script:
        words, command = run.split(words, ("--float64",))
    else:
        words, command = words[: words.index("--")], words[words.index("--") + 1 :]
    values, unknown = flags.take(words, _FLAGS, prog="lockstep audit")
    if unknown:
        raise RequestError(f"lockstep audit has no flag {unknown[0]}; flags of the script follow it.")
    if not command:
        raise RequestError("No script given; example: lockstep audit --devices 2 train.py.")
    path = Path(command[0]) if is_script and command[0] != "-m" else None
    if command == ["-m"]:
        raise RequestError("-m needs the name of a module; example: lockstep audit --devices 2 -m package.train.")
    if path is not None and not path.is_file():
        raise RequestError(f"{path} is not there; give the path of a script, -m and a module, or -- and a command.")
    ranks, steps, limit_s = (
        whole_number(name, values.get(name)) or default
        for name, default in (("--devices", 2), ("--steps", 3), ("--timeout", 300))
    )
    if ranks < 2:
        raise RequestError(f"--devices {ranks}: an audit compares several ranks with one process; give 2 or more.")

    def processes(count: int) -> list[start.Process]:
        return start.ranks([sys.executable, *command], count) if is_script else [start.Process(command, {})]

    hint = ""
    text = "" if path is None else path.read_text(encoding="utf-8", errors="replace")
    if re.search(r"mp\.spawn|start_processes|notebook_launcher", text):
        hint = f"; it starts ranks itself, so give lockstep audit -- python {shlex.join(command)}"
    audited = Audited(shlex.join(command), processes, ranks, steps, "--float64" in values, limit_s, hint)
    return report(audited, Path(values["--output"]) if "--output" in values else None)


def report(audited: Audited, folder: Path | None, keep: Callable[[Verdict], None] = lambda verdict: None) -> int:
    """Audit, print and write the verdict, also by `keep`; return 0 for a sound script. Raises `ProofError`."""
    with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as name:
        try:
            verdict = measure(audited, Path(name))
        finally:
            start.remove_new_files(Path(name))
    _print(verdict, audited.about, folder)
    keep(verdict)
    if not verdict.is_sound:
        raise ProofError(
            f"{verdict.ranks} ranks of {audited.about} do not train the model that one process would train."
        )
    if verdict.refusal:
        raise RequestError(f"{audited.about} cannot be judged: {verdict.refusal}.")
    return 0


def _print(verdict: Verdict, command: str, folder: Path | None) -> None:
    about = f"{command}: {verdict.steps} steps on {verdict.ranks} ranks against one process"
    lines = [f"{'by design' if finding.by_design else 'FAULT'}: {finding.sentence}" for finding in verdict.findings]
    if not verdict.refusal and verdict.largest_gap is not None and verdict.largest_gap <= verdict.tolerance:
        lines.append(
            f"{'sound' if verdict.is_sound else 'gradients'}: one process computes the same gradients of the ranks' "
            f"samples and draws (largest difference {verdict.largest_gap:.1e}, tolerance {verdict.tolerance:g})."
        )
    if verdict.unseen:
        lines.append(f"not seen: {'; '.join(verdict.unseen)}.")
    if verdict.refusal:
        lines.append(f"not judged: the gradients against one process, since {verdict.refusal}.")
    with output.written():
        screen = Screen()
        for line in (about, *lines):
            screen.say(line)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "audit.md", "\n".join([f"# {about}", "", *(f"- {line}" for line in lines), ""]).encode())
        is_sound = verdict.is_sound and not verdict.refusal
        write_json(folder / "audit.json", dataclasses.asdict(verdict) | {"command": command, "sound": is_sound})

"""`lockstep audit [--devices N] SCRIPT [its flags]`: whether N ranks train one process's model."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..audit import REFUSED, start
from ..errors import ProofError, RequestError, RunError
from ..files import write_json, write_whole
from ..printable import visible
from ..screen import Screen
from . import flags, output, run
from .variants import whole_number

if TYPE_CHECKING:
    from ..audit.judge import Verdict

_FLAGS = {**dict.fromkeys(("--devices", "--steps", "--output", "--timeout"), str), "--float64": bool}


class Audited(NamedTuple):
    """A command to audit, the processes of its ranks, and its limits."""

    about: str
    processes: Callable[[int], list[start.Process]]
    """Returns the processes of so many ranks."""
    ranks: int
    steps: int = 3
    float64: bool = False
    limit_s: float = 300.0
    hint: str = ""
    """For a script that fails."""

    def run(self, mode: str, folder: Path, ranks: int, **options: object) -> int | None:
        """Record or replay; return the exit code, None if the command was ended."""
        return start.run(mode, self.processes(ranks), folder, limit_s=self.limit_s, float64=self.float64, **options)


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
    if is_script and not Path(command[0]).is_file():
        raise RequestError(f"{command[0]} is not there; give the path of a script, or -- and a command.")
    ranks, steps, limit_s = (
        whole_number(name, values.get(name)) or default
        for name, default in (("--devices", 2), ("--steps", 3), ("--timeout", 300))
    )
    if ranks < 2:
        raise RequestError(f"--devices {ranks}: an audit compares several ranks with one process; give 2 or more.")

    def processes(count: int) -> list[start.Process]:
        return start.ranks([sys.executable, *command], count) if is_script else [start.Process(command, {})]

    hint = ""
    text = Path(command[0]).read_text(encoding="utf-8", errors="replace") if is_script else ""
    if re.search(r"mp\.spawn|start_processes|notebook_launcher", text):
        hint = f"; it starts ranks itself, so give lockstep audit -- python {shlex.join(command)}"
    audited = Audited(shlex.join(command), processes, ranks, steps, "--float64" in values, limit_s, hint)
    return judge(audited, Path(values["--output"]) if "--output" in values else None)


def judge(audited: Audited, folder: Path | None, keep: Callable[[Verdict], None] = lambda verdict: None) -> int:
    """Audit, print and write the verdict, also by `keep`; return 0 for a sound script. Raises `ProofError`."""
    with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as name:
        try:
            verdict = _measure(audited, Path(name))
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


def _measure(audited: Audited, folder: Path) -> Verdict:
    def refuse(reason: str) -> RequestError:
        return RequestError(f"{audited.about} cannot be judged: {reason}.")

    code = audited.run("record", folder, audited.ranks, steps=audited.steps)
    ranks = [*folder.glob("rank*")]
    if code and not (ranks and all((rank / "final.pt").exists() for rank in ranks)):
        _print_output(folder / "record.txt")
        raise RunError(f"{audited.about} failed: its own message is above{audited.hint}.")
    start.remove_new_files(folder)  # a script may continue from files that it finds
    stepping = len([*folder.glob("rank*/window0.pt")])
    if (folder / REFUSED).exists():
        raise refuse((folder / REFUSED).read_text())
    if not stepping:
        limit = f" within {audited.limit_s:g} s (--timeout)" if code is None else ""
        raise refuse(f"no optimizer has stepped after a model's call{limit}")
    if stepping < len(ranks):
        raise refuse(f"an optimizer steps on {stepping} of {len(ranks)} ranks alone")
    if stepping < 2:
        raise refuse("it has one rank; start several, as by --devices 2")
    from ..audit import judge  # late: it imports torch
    from ..audit.recording import TOGETHER, TURNS, Recording

    record, recorded = Recording(folder), code
    passes, missed = [TOGETHER], list[str]()
    while passes:
        code = audited.run("replay", folder, 1, passes=passes)
        start.remove_new_files(folder)
        complete = [name for name in passes if record.read_replay(record.steps - 1, name) is not None]
        if code and not complete and not (folder / REFUSED).exists():
            _print_output(folder / "replay.txt")
        if not complete or (folder / REFUSED).exists():
            missed = [name for name in passes if name not in (*complete, TOGETHER, TURNS)]
            break
        if passes == [TOGETHER] and judge.takes_turns(record):
            passes = [TURNS]
        elif passes in ([TOGETHER], [TURNS]):
            passes = judge.list_passes(record)
        else:
            passes = [name for name in passes if name not in complete]
    verdict = judge.judge(record)
    if missed:
        verdict.refuse(f"it failed in the replays that show causes ({', '.join(missed)})")
    if recorded != 0:
        ending = "did not end in time" if recorded is None else f"failed with exit code {recorded}"
        verdict.unseen.append(f"what follows the {verdict.steps} steps, since the script {ending} there")
    return verdict


def _print_output(path: Path) -> None:
    """Print the output of the command."""
    sys.stderr.write(visible(path.read_text(errors="replace")))


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

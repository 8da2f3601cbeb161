"""`lockstep audit [--devices N] SCRIPT [its flags]`: whether N ranks train one process's model."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..audit import start
from ..errors import ProofError, RequestError, RunError
from ..files import write_json, write_whole
from ..printable import visible
from ..screen import Screen
from . import flags, output, run

if TYPE_CHECKING:
    from ..audit.judge import Verdict

USAGE = """\
usage: lockstep audit [--devices N] [flags] SCRIPT [its own flags]
       lockstep audit [flags] -- COMMAND      one that starts the ranks, such as accelerate launch

Runs SCRIPT, which need not know lockstep, on N ranks as torchrun would, for K optimizer steps, and lets it come to an
evaluation and the next epoch; then in one process, on the ranks' samples, random draws and weights, and compares the
gradients. Says whether N ranks train the model that one process would train, and what makes them differ.

  --devices N       ranks (default: 2)
  --steps K         optimizer steps (default: 3)
  --float64         compute in float64, as far as the script follows torch's default dtype
  --timeout S       seconds without a step after which the script is ended (default: 300)
  --output FOLDER   also write audit.md and audit.json there

Exit code: 0 sound, 3 unsound, 2 cannot be judged, 1 the script fails by itself.
"""
_OWN = {**dict.fromkeys(("--devices", "--steps", "--output", "--timeout"), str), "--float64": bool}


class Audited(NamedTuple):
    """What is audited: a command, how its ranks start, and for how long."""

    about: str
    processes: Callable[[int], list[start.Process]]
    """Returns the processes of so many ranks."""
    ranks: int
    steps: int = 3
    float64: bool = False
    limit_s: float = 300.0

    def run(self, mode: str, folder: Path, ranks: int, **asked: object) -> int | None:
        """Record or replay; return the exit code, None where the command was ended."""
        return start.run(mode, self.processes(ranks), folder, limit_s=self.limit_s, float64=self.float64, **asked)


def main(given: list[str]) -> int:
    """Audit a script; return 0 where it is sound. Raises `ProofError` where it is not."""
    at = given.index("--") if "--" in given else None
    ours, script = run.split(given, ("--float64",)) if at is None else (given[:at], given[at:])
    own, rest = flags.take(ours, _OWN, prog="lockstep audit")
    if rest:
        raise RequestError(f"lockstep audit has no flag {rest[0]}; flags of the script follow it.")
    command = script[1:] if at is not None else script
    if not command:
        raise RequestError("lockstep audit lacks the script to audit, as in lockstep audit --devices 2 train.py.")
    if at is None and not Path(command[0]).is_file():
        raise RequestError(f"{command[0]} is not there; give the path of a script, or -- and a command.")
    ranks, steps, limit = (
        _whole(own, name, usual) for name, usual in (("--devices", 2), ("--steps", 3), ("--timeout", 300))
    )
    if ranks < 2:
        raise RequestError(f"--devices {ranks}: an audit compares several ranks with one process; give 2 or more.")

    def processes(count: int) -> list[start.Process]:
        if at is None:
            return start.ranks([sys.executable, *command], count)
        return [start.Process(command, {})]

    audited = Audited(shlex.join(command), processes, ranks, steps, "--float64" in own, float(limit))
    return judge(audited, Path(own["--output"]) if "--output" in own else None)


def judge(audited: Audited, folder: Path | None, keep: Callable[[Verdict], None] = lambda verdict: None) -> int:
    """Audit, print and write the verdict, also by `keep`; return 0 for a sound script. Raises `ProofError`."""
    with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as name:
        try:
            verdict = _verdict(audited, Path(name))
        finally:
            start.remove_made(Path(name))
    _print(verdict, audited.about, folder)
    keep(verdict)
    if not verdict.is_sound:
        raise ProofError(
            f"{verdict.ranks} ranks of {audited.about} do not train the model that one process would train."
        )
    if verdict.refusal:
        raise RequestError(f"{audited.about} cannot be judged: {verdict.refusal}.")
    return 0


def _verdict(audited: Audited, folder: Path) -> Verdict:
    about = audited.about
    code = audited.run("record", folder, audited.ranks, steps=audited.steps)
    known = [*folder.glob("rank*")]
    if code and not (known and all((rank / "final.pt").exists() for rank in known)):
        raise _failed(folder / "record.txt", f"{about} failed by itself")
    start.remove_made(folder)  # a script may continue from what it finds
    ranks = len([*folder.glob("rank*/window0.pt")])
    if (folder / "refused.txt").exists():
        raise RequestError(f"{about} cannot be judged: {(folder / 'refused.txt').read_text()}.")
    if not ranks:
        within = f" within {audited.limit_s:g} s (--timeout)" if code is None else ""
        raise RequestError(f"{about} cannot be judged: no optimizer has stepped after a model's call{within}.")
    if ranks < len(known):
        raise RequestError(f"{about} cannot be judged: an optimizer steps on {ranks} of {len(known)} ranks alone.")
    if ranks < 2:
        raise RequestError(f"{about} cannot be judged: it has one rank; start several, as by --devices 2.")
    from ..audit import judge  # late: it imports torch
    from ..audit.recording import REFUSED, TOGETHER, TURNS, Recording

    record = Recording(folder)
    missing = [TOGETHER]
    while missing:
        code = audited.run("replay", folder, 1, passes=missing)
        start.remove_made(folder)
        done = [name for name in missing if record.replayed(record.steps - 1, name) is not None]
        if (folder / REFUSED).exists():
            break
        if code and not done:
            sys.stderr.write(visible((folder / "replay.txt").read_text(errors="replace")))
        if not done:
            break
        if missing == [TOGETHER] and judge.takes_turns(record):
            missing = [TURNS]
        elif missing in ([TOGETHER], [TURNS]):
            missing = judge.passes(record)
        else:
            missing = [name for name in missing if name not in done]
    return judge.judge(record)


def _failed(output: Path, sentence: str) -> RunError:
    """Print what the command has written; return the error."""
    sys.stderr.write(visible(output.read_text(errors="replace")))
    return RunError(f"{sentence}: its own message is above.")


def _whole(own: Mapping[str, str], name: str, usual: int) -> int:
    text = own.get(name, f"{usual}")
    if not text.isdecimal() or not int(text):
        raise RequestError(f"{name} {text}: give a whole number from 1 up.")
    return int(text)


def _print(verdict: Verdict, command: str, folder: Path | None) -> None:
    about = f"{command}: {verdict.steps} steps on {verdict.ranks} ranks against one process"
    lines = [f"{'by design' if each.by_design else 'FAULT'}: {each.sentence}" for each in verdict.findings]
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
        told = dataclasses.asdict(verdict) | {"command": command, "sound": verdict.is_sound and not verdict.refusal}
        write_json(folder / "audit.json", told)

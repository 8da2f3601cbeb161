"""`lockstep run [flags] SCRIPT [its own flags]`: a script on every rank."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection
from pathlib import Path

from .. import user_code
from ..config.options import leaves, left_to_command
from ..config.registry import per_device
from ..config.schema import DataConfig, ModelConfig, RunConfig
from ..errors import RequestError
from ..launchers import start
from ..launchers.plan import plan
from ..printable import told
from ..runs import folders
from ..screen import Screen
from ..sessions.script import Script
from . import flags, output

SWITCHES = ("--dry-run",)
"""Flags of this verb without a value."""
_USAGE = """\
usage: lockstep run [--dry-run] [flags] SCRIPT [its own flags]
       lockstep run [--dry-run] [flags] -m MODULE [its own flags]

Runs SCRIPT on every rank as `python SCRIPT` would; its call of lockstep.session() joins the ranks. Flags before SCRIPT
are those flags of lockstep train that a script leaves to the command:

{flags}

lockstep train --help describes them. Without --output, the run's folder is runs/NAME, after the script's name.
--dry-run prints how the ranks would start, and starts nothing.
"""


def main(given: list[str]) -> int:
    """Run the script on every rank, and return the exit code."""
    ours, script_words = split(given, SWITCHES)
    if {"-h", "--help"} & {*ours}:
        names = " ".join(f"--{name}" for name in sorted(_known()))
        listed = textwrap.fill(names, 116, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        output.show(_USAGE.format(flags=listed))
        return 0
    is_dry = "--dry-run" in ours
    config, script = asked([*(word for word in ours if word != "--dry-run"), *script_words], prog="lockstep run")
    if flags_of_ours := _misplaced(script):
        sys.stderr.write(
            told(
                f"{' and '.join(flags_of_ours)} after {script.name} belongs to the script, which does not name it; "
                f"flags of lockstep run stand before it: lockstep run {flags_of_ours[0]} … {script.name}."
            )
        )
    planned = plan(config)
    if planned.starts_here:
        folders.check(config)
    if is_dry:
        with output.written():
            Screen().print(f"{planned}\n{' '.join((script.name, *script.arguments))}", soft_wrap=True)
        return 0
    return start.run(script, planned) or 0


def asked(given: list[str], *, prog: str) -> tuple[RunConfig, Script]:
    """Return the config and the script of a command line.

    Raises `RequestError` for an invalid script, and for flags on which the script decides.
    """
    ours, rest = split(given)
    is_module = rest[:1] == ["-m"]
    name, *arguments = rest[is_module:] or [""]
    names: set[str] = set()

    def check(found: Collection[str], config: RunConfig) -> None:
        names.update(found)
        if idle := [f"--{flag}" for flag in found if flag not in _known()]:
            raise RequestError(f"{prog} takes no {', '.join(idle)}: the script decides on that; leave it out.")

    # The script decides on model and data; its name is that of the default folder.
    base = RunConfig(model=ModelConfig(name=name if is_module else Path(name).stem), data=DataConfig(name=""))
    config = flags.parse(ours, prog=prog, base=base, imports=False, check=check)
    if config.parallel.drives_all:
        raise RequestError(
            f"--strategy {config.parallel.strategy} drives several devices from one process, and each process of a "
            f"script has one; take {per_device()}, or leave it out."
        )
    if not is_module:
        _check_script(name)
    elif user_code.find(name.partition(".")[0]) is None:
        raise RequestError(f"-m {name}: there is no such module in {Path.cwd()} or among the installed packages.")
    return config, Script(name, tuple(arguments), is_module, frozenset(names))


def names_script(given: list[str], switches: Collection[str] = ()) -> bool:
    """Return whether a script follows the flags. NAME.py, or -m MODULE; else a recipe."""
    after = next(iter(split(given, switches)[1]), "")
    return after == "-m" or after.endswith(".py")


def split(given: list[str], switches: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Split the words into flags and script. The script, or -m, begins the second part.

    `switches` are flags without a value beside those of a run.
    """
    ours = {f"--{no}{leaf.key}" for leaf in leaves() if leaf.kind is bool for no in ("", "no-")}
    switches = {*ours, *switches, "--help", "-h"}
    at = 0
    while at < len(given) and given[at].startswith("-") and given[at] != "-m":
        flag, equals, _ = given[at].partition("=")
        at += 1 if equals or flag.replace("_", "-") in switches else 2
    return given[:at], given[at:]


def _misplaced(script: Script) -> list[str]:
    """Return flags on how ranks start that follow a script which does not have them in its text."""
    if script.is_module:
        return []
    ours = {leaf.key for leaf in leaves() if leaf.section == "parallel"}
    text = Path(script.name).read_text(encoding="utf-8", errors="replace")
    words = [word.partition("=")[0] for word in script.arguments if word.startswith("--")]
    keys = [word[2:].replace("_", "-") for word in words]
    return [f"--{key}" for key in keys if key in ours and key not in text and key.replace("-", "_") not in text]


def _known() -> set[str]:
    return left_to_command()


def _check_script(name: str) -> None:
    """Raise `RequestError` for a missing script, or invalid Python."""
    if not name:
        raise RequestError("lockstep run lacks the script to run, as in lockstep run --devices 2 train.py.")
    try:
        compile(Path(name).read_bytes(), name, "exec", dont_inherit=True)
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}; give the path of a script.") from error
    except (SyntaxError, ValueError) as error:
        raise RequestError(f"{name} is no script that Python can read: {error}.") from error

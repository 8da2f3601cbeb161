"""`lockstep run [flags] SCRIPT [its own flags]`: a script on every rank."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from .. import user_code
from ..config.options import leaves, left_to_command
from ..config.registry import per_device
from ..config.schema import DataConfig, ModelConfig, RunConfig
from ..errors import RequestError
from ..launchers import start
from ..launchers.plan import plan
from ..monitor.output import say
from ..runs import folders
from ..screen import Screen
from ..sessions.script import Script
from . import flags, output, usage

SWITCHES = ("--dry-run",)
"""Flags of this verb without a value."""


def main(words: list[str]) -> int:
    """Run the script on every rank, and return the exit code."""
    flag_words, script_words = split(words, SWITCHES)
    if {"-h", "--help"} & {*flag_words}:
        output.show(usage.text("run"))
        return 0
    is_dry = "--dry-run" in flag_words
    config, script = parse([*(word for word in flag_words if word != "--dry-run"), *script_words], prog="lockstep run")
    if misplaced := _misplaced(script):
        say(
            f"{' and '.join(misplaced)} after {script.name} belongs to the script, which does not name it; flags of "
            f"lockstep run stand before it: lockstep run {misplaced[0]} … {script.name}."
        )
    launch_plan = plan(config)
    if launch_plan.starts_here:
        folders.check(config)
    if is_dry:
        with output.written():
            Screen().print(f"{launch_plan}\n{' '.join((script.name, *script.arguments))}", soft_wrap=True)
        return 0
    return start.run(script, launch_plan) or 0


def parse(words: list[str], *, prog: str) -> tuple[RunConfig, Script]:
    """Return the config and the script of a command line.

    Raises `RequestError` for an invalid script, and for flags of options that the script decides.
    """
    flag_words, script_words = split(words)
    is_module = script_words[:1] == ["-m"]
    name, *arguments = script_words[is_module:] or [""]
    names: set[str] = set()

    def check(flags: Collection[str], config: RunConfig) -> None:
        names.update(flags)
        if idle := [f"--{flag}" for flag in flags if flag not in left_to_command()]:
            raise RequestError(f"{prog} takes no {', '.join(idle)}: the script decides on that; leave it out.")

    # The script decides on model and data; the default folder has its name.
    base = RunConfig(model=ModelConfig(name=name if is_module else Path(name).stem), data=DataConfig(name=""))
    config = flags.parse(flag_words, prog=prog, base=base, imports=("track",), check=check)
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


def names_script(words: list[str], switches: Collection[str] = ()) -> bool:
    """Return whether a script follows the flags: NAME.py, or -m MODULE; otherwise a recipe does."""
    name = next(iter(split(words, switches)[1]), "")
    return name == "-m" or name.endswith(".py")


def split(words: list[str], switches: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Split the words into flags and script. The script, or -m, begins the second part.

    `switches` are flags without a value, beside those of a run.
    """
    run_switches = {f"--{no}{leaf.key}" for leaf in leaves() if leaf.kind is bool for no in ("", "no-")}
    switches = {*run_switches, *switches, "--help", "-h"}
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "-m":
        flag, equals, _ = words[index].partition("=")
        index += 1 if equals or flag.replace("_", "-") in switches else 2
    return words[:index], words[index:]


def _misplaced(script: Script) -> list[str]:
    """Return the launch flags after a script whose text does not name them."""
    if script.is_module:
        return []
    launch_keys = {leaf.key for leaf in leaves() if leaf.section == "parallel"}
    text = Path(script.name).read_text(encoding="utf-8", errors="replace")
    words = [word.partition("=")[0] for word in script.arguments if word.startswith("--")]
    keys = [word[2:].replace("_", "-") for word in words]
    return [f"--{key}" for key in keys if key in launch_keys and key not in text and key.replace("-", "_") not in text]


def _check_script(name: str) -> None:
    """Raise `RequestError` for a missing script, or invalid Python."""
    if not name:
        raise RequestError("No script given; example: lockstep run --devices 2 train.py.")
    try:
        compile(Path(name).read_bytes(), name, "exec", dont_inherit=True)
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}; give the path of a script.") from error
    except (SyntaxError, ValueError) as error:
        raise RequestError(f"{name} is no script that Python can read: {error}.") from error

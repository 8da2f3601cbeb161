"""`lockstep run [flags] SCRIPT [its own flags]`: a script of the user's, on every rank."""

from __future__ import annotations

import importlib.util
import textwrap
import warnings
from collections.abc import Collection
from importlib.machinery import PathFinder
from pathlib import Path

from ..config.options import leaves
from ..config.registry import KINDS, kind, per_device
from ..config.schema import DataConfig, ModelConfig, RunConfig
from ..errors import RequestError
from ..launchers import table as launchers
from ..runs import folders
from ..sessions.script import Script
from . import flags, output

_USAGE = """\
usage: lockstep run [flags] SCRIPT [its own flags]
       lockstep run [flags] -m MODULE [its own flags]

SCRIPT runs on every rank as python would run it, and its call of lockstep.session() joins them. Flags before it are
those of lockstep train that a script does not decide on:

{flags}

With --output left out, the run's folder is runs/NAME by the script's name.
"""

_SECTIONS = ("parallel", "checkpoint", "record")
_KEYS = ("seed", "max-steps", "accumulate", "micro-batch", "precision", "deterministic", "verify-every", "ledger")
"""Options, by section and one by one, that a script leaves to the command; it decides on all others itself."""


def main(given: list[str]) -> int:
    """Run the script on every rank, and return the exit code."""
    known = sorted(_known())
    if output.helped(
        [word for word in split(given)[0] if word in ("-h", "--help")], _USAGE.format(flags=_listed(known))
    ):
        return 0
    config, script = asked(given, prog="lockstep run")
    if launchers.starts_here(config):
        folders.check(config)
    return launchers.launch(script, config) or 0


def asked(given: list[str], *, prog: str) -> tuple[RunConfig, Script]:
    """Return what flags, a script and its own flags ask for.

    Raises `RequestError` for a script that is none, and for flags that the script decides on.
    """
    ours, rest = split(given)
    is_module = rest[:1] == ["-m"]
    name, arguments = next(iter(rest[is_module:]), ""), tuple(rest[is_module + 1 :])
    names: set[str] = set()

    def check(found: Collection[str], config: RunConfig) -> None:
        names.update(found)
        if idle := [f"--{flag}" for flag in found if flag not in _known()]:
            raise RequestError(f"{prog} takes no {', '.join(idle)}: the script decides on that; leave it out.")

    # The script decides on model and data; its name is that of the default folder.
    base = RunConfig(model=ModelConfig(name=name if is_module else Path(name).stem), data=DataConfig(name=""))
    config = flags.parse(ours, prog=prog, base=base, imports=False, check=check)
    _check_strategy(config.parallel.strategy)
    _check_module(name) if is_module else _check_script(name)
    return config, Script(name, arguments, is_module, frozenset(names))


def _known() -> set[str]:
    known = {leaf.key for leaf in leaves() if leaf.section in _SECTIONS or leaf.key in _KEYS}
    return known - {flag for kind in KINDS.values() for flag in kind.options}


def _listed(names: Collection[str]) -> str:
    words = " ".join(f"--{name}" for name in sorted(names))
    return textwrap.fill(words, 116, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def names_script(given: list[str], switches: Collection[str] = ()) -> bool:
    """Return whether a script (NAME.py, or -m MODULE) comes after the flags, and no recipe does."""
    after = next(iter(split(given, switches)[1]), "")
    return after == "-m" or after.endswith(".py")


def split(given: list[str], switches: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return the flags before the script, and the words from the script, or from -m, on.

    `switches` are flags without a value beside those of a run.
    """
    ours = {f"--{no}{leaf.key}" for leaf in leaves() if leaf.kind is bool for no in ("", "no-")} | {"--help", "-h"}
    switches = {*ours, *switches}
    at = 0
    while at < len(given) and given[at].startswith("-") and given[at] != "-m":
        flag, equals, _ = given[at].partition("=")
        at += 1 if equals or flag.replace("_", "-") in switches else 2
    return given[:at], given[at:]


def _check_strategy(name: str) -> None:
    if name != "auto" and kind(name).drives_all:
        raise RequestError(
            f"--strategy {name} drives several devices from one process, and each process of a script has one; take "
            f"{per_device()}, or leave it out."
        )


def _check_script(name: str) -> None:
    """Raise `RequestError` where there is no such script, or Python cannot read it."""
    if not name:
        raise RequestError("lockstep run lacks the script to run, as in lockstep run --devices 2 train.py.")
    path = Path(name)
    if path.is_dir():
        raise RequestError(f"{name} is a folder; give a script, or -m MODULE.")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}; give the path of a script.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show them
            compile(source, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise RequestError(f"{name} is no script that Python can read: {error}.") from error


def _check_module(name: str) -> None:
    """Raise `RequestError` where there is no such module, as far as can be seen without importing anything."""
    top = name.partition(".")[0]
    if not top or not (PathFinder.find_spec(top, [str(Path.cwd())]) or importlib.util.find_spec(top)):
        raise RequestError(
            f"-m {name or repr(name)}: there is no such module in {Path.cwd()} or among the installed packages."
        )

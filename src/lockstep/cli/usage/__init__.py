"""The texts of --help: a file per verb, beside this module, with the flags of the config's dataclasses.

Neither torch nor numpy is imported, so that help appears at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...config.schema import RunConfig

HELP = ("-h", "--help")
_TEXTS = {path.stem: path for path in Path(__file__).parent.glob("*.txt")}
_ALIASES = {"submit-slurm": "submit", "submit-kubernetes": "submit"}


def requested(verb: str, words: list[str]) -> str | None:
    """Return the name of the text that a command line asks for with its first words, or None."""
    if verb in (*HELP, "help"):
        return "lockstep"
    if verb not in _TEXTS:
        return None
    part = f"{verb}-{words[0]}" if words else ""
    if part in _TEXTS or part in _ALIASES:
        verb, words = part, words[1:]
    return verb if words[:1] in (["-h"], ["--help"]) or (verb, words[:1]) == ("verify", ["help"]) else None


def text(name: str, defaults: RunConfig | None = None) -> str:
    """Return the help of a verb, or of the command ("lockstep"). Flags show the values of `defaults`."""
    content = _TEXTS[_ALIASES.get(name, name)].read_text(encoding="utf-8")
    if "{flags}" in content:
        from ...config.options import left_to_command
        from .flags import listed

        bold = ("\033[1m", "\033[0m") if sys.stdout is not None and sys.stdout.isatty() else ("", "")
        content = content.replace("{flags}", listed(defaults, left_to_command() if name == "run" else None, bold))
    return content.replace("{version}", version())


def version() -> str:
    """Return the version of the installed package."""
    from ...versions import version_of

    return version_of("lockstep-torch") or "(not installed)"

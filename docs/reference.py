"""The generated reference pages of the documentation site: the command's flags, and the Python API."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from collections.abc import Callable

import lockstep
from lockstep.cli.main import VERBS, main

MORE_VERBS = {"verify": ["verify gradients", "verify curve"], "submit": ["submit slurm"]}
SECTION = re.compile(r"^ (\S.*)\n -{9,}\n", re.MULTILINE)
QUOTED = re.compile(r""": (?:'([^']*)'|"([^"]*)")""")  # an annotation
FLAG = re.compile(r" {2}((?!---)[-\[].*?)(?: {2,}(.*))?")


def commands() -> str:
    """Return the page of all verbs: the help of each, with tables of the flags of `lockstep train`."""
    parts = ["# The command\n", "Each section is the output of `lockstep VERB --help`.\n"]
    for verb in [name for first in VERBS for name in (first, *MORE_VERBS.get(first, []))]:
        text = _help(verb)
        parts += [f"## lockstep {verb}\n", _tables(text) if SECTION.search(text) else f"```text\n{text.strip()}\n```\n"]
    return "\n".join(parts)


def _help(verb: str) -> str:
    text = io.StringIO()
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "110"
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*verb.split(), "--help"])
    del os.environ["COLUMNS"]
    if columns is not None:
        os.environ["COLUMNS"] = columns
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _tables(text: str) -> str:
    """Return the help of tyro as Markdown: its sections, of which each is a title above a rule, as tables."""
    usage, *sections = SECTION.split(text)
    parts = [f"```text\n{usage.strip()}\n```\n"]
    for title, section in zip(sections[::2], sections[1::2], strict=True):
        rows: list[list[str]] = []
        for line in section.splitlines():
            if flag := FLAG.fullmatch(line):
                rows.append([flag[1], flag[2] or ""])
            elif rows and line.strip(" -"):
                rows[-1][1] = f"{rows[-1][1]} {line.strip()}".strip()
        cells = [f"| `{name}` | {_escaped(description)} |" for name, description in rows]
        parts += [f"### {title}\n", "| flag | meaning |\n| --- | --- |", *cells, ""]
    return "\n".join(parts)


def _escaped(text: str) -> str:
    text = re.sub(r" ?\(default: (?:None|''|)\)", "", text)
    return re.sub(r"([|*<])", r"\\\1", text)


def api() -> str:
    """Return the page of `lockstep.__all__`: functions, then classes with their docstrings, then errors."""
    things = [(name, getattr(lockstep, name)) for name in lockstep.__all__]
    parts = ["# Python\n", "The public names of `import lockstep`, and the methods of a session.\n"]
    for name, thing in sorted(things, key=lambda pair: (_is_error(pair[1]), inspect.isclass(pair[1]))):
        parts += [f"## lockstep.{name}\n", _described(name, thing)]
    parts += ["## Methods of a session\n"]
    for name, member in vars(lockstep.Session).items():
        if not name.startswith("_"):
            parts += [f"### session.{name}\n", _described(name, member)]
    return "\n".join(parts)


def _is_error(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, Exception)


def _described(name: str, thing: object) -> str:
    text = inspect.getdoc(thing) or ""
    if text.startswith(f"{name}("):  # a dataclass without a docstring
        text = ""
    if _is_error(thing) or not callable(thing) or name in ("RunConfig", "Session", "World"):
        return f"{text}\n"
    signature = inspect.signature(thing)
    parameters = [str(parameter) for key, parameter in signature.parameters.items() if key != "self"]
    shown, returned = f"({', '.join(parameters)})", signature.return_annotation
    if len(shown) > 80:
        shown = "(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + ")"
    shown += f" -> {returned}" if inspect.isroutine(thing) else ""
    shown = re.sub("= <.*?>", "= …", QUOTED.sub(r": \1\2", shown))
    return f"```python\n{name}{shown}\n```\n\n{text}\n"


PAGES: dict[str, Callable[[], str]] = {"reference/commands.md": commands, "reference/python.md": api}

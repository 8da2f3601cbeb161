"""The generated reference pages of the documentation site: the command's flags, and the Python API."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Callable

import lockstep
from lockstep.cli.main import VERBS, main

MORE_VERBS = {"verify": ["verify gradients", "verify curve"], "submit": ["submit slurm", "submit kubernetes"]}
QUOTED = re.compile(r""": (?:'([^']*)'|"([^"]*)")""")  # an annotation


def commands() -> str:
    """Return the page of all verbs: the help of each."""
    parts = ["# The command\n", "Each section is the output of `lockstep VERB --help`.\n"]
    for verb in [name for first in VERBS for name in (first, *MORE_VERBS.get(first, []))]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            main([*verb.split(), "--help"])
        parts += [f"## lockstep {verb}\n", f"```text\n{text.getvalue().strip()}\n```\n"]
    return "\n".join(parts)


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

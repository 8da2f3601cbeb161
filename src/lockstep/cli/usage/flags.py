"""The flags of a run by subject: fields of the config's dataclasses, each with the comment or string beside it."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...config import schema
from ...config.options import leaves
from ...config.schema import RunConfig
from ...config.validity import Leaf

_COLUMNS, _FLAG_COLUMNS = 80, 25


def listed(defaults: RunConfig | None, only: Collection[str] | None, bold: tuple[str, str] = ("", "")) -> str:
    """Return the flags, or those in `only`, under the titles of their sections. `bold` surrounds a title.

    Lines have at most 80 columns.
    """
    config, helps, blocks = defaults or RunConfig(), _helps(), []
    groups: dict[str | None, list[Leaf]] = {None: []}
    for leaf in leaves():
        groups.setdefault(leaf.section, []).append(leaf)
    for section, members in groups.items():
        owner = type(getattr(config, section)) if section else RunConfig
        title = (owner.__doc__ or "").rstrip(".") if section else "Length and seed"
        lines = [
            line
            for leaf in members
            if only is None or leaf.key in only
            for line in _lines(leaf, leaf.of(config), helps[owner.__name__, leaf.attribute])
        ]
        if lines:
            blocks.append("\n".join([f"{bold[0]}{title}:{bold[1]}", *lines]))
    return "\n\n".join(blocks)


def _lines(leaf: Leaf, value: Any, description: str) -> list[str]:
    """Return the lines of one flag; a long flag has a separate line."""
    if leaf.kind is bool:
        flag, default = (f"--{leaf.key}, --no-{leaf.key}", "on") if value else (f"--{leaf.key}", "")
    else:
        flag = f"--{leaf.key} {leaf.metavar}"
        default = " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
    sentence = f"{description.removesuffix('.')} [{default}]" if default else description.removesuffix(".")
    wrapped = textwrap.wrap(sentence, _COLUMNS - _FLAG_COLUMNS, break_on_hyphens=False, break_long_words=False)
    if len(flag) + 3 > _FLAG_COLUMNS:
        return [f"  {flag}", *(" " * _FLAG_COLUMNS + line for line in wrapped)]
    return [f"{f'  {flag}' if not number else '':{_FLAG_COLUMNS}}{line}" for number, line in enumerate(wrapped)]


def _helps() -> dict[tuple[str, str], str]:
    """Return {(class, field): help} of the config's dataclasses, from their source."""
    source = Path(schema.__file__).read_text(encoding="utf-8")
    lines, helps = source.splitlines(), {}
    for owner in ast.parse(source).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for field, following in zip(owner.body, [*owner.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                comment = lines[(field.end_lineno or 1) - 1].partition("  # ")[2]
                docstring = following.value if isinstance(following, ast.Expr) else None
                text = comment or (str(docstring.value) if isinstance(docstring, ast.Constant) else "")
                helps[owner.name, field.target.id] = " ".join(text.split())
    return helps

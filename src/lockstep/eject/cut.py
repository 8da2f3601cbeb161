"""Cut a program for one config out of `program.py`, by partial evaluation of its source.

1. Conditions on `IS` are decided: of `if`, conditional expressions, `and`, `or` and `not`, the chosen part remains.
2. Other attributes of `IS` become literals, or code.
3. Variables that only rename another one disappear. Functions lose unused parameters, and calls their arguments.

Comments and the layout of lines stay. `link.py` then removes what is no longer reached.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_IGNORED = re.compile(r"  # (type: ignore|noqa|ruff: noqa).*$", re.MULTILINE)
Node = ast.expr | ast.stmt
Choices = Mapping[str, Any]
"""Values of a config by name. A condition selects lines of `program.py`; a constant becomes a literal, or code."""
IS: Any = None
"""Stands for the choices in `program.py`, which is never run as it is."""


class Code(str):
    """Source code that replaces an attribute of `IS`."""

    __slots__ = ()


class Edit(NamedTuple):
    """Replacement of a range of the text."""

    start: int
    stop: int
    text: str


class Text:
    """Source with its syntax tree."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._source = text.splitlines()

    def start(self, node: Node | ast.arg | ast.keyword) -> int:
        return self._offset(node.lineno, node.col_offset)

    def stop(self, node: Node | ast.arg | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: Node) -> str:
        return self.text[self.start(node) : self.stop(node)]

    def line_start(self, number: int) -> int:
        """Return the offset of a line, which counts from 1."""
        return self._lines[number - 1]

    def line(self, number: int) -> str:
        return self._source[number - 1]

    def _offset(self, line: int, column: int) -> int:  # ast's columns are bytes
        prefix = self._source[line - 1].encode()[:column].decode() if line <= len(self._source) else ""
        return self._lines[line - 1] + len(prefix)


def cut(source: str, choices: Choices) -> str:
    """Return `source` with all conditions and constants of `IS` resolved."""
    text = source
    for find in (_edit_if, _edit_condition, _edit_expression, _edit_value):
        while edits := _outermost(Text(text), choices, find):
            text = _apply(text, edits)
    while edits := _next_alias(Text(text)) or _next_unused(Text(text)):
        text = _apply(text, edits)
    return text


def _apply(text: str, edits: list[Edit]) -> str:
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.stop :]
    return text


def _outermost(text: Text, choices: Choices, find: Callable[[Text, ast.AST, Choices], Edit | None]) -> list[Edit]:
    """Return the edits that `find` has for nodes, and none for what is within such a node."""
    edits, nodes = list[Edit](), list[ast.AST]([text.tree])
    while nodes:
        node = nodes.pop()
        if (edit := find(text, node, choices)) is not None:
            edits.append(edit)
        else:
            nodes.extend(ast.iter_child_nodes(node))
    return edits


def _name_of_choice(node: ast.AST) -> str:
    """Return X of `IS.X`; "" for other nodes."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "IS":
        return node.attr
    return ""


def _decided(node: ast.expr, choices: Choices) -> bool | None:
    """Return the value of a condition on `IS` alone; None for others."""
    if name := _name_of_choice(node):
        value = choices[name]
        return value if isinstance(value, bool) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _decided(node.operand, choices)
        return None if value is None else not value
    if isinstance(node, ast.BoolOp):
        values = [_decided(operand, choices) for operand in node.values]
        ends = isinstance(node.op, ast.Or)
        if ends in values:
            return ends
        return None if None in values else not ends
    return None


def _edit_if(text: Text, node: ast.AST, choices: Choices) -> Edit | None:
    if isinstance(node, ast.If) and (value := _decided(node.test, choices)) is not None:
        return _resolved_if(text, node, value)
    return None


def _edit_condition(text: Text, node: ast.AST, choices: Choices) -> Edit | None:
    if isinstance(node, ast.BoolOp) and _decided(node, choices) is None:
        undecided = [operand for operand in node.values if _decided(operand, choices) is None]
        if len(undecided) < len(node.values):
            word = " and " if isinstance(node.op, ast.And) else " or "
            return Edit(text.start(node), text.stop(node), word.join(map(text.segment, undecided)))
    return None


def _edit_expression(text: Text, node: ast.AST, choices: Choices) -> Edit | None:
    if isinstance(node, ast.IfExp) and (value := _decided(node.test, choices)) is not None:
        return _resolved_expression(text, node, node.body if value else node.orelse)
    return None


def _edit_value(text: Text, node: ast.AST, choices: Choices) -> Edit | None:
    if not (name := _name_of_choice(node)):
        return None
    assert isinstance(node, ast.Attribute)
    value = choices[name]
    return Edit(text.start(node), text.stop(node), value if isinstance(value, Code) else _literal(value))


def _literal(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _resolved_if(text: Text, node: ast.If, value: bool) -> Edit:
    """Replace an `if` by the chosen branch. The conditions of its `elif` are all on `IS`, or none is."""
    is_elif = text.line(node.lineno).lstrip().startswith("elif")
    indent = " " * (len(text.line(node.lineno)) - len(text.line(node.lineno).lstrip()))
    last = node.end_lineno
    assert last is not None
    assert node.test.end_lineno is not None
    body_end = node.body[-1].end_lineno
    assert body_end is not None
    else_line = next(
        (number for number in range(body_end + 1, last + 1) if re.match(rf"{indent}(else:|elif )", text.line(number))),
        last + 1,
    )
    if value:
        chosen = range(node.test.end_lineno + 1, else_line)
    elif not node.orelse:
        chosen = range(0)
    elif text.line(else_line).lstrip().startswith("elif"):
        lines = [text.line(number) for number in range(else_line, last + 1)]
        lines[0] = lines[0].replace("elif", "elif" if is_elif else "if", 1)
        return Edit(text.line_start(node.lineno), text.line_start(last + 1), "\n".join(lines) + "\n")
    else:
        chosen = range(else_line + 1, last + 1)
    assert not is_elif or not chosen, "a decided elif after an undecided if"
    lines = [text.line(number) for number in chosen]
    dedented = textwrap.indent(textwrap.dedent("\n".join(lines)), indent)
    return Edit(text.line_start(node.lineno), text.line_start(last + 1), dedented + "\n" * bool(lines))


def _resolved_expression(text: Text, node: ast.IfExp, chosen: ast.expr) -> Edit:
    """Replace a conditional expression by the chosen operand, without parentheses that it no longer needs."""
    start, stop, code = text.start(node), text.stop(node), text.segment(chosen)
    is_in_parentheses = text.text[start - 1] == "(" and text.text[stop] == ")"
    is_call = re.match(r"[\w\])]", text.text[start - 2]) is not None
    is_simple = isinstance(chosen, ast.Name | ast.Call | ast.Attribute | ast.Subscript | ast.Constant)
    extent = int(is_in_parentheses and is_simple and not is_call)
    return Edit(start - extent, stop + extent, code)


def _next_alias(text: Text) -> list[Edit]:
    """Return the edits that replace a variable of a function, assigned once to another variable, by that one."""
    for function in (node for node in text.tree.body if isinstance(node, ast.FunctionDef)):
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        for node in ast.walk(function):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)):
                continue
            target = node.targets[0]
            uses = [name for name in names if isinstance(target, ast.Name) and name.id == target.id]
            if sum(isinstance(name.ctx, ast.Store) for name in uses) == 1:
                line = Edit(text.line_start(node.lineno), text.line_start(node.lineno + 1), "")
                return [
                    line,
                    *(Edit(text.start(use), text.stop(use), node.value.id) for use in uses if use is not target),
                ]
    return []


def _next_unused(text: Text) -> list[Edit]:
    """Return the edits that remove a parameter that its function does not use."""
    for function in text.tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        for index, parameter in enumerate(function.args.args):
            if parameter.arg in names or (function.name, parameter.arg) == ("main", "options"):
                continue
            edits = [_without(text, function.args.args, index)]
            for node in ast.walk(text.tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function.name:
                    edits.append(_without(text, node.args, index))
            return edits
    return []


def _without(text: Text, items: list[ast.arg] | list[ast.expr], index: int) -> Edit:
    if index + 1 < len(items):
        return Edit(text.start(items[index]), text.start(items[index + 1]), "")
    start = text.stop(items[index - 1]) if index else text.start(items[index])
    return Edit(start, text.stop(items[index]), "")


def clean(text: str) -> str:
    """Return the text without marks for linters and type checkers."""
    return _IGNORED.sub("", text)

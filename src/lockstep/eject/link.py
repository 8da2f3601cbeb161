"""Link a program: the definitions that it reaches, from its source and the modules that it imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .cut import Text

Imports = Mapping[str, tuple[str, str]]
"""{name: (the module of `from module import name`, or "", the statement's text about this name)}"""
_BLOCKS = ("def", "class", "@", "if")


@dataclass(frozen=True)
class _Definition:
    """A statement at a module's top level, with the comments above it."""

    names: frozenset[str]
    uses: frozenset[str]
    code: str


@dataclass(frozen=True)
class _Module:
    definitions: list[_Definition]
    imports: Imports
    relative: Mapping[str, str]
    """{name: file in the package that defines it}"""


def _parsed(source: str, folder: Path) -> _Module:
    text = Text(source)
    definitions, imports, relative = list[_Definition](), dict[str, tuple[str, str]](), dict[str, str]()
    end = 1
    for node in text.tree.body:
        assert node.end_lineno is not None
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        above = [text.line(number) for number in range(end, first)]
        end = node.end_lineno + 1
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = (alias.asname or alias.name).partition(".")[0]
                imports[bound] = ("", f"import {alias.name}" + f" as {alias.asname}" * bool(alias.asname))
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = folder.joinpath(*[".."] * (node.level - 1)).resolve()
            path = base.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            relative |= {alias.asname or alias.name: str(path) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = alias.name + f" as {alias.asname}" * bool(alias.asname)
                imports[alias.asname or alias.name] = (node.module or "", name)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # the module's docstring
            comments = "\n".join(line for line in above if line.startswith("#"))
            code = "\n".join(text.line(number) for number in range(first, end))
            definitions.append(_Definition(_bound(node), _used(node), f"{comments}\n{code}".strip()))
    return _Module(definitions, imports, relative)


def _bound(node: ast.stmt) -> frozenset[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return frozenset({node.name})
    targets = node.targets if isinstance(node, ast.Assign) else []
    names = (item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name))
    return frozenset(names) or frozenset({"__main__"})


def _used(node: ast.stmt) -> frozenset[str]:
    return frozenset(item.id for item in ast.walk(node) if isinstance(item, ast.Name))


class Linked:
    """The definitions and imports that names of a program need."""

    def __init__(
        self,
        program: str,
        names: Iterable[str],
        entries: Mapping[str, Path] | None = None,
        imports: Imports | None = None,
    ) -> None:
        """`entries` are {name: file} of further definitions, and `imports` further imports.

        Raises ValueError for two definitions of one name.
        """
        self._modules = {"": _parsed(program, Path(__file__).parent)}
        self._reached: dict[str, set[int]] = {"": set()}
        self.imports: dict[str, tuple[str, str]] = {}
        self._find({name: str(path) for name, path in (entries or {}).items()}, imports or {}, names)
        by_file = {
            file: [definition for number, definition in enumerate(self._modules[file].definitions) if number in numbers]
            for file, numbers in self._reached.items()
        }
        names = [name for definitions in by_file.values() for definition in definitions for name in definition.names]
        if len({*names}) < len(names):
            raise ValueError(f"{names} are not different")
        main = by_file.pop("")
        self._constants = [definition for definition in main if not definition.code.startswith(_BLOCKS)]
        self._definitions = [definition for file in reversed(by_file) for definition in by_file[file]]
        self._definitions += [definition for definition in main if definition.code.startswith(_BLOCKS)]

    def _find(self, files: Mapping[str, str], imports: Imports, names: Iterable[str]) -> None:
        waiting, seen = [("", name) for name in names], set[tuple[str, str]]()
        while waiting:
            file, name = waiting.pop()
            if (file, name) in seen:
                continue
            seen.add((file, name))
            if file not in self._modules:
                self._modules[file] = _parsed(Path(file).read_text(encoding="utf-8"), Path(file).parent)
            module, is_defined = self._modules[file], False
            for number, definition in enumerate(module.definitions):
                if name in definition.names:
                    is_defined = True
                    self._reached.setdefault(file, set()).add(number)
                    waiting += [(file, used) for used in definition.uses]
            if is_defined:
                continue
            if name in module.imports:
                self.imports[name] = module.imports[name]
            elif name in module.relative:
                waiting.append((module.relative[name], name))
            elif not file and name in files:
                waiting.append((files[name], name))
            elif not file and name in imports:
                self.imports[name] = imports[name]

    @property
    def names(self) -> set[str]:
        """Names of the definitions."""
        return {name for definition in (*self._constants, *self._definitions) for name in definition.names}

    def body(self) -> str:
        """Return constants and definitions as source."""
        lines, was_block = [constant.code for constant in self._constants], bool(self._constants)
        for definition in self._definitions:
            is_block = definition.code.startswith(_BLOCKS)
            lines += ["", ""] * (is_block or was_block) + [definition.code]
            was_block = is_block
        return "\n".join(lines).strip() + "\n"

    def text(self) -> str:
        """Return the program's source."""
        return "\n".join([*import_lines(self.imports), "", self.body()])


def imports_of(text: Text) -> dict[str, tuple[str, str]]:
    """Return the absolute imports at a module's top level."""
    return dict(_parsed(text.text, Path()).imports)


def import_lines(imports: Imports) -> Iterator[str]:
    """Yield import statements as ruff's isort sorts them: the standard library's first."""
    statements: dict[str, list[str]] = {}
    for module, name in imports.values():
        statements.setdefault(module or name.split()[1], []).append(name)
    for is_standard in (True, False):
        group = {
            module: names
            for module, names in statements.items()
            if (module.partition(".")[0] in sys.stdlib_module_names) is is_standard
        }
        plain = sorted(name for names in group.values() for name in names if name.startswith("import "))
        yield from plain
        for module in sorted(module for module, names in group.items()):
            names = sorted((name for name in group[module] if not name.startswith("import ")), key=_import_order)
            if names:
                yield f"from {module} import {', '.join(names)}"
        if is_standard and group:
            yield ""


def _import_order(name: str) -> tuple[int, str]:
    """Constants first, then classes, then others."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

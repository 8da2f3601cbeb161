"""A script over `lockstep.session()` as plain DistributedDataParallel."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import RequestError
from ..versions import version_of
from .chinese import translated
from .cut import Edit, Text, clean
from .link import Linked, import_lines, imports_of

_PLAIN = Path(__file__).with_name("plain.py")
_DROPPED = (
    *("output", "remote", "resume", "checkpoint_every", "keep", "log_every", "track", "verify_every", "ledger"),
    *("timeout", "stall_timeout"),
)
"""Options of a session that concern records and proofs."""
_OF_ANY_MODULE = ("train", "eval", "parameters", "zero_grad")
"""Attributes that a wrapped model has, too."""
_OF_INNER = (
    "state_dict",
    "load_state_dict",
    "named_parameters",
    "buffers",
    "named_buffers",
    "modules",
    "named_modules",
)
"""Attributes that are those of the model within the wrapper."""
_HEADER = """\
# Written by lockstep {version} from {name}. Start it by torchrun --nproc-per-node 2 FILE
# Batches are divided and weighted as by a session; their order differs.
# Not carried over: resuming and checkpoints, records (log, score), proofs, the watchdog.
"""
_NAMES = {"rank", "world", "device"}
"""Names that the plain code defines."""
_CALLS = {"sum": "summed({0}, device)", "max": "largest({0}, device)", "gather": "gathered({0}, world)"}
_VALUES = {"rank": "rank", "device": "device", "is_main": "(rank == 0)"}


class _Prepared(NamedTuple):
    models: set[str]
    loaders: set[str]


def eject_loop(path: Path, text: str, *, language: str = "en") -> str:
    """Return the script without lockstep. Raises `RequestError` for the first line that has no plain form."""
    result = _Ejection(path, text).result()
    return translated(result) if language == "zh" else result


class _Ejection:
    """The edits of one script."""

    def __init__(self, path: Path, text: str) -> None:
        try:
            self._text = Text(text)
        except SyntaxError as error:
            raise RequestError(f"{path} line {error.lineno} is not Python ({error.msg}).") from error
        self._path, self._edits, self._used = path, list[Edit](), set[str]()
        self._parents = {child: node for node in ast.walk(self._text.tree) for child in ast.iter_child_nodes(node)}
        assignments = [
            node
            for node in ast.walk(self._text.tree)
            if isinstance(node, ast.Assign) and self._is_session_call(node.value)
        ]
        if len(assignments) != 1 or not isinstance(assignments[0].targets[0], ast.Name):
            raise RequestError(
                f"lockstep eject {path}: it needs one line such as session = lockstep.session(), found "
                f"{len(assignments)}; eject a recipe or a run, or a script with such a line."
            )
        self._opening, self._session = assignments[0], assignments[0].targets[0].id
        self._seed = ""
        self._prepared = self._find_prepared()

    @staticmethod
    def _is_session_call(node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) == "lockstep.session"

    def _refuse(self, node: ast.AST, reason: str) -> RequestError:
        line = getattr(node, "lineno", 0)
        return RequestError(f"lockstep eject {self._path}: line {line} has no plain form: {reason}.")

    def _find_prepared(self) -> _Prepared:
        """Return the names of models and loaders that the session prepares."""
        text, prepared = self._text, _Prepared(set(), set())
        assignments = [node for node in ast.walk(text.tree) if isinstance(node, ast.Assign)]
        values = dict(pair for node in assignments for target in node.targets for pair in _assigned(target, node.value))
        called = {ast.unparse(node.func) for node in ast.walk(text.tree) if isinstance(node, ast.Call)}
        for node in self._calls("prepare"):
            for argument in node.args:
                if not isinstance(argument, ast.Name):
                    raise self._refuse(node, "give session.prepare variables")
                name, value = argument.id, values.get(argument.id, "")
                if "DataLoader(" in value:
                    prepared.loaders.add(name)
                elif name in called:
                    prepared.models.add(name)
                elif f"{name}.step" not in called and not re.search("optim|schedule", value.lower()):
                    raise self._refuse(node, f"{name} is neither a model that is called, nor a DataLoader or optimizer")
        return prepared

    def _calls(self, name: str) -> Iterator[ast.Call]:
        for node in ast.walk(self._text.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{self._session}.{name}":
                yield node

    def result(self) -> str:
        """Return the edited script, with the definitions that it needs."""
        self._open()
        for node in self._nodes():
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            elif isinstance(node, ast.For):
                self._loop(node)
            elif isinstance(node, ast.Name):
                self._check_name(node)
            elif isinstance(node, ast.Call):
                self._check_passed_models(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == self._session:
                    self._use(node)
                elif self._is_hidden(node):
                    outer = self._parents[node]
                    of_a_part = isinstance(outer, ast.Attribute) and outer.attr in (*_OF_ANY_MODULE, *_OF_INNER)
                    if node.attr not in _OF_INNER and not of_a_part:
                        raise self._refuse(node, f"DistributedDataParallel hides {node.value.id}.{node.attr}")
                    self._replace(node.value, f"{node.value.id}.module")
        text, end = self._text.text, len(self._text.text)
        for edit in sorted(self._edits, reverse=True):
            assert edit.stop <= end, "edits do not overlap"
            text, end = text[: edit.start] + edit.text + text[edit.stop :], edit.start
        return self._with_definitions(text)

    def _nodes(self) -> Iterator[ast.AST]:
        """Yield the nodes of the script, except within statements that disappear; remove those."""
        waiting: list[ast.AST] = [self._text.tree]
        while waiting:
            node = waiting.pop()
            called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            if called and ast.unparse(called) in (f"{self._session}.log", f"{self._session}.score"):
                assert isinstance(node, ast.Expr)
                self._remove(node)
                continue
            yield node
            waiting += ast.iter_child_nodes(node)

    def _remove(self, node: ast.Expr) -> None:
        """Remove a statement that shares its lines with no other."""
        assert node.end_lineno is not None
        prefix = self._text.text[self._text.line_start(node.lineno) : self._text.start(node)]
        suffix = self._text.text[self._text.stop(node) : self._text.line_start(node.end_lineno + 1)]
        if prefix.strip() or suffix.partition("#")[0].strip():
            raise self._refuse(node, "give the statement a separate line")
        self._replace_lines(node, ["pass"] if len(getattr(self._parents[node], "body", [])) == 1 else [])

    def _check_name(self, node: ast.Name) -> None:
        """Refuse names of the plain code that the script assigns, and a session that is passed on."""
        parent = self._parents[node]
        if isinstance(node.ctx, ast.Store) and node.id in _NAMES:
            raise self._refuse(node, f"the plain code uses the name {node.id}; rename the variable")
        if node.id == self._session and node is not self._opening.targets[0] and not isinstance(parent, ast.Attribute):
            raise self._refuse(node, f"{self._session} is passed on")
        if node.id == "lockstep" and parent is not getattr(self._opening.value, "func", None):
            raise self._refuse(node, f"it uses {ast.unparse(parent)}")

    def _is_hidden(self, node: ast.Attribute) -> bool:
        """Return whether an attribute of a model is out of reach once the model is wrapped."""
        if ast.unparse(node.value) not in self._prepared.models or node.attr in _OF_ANY_MODULE:
            return False
        prepare = next(self._calls("prepare"))
        return node.lineno > prepare.lineno or self._function_of(node) is not self._function_of(prepare)

    def _function_of(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost function around a node."""
        outer = self._parents.get(node)
        while outer is not None and not isinstance(outer, ast.FunctionDef):
            outer = self._parents.get(outer)
        return outer

    def _check_passed_models(self, call: ast.Call) -> None:
        """Refuse a call whose function uses, by another name, an attribute of the model that a wrapper hides."""
        functions = (node for node in ast.walk(self._text.tree) if isinstance(node, ast.FunctionDef))
        function = next((node for node in functions if node.name == ast.unparse(call.func)), None)
        if function is None:
            return
        names = [parameter.arg for parameter in function.args.args]
        passed = [*zip(names, call.args, strict=False), *((item.arg, item.value) for item in call.keywords)]
        renamed = {name for name, value in passed if ast.unparse(value) in self._prepared.models} - {
            *self._prepared.models
        }
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Attribute)
                and node.attr not in _OF_ANY_MODULE
                and ast.unparse(node.value) in renamed
            ):
                name = ast.unparse(node.value)
                raise self._refuse(
                    call, f"{function.name} uses {name}.{node.attr}, which a wrapper hides; call it by the model's name"
                )

    def _replace(self, node: ast.expr, code: str) -> None:
        self._used |= {name.id for name in ast.walk(ast.parse(code)) if isinstance(name, ast.Name)}
        self._edits.append(Edit(self._text.start(node), self._text.stop(node), code))

    def _replace_lines(self, node: ast.stmt, lines: list[str]) -> None:
        assert node.end_lineno is not None
        indent = " " * node.col_offset
        for line in lines:
            self._used |= {name.id for name in ast.walk(ast.parse(line)) if isinstance(name, ast.Name)}
        start, stop = self._text.line_start(node.lineno), self._text.line_start(node.end_lineno + 1)
        self._edits.append(Edit(start, stop, "".join(f"{indent}{line}\n" for line in lines)))

    def _open(self) -> None:
        """Replace the session's opening, and what it prepares."""
        call = self._opening.value
        assert isinstance(call, ast.Call)
        self._seed = "0"
        for keyword in call.keywords:
            if keyword.arg == "seed":
                self._seed = ast.unparse(keyword.value)
            elif keyword.arg not in _DROPPED:
                raise self._refuse(keyword, f"session({keyword.arg}=…)")
        self._replace_lines(
            self._opening,
            ["rank, world, device = join()", f"torch.manual_seed({self._seed})  # alike on all ranks: weights, data"],
        )
        for node in self._calls("prepare"):
            statement = self._parents[node]
            if not isinstance(statement, ast.Assign) or ast.unparse(statement.targets[0]).strip("()") != ", ".join(
                map(ast.unparse, node.args)
            ):
                raise self._refuse(node, "assign what session.prepare returns to the same variables")
            names = [argument.id for argument in node.args if isinstance(argument, ast.Name)]
            lines = [f"{name} = parallel({name}, device)" for name in names if name in self._prepared.models]
            lines += [
                f"{name} = shared({name}, device, rank, world, {self._seed})"
                for name in names
                if name in self._prepared.loaders
            ]
            lines.append(f"torch.manual_seed({self._seed} + rank)  # dropout differs between ranks")
            self._replace_lines(statement, lines)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        names = [alias.name for alias in node.names]
        if names == ["lockstep"]:
            self._replace_lines(node, [])
        elif any(name.partition(".")[0] == "lockstep" for name in (*names, getattr(node, "module", None) or "")):
            raise self._refuse(node, "it imports a part of lockstep; write that out first")

    def _loop(self, node: ast.For) -> None:
        """Replace the iterable of a loop over epochs or a prepared loader."""
        iterable = node.iter
        if isinstance(iterable, ast.Call) and ast.unparse(iterable.func) == f"{self._session}.epochs":
            if not isinstance(node.target, ast.Name) or len(iterable.args) != 1:
                raise self._refuse(node, "name the epoch, as in for epoch in session.epochs(10)")
            self._replace(iterable, f"range({ast.unparse(iterable.args[0])})")

    def _loader(self, node: ast.For) -> bool:
        """Return whether a loop runs over one prepared loader, also by enumerate or a progress bar."""
        iterable = node.iter
        while isinstance(iterable, ast.Call) and ast.unparse(iterable.func) in ("enumerate", "tqdm", "tqdm.tqdm"):
            iterable = iterable.args[0]
        return isinstance(iterable, ast.Name) and iterable.id in self._prepared.loaders

    def _use(self, node: ast.Attribute) -> None:
        """Replace an attribute of the session, or a call of it."""
        parent = self._parents[node]
        call = parent if isinstance(parent, ast.Call) and parent.func is node else None
        if node.attr in ("prepare", "epochs"):
            return
        if call is None and node.attr in _VALUES:
            self._replace(node, _VALUES[node.attr])
        elif call is None and isinstance(parent, ast.Attribute) and (node.attr, parent.attr) == ("world", "size"):
            self._replace(parent, "world")
        elif call is not None and node.attr == "print":
            self._replace(node, "print")
        elif call is not None and node.attr in _CALLS and len(call.args) == 1 and not call.keywords:
            self._edit_call(call, _CALLS[node.attr])
        elif call is not None and node.attr == "evaluating" and len(call.args) == 1:
            models = ", ".join(sorted(self._prepared.models))
            self._edit_call(call, f"evaluating({{0}}, [{models}], device, rank, world)")
        elif call is not None and node.attr in ("backward", "mean") and len(call.args) == 1:
            arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if arguments.keys() - {"weight"}:
                raise self._refuse(node, ast.unparse(call))
            count = arguments.get("weight") or f"len({self._batch(node)})"
            form = "backward({0}, COUNT, device, world)" if node.attr == "backward" else "mean_of({0}, COUNT, device)"
            self._edit_call(call, form.replace("COUNT", count))
        else:
            raise self._refuse(node, f"{self._session}.{node.attr}")

    def _edit_call(self, call: ast.Call, form: str) -> None:
        """Replace a call around its first argument, which is edited separately."""
        prefix, suffix = form.split("{0}")
        argument = call.args[0]
        self._used |= {name.id for name in ast.walk(ast.parse(form.format("x"))) if isinstance(name, ast.Name)}
        self._edits.append(Edit(self._text.start(call), self._text.start(argument), prefix))
        self._edits.append(Edit(self._text.stop(argument), self._text.stop(call), suffix))

    def _batch(self, call: ast.AST) -> str:
        """Return the tensor whose length is the number of samples: the first that the loop over a loader names."""
        node = call
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.For) and self._loader(node):
                target = node.target
                while isinstance(target, ast.Tuple):
                    elements = target.elts
                    is_counted = "enumerate(" in ast.unparse(node.iter) and target is node.target
                    target = elements[1] if is_counted else elements[0]
                if isinstance(node.target, ast.Tuple) and isinstance(target, ast.Name):
                    stores = [item for item in ast.walk(node) if isinstance(item, ast.Name) and item.id == target.id]
                    if sum(isinstance(item.ctx, ast.Store) for item in stores) == 1:
                        return target.id
        raise self._refuse(
            call, "its loop is not over (x, y, …) of a prepared loader; give the count, as in backward(loss, weight=n)"
        )

    def _with_definitions(self, text: str) -> str:
        """Insert the definitions of `plain.py` that are used after the script's imports, and sort those."""
        source, needed = Text(text), Linked(_PLAIN.read_text(encoding="utf-8"), self._used)
        nodes = [node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        nodes = [node for node in nodes if getattr(node, "module", "") != "__future__"]
        bound = {
            node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        bound |= {node.name for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if clash := bound & needed.names:
            raise self._refuse(self._opening, f"the plain code defines {', '.join(sorted(clash))}; rename the script's")
        imports = "\n".join(import_lines(needed.imports | imports_of(source)))
        start, stop = source.line_start(nodes[0].lineno), source.line_start((nodes[-1].end_lineno or 0) + 1)
        script = text[stop:].strip("\n")
        header = _HEADER.format(name=self._path.name, version=version_of("lockstep-torch"))
        end = "if dist.is_initialized():\n    dist.destroy_process_group()\n"
        result = clean(f"{header}{text[:start]}{imports}\n\n\n{needed.body()}\n\n{script}\n\n{end}")
        ast.parse(result)
        return result


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield (target, value) of an assignment, also of a tuple to a tuple."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for pair in zip(target.elts, value.elts, strict=False):
            yield from _assigned(*pair)
    else:
        yield ast.unparse(target), ast.unparse(value)

"""The architecture: imports point down only, so that there is no circle; siblings do not know each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent

# Top down, as the map of the house draws them: a room knows those below it, and none beside it.
MAP = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
LAYERS = [re.split(r"\s{3,}", line)[0].split() for line in MAP.split("```")[1].strip().splitlines()][::-1]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FILES = {path.relative_to(SOURCE): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in FILES.items()}


def _room(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def _imported(file: Path) -> Iterator[str]:
    """Yield the rooms that a file imports from, wherever in it the import stands."""
    package = ["lockstep", *file.parts[:-1]]
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*module, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        yield from (name[1] for name in names if name[0] == "lockstep" and len(name) > 1 and name[1] in LEVEL)


def test_the_map_names_every_room() -> None:
    assert all(
        re.search(rf"`{room}[.`]", MAP.partition("## The layers")[2]) for room in LEVEL if not room.startswith("_")
    )


def test_imports_point_down() -> None:
    assert {_room(file) for file in FILES} == set(LEVEL)
    for file in FILES:
        room = _room(file)
        others = set(_imported(file)) - {room}
        assert [name for name in others if LEVEL[name] >= LEVEL[room]] == [], file


def test_the_launchers_alone_read_the_environment_and_the_trainer_names_no_strategy() -> None:
    assert {_room(file) for file, text in FILES.items() if "os.environ" in text or "getenv" in text} <= {
        "audit",  # as a launcher of other programs
        "eject",  # whose files start alone
        "launchers",
    }
    # "single" is a word of the language too: only as a name it is the strategy's.
    named = re.compile(r"\b(ddp|dp|DistributedDataParallel|DataParallel)\b|[\"']single[\"']", re.IGNORECASE)
    for name in ("trainer.py", "jobs/job.py", "runs/loop.py", "runs/meter.py", "jobs/evaluation.py"):
        assert named.findall(FILES[Path(name)]) == [], name


def test_one_file_makes_consoles() -> None:
    # On a `Screen` foreign text has no power: it is no markup, and acts on no terminal.
    makes = re.compile(r"(from rich(\.\w+)? import .*\b(Console|escape|print)\b|^import rich)", re.MULTILINE)
    assert [str(file) for file, text in FILES.items() if makes.search(text)] == ["screen.py"]


def test_a_file_is_opened_for_writing_as_ones_own() -> None:
    """Through `opener=unlinked` or `write_whole`, which follow no link; or in a folder or memory made this moment."""
    writes = re.compile(
        r"""\.write_(?:text|bytes)\(|open\((?![^\n]*opener=unlinked)[^\n]*["'][rb]*[wax+][wabxt+]*["']"""
    )
    found = {str(file) for file, text in FILES.items() if writes.search(text)}
    audit = {f"audit/{name}.py" for name in ("observer", "patches", "recorder", "replayer", "start")}
    assert found == {*audit, "eject/plain.py", "checkpoint/write.py", "launchers/nodes.py"}


def _private(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a file uses of others: imported, or of an object that is not `self`, by text too."""
    types = {each for node in ast.walk(tree) if _is_for_types(node) for each in ast.walk(node)}
    for node in ast.walk(tree):
        if node in types:
            continue
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [part for alias in node.names for part in f"{node.module}.{alias.name}".split(".")]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            names = [node.attr] if ast.unparse(node.value) not in ("self", "cls", "super()") else []
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            of, name, *_ = node.args
            texts = [part for part in ast.walk(name) if isinstance(part, ast.Constant)]
            names = [str(each.value) for each in texts[:1] if ast.unparse(of) != "self"]  # an f-string's beginning
        else:
            continue
        yield from filter(_is_private, names)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls"):
            yield node.attr


PUBLIC = {"_exit", "_current_frames", "_asdict", "_fields", "_replace", "_run_exitfuncs", "_inheriting"}
"""Python's own, which it documents, but for the last two: they have no other name."""
PUBLIC |= {"_saved_reduction", "_saved_total_weight", "_saved_target"}  # torch's notes on autograd document these


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_one_file_uses_what_other_projects_do_not_promise() -> None:
    used = {str(file): set(_private(tree)) - PUBLIC for file, tree in TREES.items()}
    ours = {name for file, tree in TREES.items() if str(file) != "_torch.py" for name in _defined(tree)}
    assert {file: names - ours for file, names in used.items() if names - ours and file != "_torch.py"} == {}
    assert len(used["_torch.py"]) <= 23
    by_text = re.compile(r"\btorch\.(\w+\.)*_[a-z]")  # in whatever text: a module's name that frames are known by
    assert [file for file, text in FILES.items() if by_text.search(text)] == [Path("_torch.py")]

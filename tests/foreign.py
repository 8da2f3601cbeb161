"""Run folders and files of weights as somebody else may have left them: damaged in every way that a test can draw."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import json
import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from lockstep.checkpoint.layout import render
from lockstep.cli.main import main

GOLDEN = Path(__file__).parent / "golden" / "run"
STEP = "step-00000008"
LIMIT_S = 10.0
FILES = ("config.toml", "manifest.json", "steps.jsonl", "summary.json")
HELD = ("checksums.json", "model.safetensors", "optimizer.safetensors", "state.json")
_DEEP = "@deep@"
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2, 10**400, 2**63, 10**30, 1e308, float("nan"), float("inf"), -0.5),
    *("", "x", "\x1b[2J\u202e\n|", "\ud800", "a\0b", [], {}, [[]], {"a": [1]}, [None, "x"], _DEEP),
)
"""Values of JSON, each of which is wrong in most places."""
_TOML = (
    *("-1", "0", "1e400", "nan", "inf", "9223372036854775807", "9" * 400, "true", '""', '"x"', "[]", "[[1]]"),
    *("{a = 1}", '"a\\u0000b"', '"\\u001b[2J"', '"::"', "1.5", "[1, 2]", "1979-05-27", "[" * 2000, ".".join("a" * 9)),
)


class TooLongError(BaseException):
    """A command took longer than `LIMIT_S`; no handler of lockstep's takes it."""


def copy_of_run(folder: Path) -> Path:
    """Return a whole run below `folder`, of an older build: 200 kB."""
    run = Path(shutil.copytree(GOLDEN, folder / "run"))
    for name in ("last", "best"):
        (run / "checkpoints" / name).symlink_to(STEP)
    return run


def outcome(*words: object) -> tuple[int | str, str]:
    """Run the command in this process; return its exit code, or in words what else became of it, and its stderr."""
    said = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    heard = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(heard):
        try:
            with _limited():
                code: int | str = main([str(word) for word in words])
        except TooLongError:
            code = "took too long"
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    return code, heard.buffer.getvalue().decode()


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    left = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before)


# ---- damage


def spoil(draw: Callable[[st.SearchStrategy[Any]], Any], run: Path) -> None:
    """Change something in the run folder."""
    step = run / "checkpoints" / STEP
    names = [run / name for name in FILES] + [step / name for name in HELD]
    path = draw(st.sampled_from(names))
    kinds: list[Callable[..., None]] = [_cut, _flip, _swap, _link, _pipe, _gone]
    if path.suffix in (".json", ".jsonl"):
        kinds += [_retype] * 6
    if path.suffix == ".toml":
        kinds += [_reword] * 6
    if path.parent == step:
        kinds += [_relink]
    draw(st.sampled_from(kinds))(draw, path, names)
    if step.is_dir() and draw(st.booleans()):
        seal(step)


def seal(step: Path, more: dict[str, str] | None = None) -> None:
    """Make the checksums those of the files that are there, with those that are listed besides."""
    there = {path.name: path for path in step.iterdir() if path.is_file() and path.name != "checksums.json"}
    sums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(there.items())}
    listed = step / "checksums.json"
    if listed.is_file() and not listed.is_symlink():
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
            sums |= {name: value for name, value in json.loads(listed.read_bytes()).items() if name not in sums}
        listed.write_bytes(render(sums | (more or {})))


def _cut(draw: Any, path: Path, names: list[Path]) -> None:
    os.truncate(path, draw(st.integers(0, path.stat().st_size)))


def _flip(draw: Any, path: Path, names: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    path.write_bytes(data)


def _swap(draw: Any, path: Path, names: list[Path]) -> None:
    path.write_bytes(draw(st.sampled_from(names)).read_bytes())


def _link(draw: Any, path: Path, names: list[Path]) -> None:
    path.unlink()
    path.symlink_to(draw(st.sampled_from([*names, path, path.parent, Path("/dev/zero"), Path("/nowhere")])))


def _pipe(draw: Any, path: Path, names: list[Path]) -> None:
    path.unlink()
    os.mkfifo(path)


def _gone(draw: Any, path: Path, names: list[Path]) -> None:
    path.unlink()
    if draw(st.booleans()):
        path.mkdir()


def _relink(draw: Any, path: Path, names: list[Path]) -> None:
    link = path.parents[1] / draw(st.sampled_from(["last", "best"]))
    link.unlink()
    link.symlink_to(draw(st.sampled_from(["last", "../..", "/", "step-00000009", f"../checkpoints/{STEP}", "x\ny"])))


def _retype(draw: Any, path: Path, names: list[Path]) -> None:
    lines = path.suffix == ".jsonl"
    value: Any = [json.loads(line) for line in path.read_text().splitlines()] if lines else json.loads(path.read_text())
    for _ in range(draw(st.integers(1, 2))):
        places = list(_places(value))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        change = draw(st.sampled_from(["set", "set", "set", "drop", "add"]))
        if change == "drop":
            del holder[key]
        elif change == "add" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["../../x", "x", "", "a\0b", "/etc/passwd", "model/x", "\x1b[2J"]))] = 1
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    levels = draw(st.sampled_from([600, 5000]))  # which JSON's reader takes, and does not take
    deep = "[" * levels + "]" * levels
    texts = [json.dumps(each, indent=None if lines else 1) for each in (value if lines else [value])]
    texts = [text.replace(f'"{_DEEP}"', deep) for text in texts]
    path.write_text("\n".join(texts) + "\n")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _reword(draw: Any, path: Path, names: list[Path]) -> None:
    lines = path.read_text().splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    key = draw(st.sampled_from([lines[at].partition(" =")[0], "strange", ".".join("a" * 150)]))
    lines[at] = f"{key} = {draw(st.sampled_from(_TOML))}"
    path.write_text("\n".join(lines))


# ---- files of weights


@functools.cache  # torch's older format has addresses in it
def weights(kind: str) -> bytes:
    """Return a file of weights as one of three writers leaves it."""
    held = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.float16)}
    if kind == "safetensors":
        return save(held)
    file = io.BytesIO()
    saved = {"model": held, "step": 3, "betas": (0.9, 0.999)}
    torch.save(saved, file, _use_new_zipfile_serialization=kind == "archive")
    return file.getvalue()


def spoil_bytes(draw: Callable[[st.SearchStrategy[Any]], Any], data: bytes) -> bytes:
    """Return the file cut, with other bytes, or with a part of it doubled or gone."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        if not changed:
            break
        kind = draw(st.sampled_from(["flip", "flip", "cut", "double", "drop", "number"]))
        at = draw(st.integers(0, len(changed) - 1))
        end = min(len(changed), at + draw(st.integers(1, 64)))
        if kind == "flip":
            changed[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del changed[at:]
        elif kind == "double":
            changed[at:at] = changed[at:end]
        elif kind == "drop":
            del changed[at:end]
        else:
            changed[at : at + 8] = struct.pack("<q", draw(st.sampled_from([-1, 2**31 - 1, 2**40, 2**63 - 1])))
    return bytes(changed)

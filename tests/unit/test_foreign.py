"""Files from somebody else: whatever lies in a run folder or a file of weights costs little and ends in a sentence."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lockstep.checkpoint.layout import render
from lockstep.models import table

from .. import foreign
from ..command import end, start
from ..foreign import GOLDEN, STEP, copy_of_run, outcome
from ..hostile import often

SOME = 2 << 20
VERBS = ("compare", "runs", "weights", "weights", "diff", "eval", "resume")
Words = tuple[object, ...]


# ---- small files that ask for much


def _pickled(*parts: bytes) -> bytes:
    """Return an archive as torch writes it, with this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in {"data.pkl": b"".join(parts), "byteorder": b"little", "version": b"3\n"}.items():
            archive.writestr(f"w/{name}", data)
    return file.getvalue()


def _expanded() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.zeros(1).expand(10**10)}, file)
    return file.getvalue()


def _compressed() -> bytes:
    """Return 4.5 GiB of zeros in 4.5 MB, as torch's own reader would unpack it."""
    squeezer = zlib.compressobj(9, wbits=-15)
    block = squeezer.compress(bytes(16 << 20)) + squeezer.flush(zlib.Z_FULL_FLUSH)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("w/data.pkl", block * 288 + squeezer.flush())
        archive.filelist[0].compress_type = zipfile.ZIP_DEFLATED
        archive.filelist[0].file_size = 288 * (16 << 20)
        archive.writestr("w/version", b"3\n")
        archive.writestr("w/byteorder", b"little")
        archive._didModify = True  # type: ignore[attr-defined]
    return file.getvalue()


def _with_two_directories() -> bytes:
    """Return an archive in which zipfile finds an empty dictionary, and torch's reader the one of `_compressed`."""

    def record(archive: bytes) -> bytes:
        count, size, offset = struct.unpack("<10xHLL2x", archive[-22:])
        return struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)

    hidden, plain = _compressed(), _pickled(b"\x80\x02}.")
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(hidden) - 22, 1)
    return b"".join((hidden[:-22], record(hidden), plain[:-22], record(plain), locator, plain[-22:]))


WEIGHTS: dict[str, Callable[[], bytes]] = {
    "list-in-itself": lambda: _pickled(b"\x80\x02]q\x00h\x00a."),
    "lists-of-lists": lambda: _pickled(
        b"\x80\x02]q\x00", b"".join(b"]q%c(h%ch%ce" % (n, n - 1, n - 1) for n in range(1, 60)), b"."
    ),
    "tuples-as-key": lambda: _pickled(
        b"\x80\x02}(K\x01K\x01\x86q\x00",
        b"".join(b"h%ch%c\x86q%c" % (n - 1, n - 1, n) for n in range(1, 60)),
        b"K\x01u.",
    ),
    "one-large-key": lambda: _pickled(
        b"\x80\x02K\x01K\x01\x86q\x00",
        b"".join(b"h%ch%c\x86q%c" % (n - 1, n - 1, n) for n in range(1, 18)),
        b"}q\x12" + b"h\x12h\x11Ns" * 100_000 + b".",
    ),
    "memory-by-number": lambda: _pickled(
        b"\x80\x02c__builtin__\nbytearray\n\x8a\x05", (40 << 30).to_bytes(5, "little"), b"\x85R."
    ),
    "expanded": _expanded,
    "compressed": _compressed,
    "two-directories": _with_two_directories,
}


WRITTEN: dict[str, Callable[[], bytes]] = {
    "config.toml dotted": lambda: (".".join("a" * 100_000) + " = 1\n").encode(),
    "summary.json nested": lambda: b'{"a": ' + b"[" * SOME + b"]" * SOME + b"}\n",
}
"""The contents of a small file of a run, by its name."""
LONG = ("config.toml", "summary.json", "steps.jsonl", *foreign.HELD)
"""Files that are made terabytes long, with nothing in them: they take no place on the disk."""
EVALUATED: dict[str, dict[str, Any]] = {
    "large images": {"data": "fake", "image-size": 30_000},
    "large batch": {"data": "fake", "samples": 5_000, "batch": 10**9, "image-size": 64},
    "many classes": {"classes": 10**10},
    "large model": {"model": "pyramidnet-60000002-9000000"},
    "wide model": {"model": "pyramidnet-110-9000000"},
}
"""Options of a run, which its checkpoint confirms."""


def _with_options(run: Path, options: dict[str, Any]) -> None:
    config, step = run / "config.toml", run / "checkpoints" / STEP
    state = json.loads((step / "state.json").read_text())
    for key, value in options.items():
        lines = [line for line in config.read_text().splitlines() if not line.startswith(f"{key} =")]
        config.write_text("\n".join([*lines, f"{key} = {json.dumps(value)}"]))
        state["meta"]["config"][key] = value
    (step / "state.json").write_bytes(render(state))
    if size := options.get("image-size"):
        model = table.build_for("mlp", classes=10, shape=(3, min(size, 64), min(size, 64))).double()
        save_file(model.state_dict(), step / "model.safetensors")
        (step / "optimizer.safetensors").unlink()
        (step / "checksums.json").write_text("{}")
    foreign.seal(step)


def _ends_well(folder: Path, words: Words) -> None:
    """Run the command with 2 GiB of memory, for 10 s at most: it ends well, or says in one sentence why not."""
    ended = end(start(folder, *words, module="tests.limited"), foreign.LIMIT_S)
    assert ended.code in (0, 2, 3), ended
    assert "Traceback" not in ended.err
    assert not re.search("MemoryError|alloc", ended.out + ended.err), "it was tried until the memory was full"
    assert len(ended.err.splitlines()) == (ended.code != 0), ended.err


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_small_file_of_weights_costs_little(tmp_path: Path, name: str) -> None:
    path = tmp_path / "w"
    path.write_bytes(WEIGHTS[name]())
    assert path.stat().st_size < 8 << 20
    _ends_well(tmp_path, ("diff", path, path))


@pytest.mark.parametrize("name", [*WRITTEN, *LONG, *EVALUATED])
def test_a_small_run_folder_costs_little(tmp_path: Path, name: str) -> None:
    run, file = copy_of_run(tmp_path), name.partition(" ")[0]
    if name in EVALUATED:
        _with_options(run, EVALUATED[name])
    elif name in WRITTEN:
        (run / file).write_bytes(WRITTEN[name]())
    else:
        path = next(run.rglob(file))
        path.write_bytes(b"")
        os.truncate(path, 2 << 40)
    words: Words = ("diff", run, run)
    if name in EVALUATED or file == "config.toml":
        words = ("eval", run)
    elif file in ("summary.json", "steps.jsonl"):
        words = ("compare", "--output", tmp_path / "report", "--from", run)
    _ends_well(tmp_path, words)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Of those in a run's folder some are drawn below."""
    os.mkfifo(tmp_path / "w")
    for words in (("diff", tmp_path / "w", GOLDEN / "checkpoints" / STEP), ("train", "--config", tmp_path / "w")):
        assert outcome(*words)[0] == 2


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("top1", [], "TypeError"),
        ("step_p50_s", [], "TypeError"),
        ("exit", [], "TypeError"),
        ("exit", 10**400, "ValueError"),
    ],
)
def test_a_run_whose_numbers_are_none_is_told_in_a_table(tmp_path: Path, name: str, value: Any, error: str) -> None:
    path = copy_of_run(tmp_path) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    assert outcome("runs", tmp_path)[0] == 0
    code, said = outcome("compare", "--output", tmp_path / "report", "--from", path.parent)
    assert code == 2
    assert f"summary.json cannot be read ({error}" in said


# ---- what a checkpoint's names lead to


@pytest.mark.parametrize("name", ["../../../secret.safetensors", "/dev/zero", "..", "a\0b.safetensors"])
def test_checksums_name_files_of_the_checkpoint_alone(tmp_path: Path, name: str) -> None:
    run = copy_of_run(tmp_path)
    (tmp_path / "secret.safetensors").write_bytes(foreign.weights("safetensors"))
    foreign.seal(run / "checkpoints" / STEP, {name: "0" * 64})
    code, said = outcome("diff", run, GOLDEN / "checkpoints" / STEP)
    assert code == 2
    assert "which is no file of a checkpoint" in said


@pytest.mark.parametrize("target", ["/outside", "../../outside", f"../checkpoints/{STEP}", "best"])
def test_links_of_a_run_lead_to_its_checkpoints_alone(tmp_path: Path, target: str) -> None:
    run = copy_of_run(tmp_path)
    link = run / "checkpoints" / "last"
    link.unlink()
    link.symlink_to(target)
    code, said = outcome("diff", run, GOLDEN / "checkpoints" / STEP)
    assert code == 2
    assert "not to a checkpoint in the same folder" in said


def test_a_users_own_link_to_a_run_is_followed(tmp_path: Path) -> None:
    run = copy_of_run(tmp_path)
    (tmp_path / "mine").symlink_to(run)
    (tmp_path / "best-one").symlink_to(run / "checkpoints" / "best")
    assert outcome("diff", tmp_path / "mine", tmp_path / "best-one")[0] == 0


# ---- whatever can be drawn


@pytest.mark.long
@often
@given(st.data())
def test_any_damage_is_a_sentence(data: st.DataObject) -> None:
    verb = data.draw(st.sampled_from(VERBS))
    with tempfile.TemporaryDirectory() as folder:
        run, whole = copy_of_run(Path(folder)), GOLDEN / "checkpoints" / STEP
        words: dict[str, Words] = {
            "compare": ("compare", "--output", Path(folder) / "report", "--from", run),
            "runs": ("runs", folder),
            "eval": ("eval", run),
            "diff": ("diff", run, whole),
            "resume": (
                *("train", "--config", GOLDEN / "config.toml", "--max-steps", 9, "--output", run, "--resume", "auto"),
            ),
            "weights": ("diff", run / "a", run / "b"),
        }
        if verb == "weights":
            kind = data.draw(st.sampled_from(["safetensors", "archive", "legacy"]))
            (run / "a").write_bytes(foreign.weights(kind))
            (run / "b").write_bytes(foreign.spoil_bytes(data.draw, foreign.weights(kind)))
        else:
            foreign.spoil(data.draw, run)
        code, said = outcome(*words[verb])
    assert code in (0, 2, 3), f"{verb}: {code}\n{said}"

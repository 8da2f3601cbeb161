"""A run's copy in a store: what it names is complete at every moment, and a run goes on from that alone."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lockstep.checkpoint import Checkpoints
from lockstep.checkpoint.layout import digest
from lockstep.checkpoint.state import State
from lockstep.cli.main import main
from lockstep.config.options import flatten, from_toml, override, to_toml
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.runs import remote

from ..command import events, losses, refusal, weights

TRAIN = ("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--quiet", "--checkpoint-every", "4")
URL = "memory://store/run"
LOCAL = Path("runs/memory.store.run")
WRITES = ("put_file", "pipe_file", "rm_file", "rmdir")
"""The methods by which an upload changes this store."""


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with an empty store, in a folder of its own."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    move(tmp_path / "a", monkeypatch)


def move(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on in another folder, as on another machine."""
    folder.mkdir()
    monkeypatch.chdir(folder)


def _train(*words: object) -> int:
    return main([*TRAIN, *map(str, words)])


def _targets(store: remote.Store, scratch: Path) -> dict[str, int]:
    """Return the step of each checkpoint that the store names; fail unless each is complete."""
    steps = {}
    for link in ("last", "best"):
        if name := store.target(link):
            part = store._fetch(f"checkpoints/{name}/", remote._CHECKPOINT, scratch)
            sums = json.loads((part / "checksums.json").read_text())
            assert {file: digest(part / file) for file in sums} == sums
            steps[link] = json.loads((part / "state.json").read_text())["meta"]["step"]
    return steps


def test_a_url_is_a_store_and_a_local_folder() -> None:
    wanted = {"output": "runs/s3.b.a.run", "remote": "s3://b/a/run", "resume": ""}
    config = override(RunConfig(), output="s3://b/a/run/")
    for found in (config, from_toml('output = "s3://b/a/run"'), from_toml(to_toml(config))):
        assert flatten(found, wanted) == wanted
    assert flatten(override(RunConfig(), resume="s3://b/a/run"), wanted) == wanted | {"resume": "s3://b/a/run"}
    elsewhere = override(RunConfig(), output="here", remote="s3://b/a/run")
    assert flatten(elsewhere, wanted) == wanted | {"output": "here"}
    with pytest.raises(RequestError, match=r"--remote s3://b/a/run and --output s3://b/c: a run has one folder"):
        override(config, output="s3://b/c")


def test_a_run_goes_on_where_nothing_but_the_store_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole"
    assert _train("--max-steps", 14, "--output", whole) == 0
    assert _train("--max-steps", 6, "--output", URL) == 0
    move(tmp_path / "b", monkeypatch)
    assert _train("--max-steps", 14, "--resume", URL) == 0
    assert losses(LOCAL) == losses(whole)
    assert weights(LOCAL) == weights(whole)
    assert [row["first_step"] for row in events(LOCAL, "start")] == [0, 6]
    store = remote.Store(URL)
    assert _targets(store, tmp_path / "scratch")["last"] == 14
    for name in ("steps.jsonl", "summary.json", "proof.md", "config.toml"):
        assert store.files.cat_file(name) == (LOCAL / name).read_bytes()
    assert [name for name in store.names("checkpoints") if "step" in name] == ["step-00000012", "step-00000014"]


def test_a_checkpoint_in_a_store_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train("--max-steps", 4, "--output", URL) == 0
    told = capsys.readouterr().out
    move(tmp_path / "b", monkeypatch)
    for name in (URL, f"{URL}/checkpoints/best"):
        assert main(["eval", name]) == 0
        assert capsys.readouterr().out.split()[2] in told
    assert "no complete checkpoint at memory://store" in refusal(capsys, "eval", "memory://store/none")


def test_a_store_is_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*TRAIN, "--max-steps", 4)
    assert _train("--max-steps", 4, "--output", URL) == 0
    move(tmp_path / "b", monkeypatch)
    assert f"{URL} holds a run already" in refusal(capsys, *words, "--output", URL)
    assert _train("--max-steps", 4, "--output", "mine") == 0
    told = refusal(capsys, *words, "--output", "mine", "--remote", URL, "--resume", "auto")
    assert f"{URL} holds another run than mine" in told
    assert _train("--max-steps", 4, "--output", LOCAL) == 0
    assert f"{URL} holds another run than {LOCAL}" in refusal(capsys, "eval", URL)
    missing = "memory://store/missing"
    assert f"--resume {missing}: there is no complete checkpoint" in refusal(capsys, *words, "--resume", missing)
    assert not any("missing" in name for name in MemoryFileSystem.store)


def test_a_store_that_does_not_answer_is_refused_soon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *_, **__: answer.wait())
    monkeypatch.setattr(remote, "_ANSWER_S", 0.1)
    assert f"{URL}: no answer within 0.1 s" in refusal(capsys, *TRAIN, "--output", URL)
    answer.set()


def _break(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Have something happen before each change of the store."""
    for method in WRITES:
        does = getattr(MemoryFileSystem, method)

        def breaking(*given: Any, does: Callable[..., Any] = does, **how: Any) -> Any:
            happens()
            return does(*given, **how)

        monkeypatch.setattr(MemoryFileSystem, method, breaking)


def _save(saver: Checkpoints, step: int, value: float, *, best: bool = False) -> None:
    saver.save(State({"model/weight": torch.full((4, 3), value)}, {"step": step}), step=step, best=best)
    saver.wait()


def _moments(run: Path) -> list[Path]:
    """Return copies of a run's folder at the moments of its uploads.

    The fourth has another checkpoint by a name that was there before, and the last one's is before those of the fifth,
    since the run has gone back.
    """
    moments: list[Path] = []

    def keep() -> None:
        moments.append(run.with_name(f"moment {len(moments)}"))
        shutil.copytree(run, moments[-1], symlinks=True)

    saver = Checkpoints(run / "checkpoints", warn=pytest.fail)
    for step in (10, 20, 30):
        _save(saver, step, step, best=step == 10)
        keep()
    saver = Checkpoints(run / "checkpoints", warn=pytest.fail, origin=run / "checkpoints" / "step-00000020")
    _save(saver, 25, 25)
    _save(saver, 30, -1, best=True)
    keep()
    _save(saver, 40, 40)
    keep()
    saver = Checkpoints(run / "checkpoints", warn=pytest.fail, origin=run / "checkpoints" / "step-00000030")
    _save(saver, 35, 35)
    keep()
    return moments


def test_an_upload_that_breaks_off_anywhere_leaves_complete_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments, change, broken = _moments(tmp_path / "run"), 0, 0

    def happens() -> None:
        nonlocal change
        change += 1
        if change == broken:
            raise OSError("the network is down")

    _break(monkeypatch, happens)
    store = remote.Store(URL)
    while change >= broken:
        change, broken = 0, broken + 1
        MemoryFileSystem.store.clear()
        for number, moment in enumerate(moments):
            if number in (0, 3, 5):  # the start of a process
                upload = remote.Upload(override(RunConfig(), output=moment, remote=URL), pytest.fail)
            upload._folder = moment
            try:
                upload._upload()
            except OSError:
                _targets(store, tmp_path / "scratch")
                upload._upload()
        assert _targets(store, tmp_path / "scratch") == {"last": 35, "best": 30}
        names = [name for name in store.names("checkpoints") if name.startswith("step")]
        assert names == ["step-00000030", "step-00000035"]
    assert broken > 30


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    saver = Checkpoints(run / "checkpoints", warn=pytest.fail)
    _save(saver, 10, 10)
    _break(monkeypatch, lambda: shutil.rmtree(run / "checkpoints" / "step-00000010", ignore_errors=True))
    remote.Upload(override(RunConfig(), output=run, remote=URL), pytest.fail)._upload()
    assert _targets(remote.Store(URL), tmp_path / "scratch") == {"last": 10}


def test_a_store_that_fails_costs_a_run_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_down = True

    def happens() -> None:
        if is_down and threading.current_thread().name == "upload":
            raise OSError("the network is down")

    _break(monkeypatch, happens)
    assert _train("--max-steps", 8, "--output", URL) == 0
    warning = "The upload to memory://store/run failed (OSError: the network is down)"
    (row,) = [row for row in events(LOCAL, "warning") if "upload" in row["text"]]
    assert row["text"].startswith(warning)
    assert capsys.readouterr().err.count(warning) == 1
    assert not [name for name in MemoryFileSystem.store if not name.endswith(".lock")]
    is_down = False
    assert _train("--max-steps", 12, "--output", URL, "--resume", "auto") == 0
    assert remote.Store(URL).target("last") == "step-00000012"


def test_the_end_waits_for_a_slow_store_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_slow = threading.Event()

    def happens() -> None:
        if threading.current_thread().name == "upload":
            is_slow.wait(0.05)

    _break(monkeypatch, happens)
    monkeypatch.setattr(remote, "_SILENT_S", 0.02)
    assert _train("--max-steps", 4, "--output", URL) == 0
    assert "waiting for the upload to memory://store/run, 300 s at most" in capsys.readouterr().err
    assert _targets(remote.Store(URL), tmp_path / "scratch") == {"last": 4, "best": 4}
    told = list[str]()
    config = override(RunConfig(), output=LOCAL, remote=f"{URL}s", stall_timeout=0.4)
    upload = remote.Upload(config, lambda event, text: told.append(f"{event}: {text}"))
    upload.record("start")
    upload.flush()
    upload.close()
    assert told == [
        "upload: waiting for the upload to memory://store/runs, 0.2 s at most",
        "warning: The upload to memory://store/runs failed (it takes longer than 0.2 s): runs/memory.store.run has all "
        "files, and the next upload sends them.",
    ]
    is_slow.set()

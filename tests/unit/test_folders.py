"""The folder of a run, which an earlier start of the same run may still hold."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep import folders, runs
from lockstep.config import RunConfig
from lockstep.errors import RequestError, RunError
from lockstep.options import override

from ..command import refusal
from ..starting import config

_HOLDER = """
import sys
from pathlib import Path
from lockstep import locks
held = getattr(locks, sys.argv[2])(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def _held(folder: Path, how: str = "acquire") -> Iterator[subprocess.Popen[str]]:
    """Have another process lock the folder, until its input ends."""
    words = [sys.executable, "-c", _HOLDER, str(folder), how]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_run_that_starts_again_where_its_folder_is_not_is_refused(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()  # of a rank of this node, in the start before
    with pytest.raises(RequestError, match=r"on another node: .* put --output where all nodes see it"):
        folders.claim(config(output=tmp_path), before=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_rank_0_of_the_start_before_is_waited_for_and_keeps_the_next_from_writing(tmp_path: Path) -> None:
    with _held(tmp_path) as process:
        named = f"process {process.pid} on {platform.node()}"
        with pytest.raises(RunError, match=f"held by rank 0 of the start before this one .{named}"):
            folders.claim(config(output=tmp_path, stall_timeout=1), before=tmp_path, holder=named)
        for again in ({"before": tmp_path, "holder": "process 1 on another host"}, {}):
            begun_s = time.monotonic()
            with pytest.raises(RequestError, match=f"is in use by another run .{named}"):
                folders.claim(config(output=tmp_path, stall_timeout=60), **again)  # type: ignore[arg-type]
            assert time.monotonic() - begun_s < 5  # another run is told at once
        with subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {process.pid}"]):
            folders.claim(config(output=tmp_path, stall_timeout=60), before=tmp_path, holder=named).release()


def test_a_folder_is_its_runs_also_while_no_rank_holds_it(tmp_path: Path) -> None:
    asked = config(output=tmp_path)
    folders.claim(asked).release()
    with _held(tmp_path, "acquire_for_agent"):
        for use in (folders.claim, folders.check):
            with pytest.raises(RequestError, match=r"is in use by another run .*its ranks are started again"):
                use(asked)
        folders.claim(asked, before=tmp_path, holder="process 1 on a host").release()
        with _held(tmp_path, "acquire_for_agent"):  # another one of the same run
            pass
    folders.check(asked)


def test_a_restart_goes_on_in_no_folder_but_one_of_the_commands_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of an earlier start comes over the network, where there are several nodes."""
    monkeypatch.chdir(tmp_path)
    asked = config(model="mlp", data="digits")
    mine = tmp_path / "runs" / "digits-mlp-2"
    assert runs.taken_up(asked, mine) == mine
    theirs = tmp_path / "theirs"
    mine.parent.mkdir()
    (mine.parent / "digits-mlp-3").symlink_to(theirs)
    for told in (theirs, tmp_path / "runs" / "another", tmp_path / "runs" / "digits-mlp-3"):
        with pytest.raises(RequestError, match="is said to have written to"):
            runs.taken_up(asked, told)
    assert runs.taken_up(config(output="here"), theirs) == tmp_path / "here"


def test_auto_is_no_other_run_than_the_one_whose_config_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("mine", "runs/digits-resnet8", "runs/digits-resnet8-2"):
        would = "begin a new run in runs" if run == "mine" else "continue runs/digits-resnet8"
        Path(run).mkdir(parents=True)
        Path(run, "steps.jsonl").touch()
        Path(run, "config.toml").write_text('data = "digits"\nmodel = "resnet8"\n')
        asked = ("train", "--config", "mine/config.toml", "--resume", "auto")
        assert re.search(rf"would {would}.*; continue that one with --resume mine", refusal(capsys, *asked))
    config = override(RunConfig(), data="digits", model="resnet8", resume="auto")
    folders.check_meant(config, Path("runs/digits-resnet8-2/config.toml"))
    folders.check_meant(override(config, output="mine"), Path("mine/config.toml"))
    folders.check_meant(config, Path("elsewhere.toml"))

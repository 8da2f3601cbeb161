"""The folder of a run: one run's alone, and the same one when it starts again."""

from __future__ import annotations

import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError, RunError
from lockstep.runs import folders

from ..command import refusal
from ..starting import config

_HOLDER = """
import sys
from pathlib import Path
from lockstep import RunConfig, override
from lockstep.runs import folders
with folders.claim(override(RunConfig(), output=sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def _held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Have another process lock the folder, until its input ends."""
    words = [sys.executable, "-c", _HOLDER, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_run_that_starts_again_where_its_folder_is_not_is_refused(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()  # of a rank of this node, in the start before
    told = r"on another node: .* put --output where all nodes see it"
    with pytest.raises(RequestError, match=told), folders.claim(config(output=tmp_path), earlier=tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_folder_is_one_runs_until_its_process_ends_however_that_is(tmp_path: Path) -> None:
    with _held(tmp_path) as process:
        told = f"is in use by another run .process {process.pid} on {platform.node()}"
        with pytest.raises(RequestError, match=told):
            folders.check(config(output=tmp_path))
        with pytest.raises(RequestError, match=told), folders.claim(config(output=tmp_path)):
            pass
        process.kill()
        process.wait()
        with folders.claim(config(output=tmp_path), earlier=tmp_path):
            pass
    folders.check(config(output=tmp_path))


def test_rank_0_of_the_start_before_is_waited_for_and_keeps_the_next_from_writing(tmp_path: Path) -> None:
    with _held(tmp_path) as process:
        told = f"held by rank 0 of the start before this one .process {process.pid} on {platform.node()}"
        hasty, patient = (config(output=tmp_path, stall_timeout=seconds) for seconds in (1, 60))
        with pytest.raises(RunError, match=told), folders.claim(hasty, earlier=tmp_path):
            pass
        words = ["sh", "-c", f"sleep 1; kill -9 {process.pid}"]
        with subprocess.Popen(words), folders.claim(patient, earlier=tmp_path):
            assert process.wait(10) == -signal.SIGKILL


def test_to_go_on_after_a_loss_in_start_up_does_not_extend_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = config(model="mlp", data="digits")
    with folders.begun(asked) as first, pytest.raises(RunError), folders.begun(asked) as second:
        raise RunError("Rank 1 was killed.")  # before rank 0 has written anything
    found = [each.record.output for each in (first, second)]
    assert found == [Path("runs/digits-mlp"), Path("runs/digits-mlp-2")]
    assert folders.check(override(asked, resume="auto")) == found[1]


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
        assert re.search(rf"would {would}.*; continue that run with --resume mine", refusal(capsys, *asked))
    config = override(RunConfig(), data="digits", model="resnet8", resume="auto")
    folders.check_meant(config, Path("runs/digits-resnet8-2/config.toml"))
    folders.check_meant(override(config, output="mine"), Path("mine/config.toml"))
    folders.check_meant(config, Path("elsewhere.toml"))

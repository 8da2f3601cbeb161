"""What `lockstep run` refuses before any rank starts, and by which launcher a script that runs already is a rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep import hardware
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.hardware import Gpu
from lockstep.launchers import table
from lockstep.runs import folders

from ..command import refusal
from ..starting import config


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "lacks the script to run"),
        ("absent.py", "absent.py cannot be read: No such file or directory"),
        (".", ". is a folder"),
        ("broken.py", r"broken.py is no script that Python can read: .* \(broken.py, line 1\)"),
        ("binary", "binary is no script that Python can read"),
        ("-m absent_module", "-m absent_module: there is no such module"),
        ("--model mlp --devices 2 --lr 1 train.py --batch 3", "takes no --model, --lr: the script decides"),
        ("--config x.toml train.py", "takes no --config"),
        ("--find-unused --seed=1 train.py", "takes no --find-unused"),
        ("--devcies 2 train.py", "did you mean --devices"),
        ("--devices --seed 1 train.py", "--devices lacks its value"),
        ("--strategy dp train.py", "drives several devices from one process"),
        ("--output train.py train.py", "--output train.py is a file"),
    ],
)
def test_what_can_be_seen_is_refused_before_a_rank_starts(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").touch()
    (tmp_path / "train.py").write_text("raise AssertionError\n")
    (tmp_path / "broken.py").write_text("main(\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert re.search(told, refusal(capsys, "run", *words.split()))


def test_a_process_that_runs_already_is_one_rank_and_starts_no_others() -> None:
    with table.joined(config(), {}) as (found, world):
        assert (found.parallel.launcher, world.size) == ("inline", 1)
    for asked in ({"devices": 2}, {"max_restarts": 1}, {"launcher": "spawn"}):
        with (
            pytest.raises(RequestError, match=r"start it with lockstep run \[flags\] SCRIPT"),
            table.joined(config(**asked), {}),
        ):
            pass


def test_of_several_gpus_a_script_alone_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu("H200", f"GPU-{index}", 1) for index in range(8)]
    monkeypatch.setattr(hardware, "gpus", lambda visible: hardware.select(gpus, visible))
    found = table.joining(RunConfig(), {}).config.parallel
    assert (found.launcher, found.devices, found.accelerator) == ("inline", 1, "cuda")
    with pytest.raises(RequestError, match="--launcher spawn would start"):
        table.joining(override(RunConfig(), devices=2), {})


def test_the_default_folder_has_the_scripts_name() -> None:
    assert folders.default_name(override(RunConfig(), model="train", data="")) == "train"

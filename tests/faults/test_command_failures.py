"""The command when something is wrong: one sentence, in bounded time, with the right exit code, and nobody left."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import checkpoint

from ..command import command, end, refusal, sentence, start
from ..needs import need

DDP = ("--strategy", "ddp", "--devices", 2)
TRAIN = ("train", "digits", "--batch", 50, "--max-steps", 12)
OWN = ("train", "--model", "mlp", "--batch", 8, "--accelerator", "cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("Exploding", 1, r"^The loss at step 4 is not a finite number on rank 0 and rank 1; .*--lr.*--clip"),
        (
            "Flipping",
            3,
            r"The replicas are not the same bits after step 8: rank 0 and rank 1 differ in model/body\.4\.weight by.*"
            r"the same after step 6\.",
        ),
        ("Failing", 1, r"^Rank 1 failed at \S+/tests/models\.py:\d+: ValueError: out of luck$"),
    ],
    ids=["Exploding", "Flipping", "Failing"],
)
def test_what_goes_wrong_in_the_users_model_is_one_sentence(model: str, code: int, words: str, folder: Path) -> None:
    checks = ("--verify-every", 2, "--precision", "fp32") if model == "Flipping" else ()
    ended = command(folder, *TRAIN, *DDP, "--model", f"tests.models:{model}", *checks, "--output", "run")
    said = sentence(ended, code=code)
    assert re.search(words, said), said
    assert ended.err.count("Traceback (most recent call last)") == (model == "Failing")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["exit"] == code
    assert summary["error"] == said
    kept = {path.name: path for path in (folder / "run" / "failures").iterdir()}
    if model == "Exploding":  # with the samples of the step, by rank
        told = [json.loads(kept[f"nonfinite_step_4_rank_{rank}.json"].read_text())["indices"] for rank in (0, 1)]
        assert len({index for shares in told for share in shares for index in share}) == 50
    else:
        assert "Traceback" in kept["rank_1.txt" if model == "Failing" else "rank_0.txt"].read_text()


def test_programs_that_a_data_set_starts_can_be_ended(folder: Path) -> None:
    how = ("--data", "tests.own_data:starting", "--workers", 1, "--epochs", 1, "--stall-timeout", 30)
    ended = command(folder, *OWN, *how)
    assert ended.code == 0, ended


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that is nearly full after a first checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1000k", "tmpfs", str(disk)]
    need([] if subprocess.run(mount, capture_output=True, check=False).returncode == 0 else ["root, to mount a disk"])
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_stops_no_training_but_is_no_success(
    folder: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_disk / "run"
    ended = command(folder, *TRAIN, "--checkpoint-every", 5, "--output", run)
    told = sentence(ended, code=1)
    assert re.search(r"step, 12, are not on the disk: the last one is of step 5; .*--resume disk/run\.$", told), told
    assert re.search(r"checkpoint of step 10 could not be written .*No space left.*training goes on", ended.err)
    assert "Traceback" not in ended.err
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit"], summary["steps"]) == (1, 12)
    assert summary["top1"] is not None
    assert checkpoint.load(run).meta["step"] == 5
    # With no room at all, nothing begins.
    with contextlib.suppress(OSError), (small_disk / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    said = refusal(capsys, *TRAIN, "--strategy", "single", "--output", small_disk / "next")
    assert "No space left on device" in said
    assert "--output" in said


def test_a_run_that_is_refused_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").touch()
    for output in ((), ("--output", "run"), ("--output", "mine")):
        own = ("--data", "tests.own_data:beyond_the_classes", "--workers", 0, "--batch", 60)
        # In the first batch, when the run has begun; and before it begins.
        assert "train sample 41 has label 3, but the classes are 0 to 2" in refusal(capsys, *OWN, *own, *output)
        assert "a last layer of 10 outputs" in refusal(capsys, *TRAIN, "--classes", 9, *output)
    left = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert left - {"runs"} == {"mine", "mine/notes.txt"}


def test_ranks_that_were_asked_for_different_runs_are_refused(folder: Path) -> None:
    words = (*TRAIN, "--world-size", 2, "--init-method", f"file://{folder / 'meeting'}", "--output", "run")
    with (
        start(folder, *words, "--rank", 0, "--lr", 0.1) as zero,
        start(folder, *words, "--rank", 1, "--lr", 0.2) as one,
    ):
        told = {sentence(end(each)) for each in (zero, one)}
    assert len(told) == 1, told
    assert "Rank 1 was started with --lr 0.2 (rank 0 has 0.1)" in told.pop()
    assert not (folder / "run" / "config.toml").exists()

"""What a run records, for people and for tools: epoch means, every step's loss, when and where it ran, and quietly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lockstep.cli.main import main
from lockstep.config.options import read_toml, recipes
from lockstep.record import manifest
from lockstep.record.console import Terminal
from lockstep.screen import Screen

from ..command import events, losses, refusal, weights

TRAIN = ("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--strategy", "single")


def _train(run: Path, *words: object) -> None:
    assert main([*TRAIN, "--output", str(run), *map(str, words)]) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs of 23 steps, the first one in two parts, with gradients clipped."""
    folder = tmp_path_factory.mktemp("records") / "run"
    for steps in (10, 46):
        _train(folder, "--epochs", 2, "--max-steps", steps, "--clip", 1, "--resume", "auto", "--log-every", 10)
    return folder


def test_an_epoch_has_the_means_over_its_samples(run: Path, tmp_path: Path) -> None:
    rows, told = events(run, "step"), events(run, "epoch")
    assert [row["epoch"] for row in told] == [0, 1]
    for row in told:
        of_epoch = [each for each in rows if each["epoch"] == row["epoch"]]
        samples = sum(each["samples"] for each in of_epoch)
        assert samples == row["samples"] == 1437
        mean = sum(each["loss"] * each["samples"] for each in of_epoch) / samples
        assert row["epoch_loss"] == pytest.approx(mean, rel=1e-12)
        assert row["epoch_samples_per_s"] == pytest.approx(samples / row["epoch_s"])
    # Begun in another folder: nobody knows here what its first steps came to.
    _train(tmp_path / "on", "--epochs", 1, "--max-steps", 10)
    _train(tmp_path / "there", "--epochs", 1, "--resume", tmp_path / "on")
    (part,) = events(tmp_path / "there", "epoch")
    assert "epoch_loss" not in part


def test_a_gradient_that_is_not_clipped_has_its_norm_told_once_an_interval(tmp_path: Path) -> None:
    for folder, words in (("plain", ()), ("clipped", ("--clip", 1e9))):
        _train(tmp_path / folder, "--max-steps", 12, "--log-every", 5, *words)
    norms = {row["step"]: row["grad_norm"] for row in events(tmp_path / "plain", "step") if "grad_norm" in row}
    every = {row["step"]: row["grad_norm"] for row in events(tmp_path / "clipped", "step")}
    assert 1 in norms
    assert 2 <= len(norms) < len(every) == 12
    assert norms == {step: pytest.approx(every[step], rel=1e-5) for step in norms}


def test_tensorboard_has_steps_as_they_were_the_epochs_the_config_and_the_hyper_parameters(run: Path) -> None:
    found = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    rows = {row["step"]: row for row in events(run, "step")}
    for name in ("loss", "grad_norm"):
        points = found.Scalars(f"train/{name}")
        assert points[-1].step == max(rows)
        for point in points:
            assert point.value == pytest.approx(rows[point.step][name], rel=1e-6)
    for name in ("epoch_loss", "epoch_s", "epoch_samples_per_s"):
        points = [(point.step, point.value) for point in found.Scalars(f"train/{name}")]
        assert points == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in events(run, "epoch")]
    assert not [tag for tag in found.Tags()["scalars"] if tag.endswith("/time")]
    (text,) = found.Tensors("config/text_summary")[0].tensor_proto.string_val
    lr = read_toml(run / "config.toml").optim.lr
    assert f"| lr | {lr} |" in text.decode()
    assert "| augment |" in text.decode()
    data = HParamsPluginData.FromString(found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    told = data.session_start_info.hparams
    assert (told["lr"].number_value, told["model"].string_value, told["strategy"].string_value) == (lr, "mlp", "single")


def test_events_have_their_time_which_is_the_summarys_too(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if row["event"] != "step"]
    assert times == sorted(times)
    assert time.time() - 600 < times[0] < times[-1] < time.time()
    assert not any("time" in row for row in rows if row["event"] == "step")
    assert json.loads((run / "summary.json").read_text())["time"] == times[-1]


def test_the_manifest_says_when_where_and_by_which_command(run: Path) -> None:
    told = json.loads((run / "manifest.json").read_text())
    begun = datetime.fromisoformat(told["date"])
    assert begun.tzinfo is not None
    assert abs(begun.timestamp() - events(run, "start")[-1]["time"]) < 60
    assert (told["host"], told["folder"]) == (os.uname().nodename, str(Path.cwd()))
    assert manifest.command_line(["/usr/bin/env", "a b"]) == "/usr/bin/env 'a b'"
    assert manifest.command_line(["train.py", "--lr", "1"]) == "python train.py --lr 1"
    assert manifest.command_line(["/x/lockstep/__main__.py", "train"]) == "python -m lockstep train"


def test_the_commit_is_told(tmp_path: Path) -> None:
    assert manifest.git_commit(tmp_path) is None
    for words in ("init -q", "-c user.name=n -c user.email=e commit -qm m --allow-empty"):
        subprocess.run(["git", "-C", tmp_path, *words.split()], check=True)
    (tmp_path / "below").mkdir()
    assert re.fullmatch("[0-9a-f]{40}", manifest.git_commit(tmp_path / "below") or "")


def test_the_config_repeats_the_run_in_another_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_toml(run / "config.toml")
    assert (config.checkpoint.resume, config.record.output) == ("", None)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(run / "config.toml")]) == 0
    assert losses(tmp_path / "runs" / "digits-mlp") == losses(run)
    assert weights(tmp_path / "runs" / "digits-mlp") == weights(run)
    # What a run was begun with, elsewhere, is part of it.
    older = run / "checkpoints" / "last"
    _train(tmp_path / "on", "--epochs", 3, "--clip", 1, "--resume", older)
    assert read_toml(tmp_path / "on" / "config.toml").checkpoint.resume == str(older)


def test_quiet_is_one_line_and_the_same_records(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _train(tmp_path / "run", "--epochs", 2, "--clip", 1, "--log-every", 10, "--quiet")
    told = capfd.readouterr()
    (line,) = told.out.splitlines()
    top1 = json.loads((tmp_path / "run" / "summary.json").read_text())["top1"]
    assert re.fullmatch(f"done after 46 steps and .*; test accuracy {top1:.2%} .*; written to {tmp_path / 'run'}", line)
    assert told.err == ""
    assert losses(tmp_path / "run") == losses(run)
    assert events(tmp_path / "run", "log")


def _shown(**start: Any) -> str:
    """Return what a console shows of a run with this start."""
    screen = Screen(width=200, record=True, _environ={})
    terminal = Terminal(screen, screen, live=False)
    begun = {"total_steps": 3, "epochs": 1, "steps_per_epoch": 3, "first_step": 0, "lines": ()}
    terminal.record("start", **begun, **start)
    terminal.record("log", step=3, epoch=0, loss=1.0, lr=0.1, samples_per_s=50.0)
    terminal.record("evaluate", step=3, samples=9)
    scores = {"top1": 0.5, "top5": 1.0, "loss": 0.5, "samples": 9}
    terminal.record("eval", step=3, epoch=0, on="test set", **scores)
    ended = {"steps": 3, "epoch_s": (), "best_top1": 0.5, "best_on": "test set", "proof": {}, "output": "runs/a"}
    terminal.record("finish", images_per_s=50.0, exit=0, **scores, **ended)
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", screen.export_text())


def test_only_images_are_called_so_and_five_of_five_classes_are_no_success() -> None:
    assert _shown(shape=[8], classes=5).count("samples/s") == 2
    assert not re.search("image|top-5", _shown(shape=[8], classes=5))
    told = _shown(shape=[3, 32, 32], classes=10)
    assert (told.count("images/s"), told.count("top-5 100.00%"), told.count("9 images")) == (2, 2, 1)


def test_a_table_is_spoken_of_as_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = ("train", "--data", "tests.own_data:drawn", "--model", "mlp", "--accelerator", "cpu", "--workers", "0")
    assert main([*table, "--precision", "fp32", "--epochs", "1", "--output", str(tmp_path / "run")]) == 0
    told = capfd.readouterr().out
    assert "samples/s" in told
    assert not re.search("image|top-5|channels", told)


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, "train")
    assert all(name in told for name in recipes())
    for words in (["submit"], ["submit", "--nodes", "2"]):
        told = refusal(capsys, *words)
        assert "No scheduler given" in told
        assert "slurm" in told
    assert refusal(capsys, "verify").endswith("No proof given; use lockstep verify gradients or curve.")
    assert main(["verify", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: lockstep verify WHAT [flags]")

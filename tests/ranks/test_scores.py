"""Validation, early stopping and the files of an evaluation: the same on any number of ranks, each sample once."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from lockstep import checkpoint
from lockstep.cli.main import main
from lockstep.config.options import override
from lockstep.config.schema import DataConfig, RunConfig
from lockstep.data import digits
from lockstep.data.sets import build
from lockstep.data.source import Indices, Part, Splits, hold_out
from lockstep.errors import RequestError
from lockstep.jobs.classifier import evaluate_checkpoint
from lockstep.trainer import run
from lockstep.world.world import World

from ..command import events
from ..curves import alone, apart, curve
from ..pool import RankPool

HELD = {
    "model": "mlp",
    "data": "digits",
    "batch": 100,
    "augment": ("crop", "flip"),
    "holdout": 0.1,
    "precision": "fp64",
}
SAMPLES = 1437
FROZEN = HELD | {"lr": 1e-12, "epochs": 9, "ledger": True}
"""Each evaluation after the first brings the same top1; an epoch has 13 steps."""


def _splits(**asked: Any) -> Splits:
    return build(DataConfig(**asked), seed=3, world=World.alone(), dtype=torch.float32, channels_last=False)


def _held(share: float, seed: int, samples: int = SAMPLES) -> Indices:
    return hold_out(DataConfig(holdout=share), seed, samples, LABELS[:samples], has_validation=False)[1]


LABELS = digits.read()["train"][1]


def test_what_is_held_out_follows_from_seed_and_index_alone() -> None:
    splits = _splits(holdout=0.25, augment=("crop", "cutout"))
    assert isinstance(splits.train, Part)
    assert isinstance(splits.validation, Part)
    kept, held = splits.train.indices, splits.validation.indices
    assert sorted([*kept, *held]) == list(range(SAMPLES))
    assert 0.2 < len(held) / SAMPLES < 0.3
    assert _held(0.25, 3).tolist() == held.tolist()
    for digit in range(10):
        of_all, of_held = (int((labels == digit).sum()) for labels in (LABELS, LABELS[held]))
        assert of_held == round(of_all / 4)
    unlabelled = [hold_out(DataConfig(holdout=0.25), 3, each, has_validation=False)[1] for each in (50, SAMPLES)]
    assert [*unlabelled[0]] == [index for index in unlabelled[1] if index < 50]
    assert len({*_held(0.25, 4)} ^ {*held}) > 300
    # As they are, without the variations of training.
    plain = _splits().train
    every = np.arange(len(held))
    ((x, y, read),) = splits.validation.stream([every], epoch=5)
    ((wanted, labels, _),) = plain.stream([held], epoch=0)
    assert (torch.equal(x, wanted), torch.equal(y, labels), read.tolist()) == (True, True, every.tolist())
    ((varied, *_),) = splits.train.stream([np.arange(len(kept))], epoch=5)
    ((unvaried, *_),) = plain.stream([kept], epoch=5)
    assert not torch.equal(varied, unvaried)


class _Few(TensorDataset):
    classes = ("ant", "bee", "cow", "dog")


def few() -> tuple[Subset[Any], TensorDataset]:
    """Return 24 samples of ant, 2 of bee, 1 of cow and none of dog, in a part of a data set, and a test set."""
    y = torch.tensor([0] * 12 + [2, 1] + [0] * 12 + [1] + [3])
    whole = _Few(torch.randn(28, 5, generator=torch.Generator().manual_seed(0)), y)
    return Subset(whole, range(27)), _Few(*whole[:4])


def _held_of_few(world: World, share: float, labels: list[int]) -> tuple[list[int], ...]:
    config = DataConfig(name="tests.ranks.test_scores:few", holdout=share, workers=0)
    splits = build(config, seed=1, world=world, dtype=torch.float64, channels_last=False)
    assert isinstance(splits.train, Part)
    assert isinstance(splits.validation, Part)
    parts = splits.train, splits.validation
    return tuple(np.bincount(np.array(labels)[part.indices], minlength=3).tolist() for part in parts)


def test_small_classes_train_and_are_held_out_where_they_have_two_samples(pool: RankPool) -> None:
    labels = [few()[0][index][1].item() for index in range(27)]
    for share, expected in ((0.1, ([22, 1, 1], [2, 1, 0])), (0.9, ([2, 1, 1], [22, 1, 0]))):
        for ranks in (1, 2):
            assert pool.run(ranks, _held_of_few, share, labels) == [expected] * ranks


def test_ranks_train_on_what_is_left_as_one_process_does(pool: RankPool, tmp_path: Path) -> None:
    values = HELD | {"max_steps": 20}
    assert apart(curve(pool, tmp_path, 3, **values, ledger=True), alone(pool, **values)) < 1e-9


def _run(world: World, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    strategy = "ddp" if world.size > 1 else "single"
    return run(override(RunConfig(), **values, strategy=strategy, output=folder, resume="auto"), world).as_json()


def test_a_run_without_improvement_stops_and_one_that_is_resumed_stops_at_the_same_step(
    pool: RankPool, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    values = FROZEN | {"patience": 3}
    (told,) = pool.run(1, _run, values, whole)
    assert told["stopped"] == "the score has not improved in 3 evaluations (--patience 3)"
    for ranks, more in ((1, {"max_steps": 26}), (2, {}), (1, {})):
        again = pool.run(ranks, _run, values | more, parts)[0]
    assert [(each["steps"], each["exit"]) for each in (told, again)] == [(13 * 4, 0)] * 2
    assert "nothing is left to train" in events(parts, "start")[-1]["lines"][-1]
    (more,) = pool.run(1, _run, FROZEN | {"patience": 4}, parts)  # which goes on
    assert more["steps"] == 13 * 5


def test_best_follows_the_validation_set_and_both_are_tested_at_the_end(pool: RankPool, tmp_path: Path) -> None:
    told = pool.run(2, _run, HELD | {"lr": 0.2, "epochs": 5, "eval_every": 2, "ledger": True}, tmp_path)[0]
    rows = events(tmp_path, "eval")
    assert [(row["step"], row["samples"]) for row in rows] == [(step, 143) for step in (26, 52, 65)]
    assert {told["best_on"], *(row["on"] for row in rows)} == {"validation set"}
    assert (told["top1"], told["best_top1"]) == (rows[-1]["top1"], max(row["top1"] for row in rows))
    best = checkpoint.load(tmp_path / "checkpoints" / "best").meta
    assert best["scores"]["top1"] == told["best_top1"]
    assert (told["test"]["step"], told["test_best"]["step"]) == (65, best["step"])
    for name, found in (("last", told["test"]), ("best", told["test_best"])):
        asked = override(RunConfig(), **HELD, resume=str(tmp_path / "checkpoints" / name))
        again = evaluate_checkpoint(asked, World.alone())
        assert all(again[key] == found[key] for key in ("step", "top1", "top5", "samples"))
        assert again["loss"] == pytest.approx(found["loss"], rel=1e-9)
    assert json.loads((tmp_path / "summary.json").read_text())["test"] == told["test"]


def test_without_a_validation_set_it_is_said_on_what_best_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits", "--model", "mlp", "--max-steps", "2", "--output", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "best is chosen on the test set (360 samples): there is no validation set" in said
    assert "(chosen on the test set)" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best_on"] == "test set"
    assert summary["test"] == {"step": 2, **{key: summary[key] for key in ("top1", "top5", "loss", "samples")}}


@pytest.mark.parametrize(
    ("folders", "validation", "test"),
    [("train val", 0, 4), ("train test", 0, 6), ("train val test", 4, 6), ("train val unlabelled", 0, 4)],
)
def test_a_folder_of_images_may_have_val_and_test(tmp_path: Path, folders: str, validation: int, test: int) -> None:
    for folder, count in (("train", 5), ("val", 2), ("test", 3)):
        for name in ("ant", "bee") if folder in folders.split() else ():
            (tmp_path / folder / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / folder / name / f"{number}.png")
    if "unlabelled" in folders:  # as ImageNet's
        (tmp_path / "test").mkdir()
        Image.new("RGB", (9, 9)).save(tmp_path / "test" / "1.png")
    asked: dict[str, Any] = {"name": "imagefolder", "dir": tmp_path, "image_size": 8, "workers": 0}
    found = _splits(**asked)
    assert (len(found.train), len(found.validation or ()), len(found.test)) == (10, validation, test)
    assert found.names == ("ant", "bee")
    if validation:
        with pytest.raises(RequestError, match=r"--holdout 0\.5: --data imagefolder already has a validation set"):
            _splits(**asked, holdout=0.5)


class _Named(TensorDataset):
    classes = ("ant", "bee", "cow")


def three() -> tuple[_Named, TensorDataset, TensorDataset]:
    """Return data of 30, 12 and 5 samples; class `cow` has none in the test set."""
    x, y = torch.randn(49, 5, generator=torch.Generator().manual_seed(0)), torch.arange(49) % 3
    test = torch.arange(49) % 3 < 2
    test[:42] = False
    return _Named(x[:30], y[:30]), TensorDataset(x[30:42], y[30:42]), TensorDataset(x[test], y[test])


THREE = {"model": "mlp", "data": "tests.ranks.test_scores:three", "batch": 8, "epochs": 2}


def _evaluated(world: World, run: Path, split: str, predictions: Path) -> dict[str, Any]:
    asked = override(RunConfig(), **THREE, resume=str(run))
    return evaluate_checkpoint(asked, world, split=split, predictions=predictions)


def test_an_evaluation_has_scores_by_class_and_writes_predictions_by_sample(pool: RankPool, tmp_path: Path) -> None:
    """Of each split, as a function may give them."""
    told = pool.run(2, _run, THREE, tmp_path / "run")[0]
    assert (told["best_on"], told["samples"], told["test"]["samples"]) == ("validation set", 12, 5)
    for split, samples in (("train", 30), ("validation", 12), ("test", 5)):
        found = []
        for ranks in (1, 3):
            path = tmp_path / f"{split} {ranks}.csv"
            told = pool.run(ranks, _evaluated, tmp_path / "run", split, path)[0]
            rows = list(csv.DictReader(path.read_text().splitlines()))
            assert [int(row["index"]) for row in rows] == list(range(samples))
            hits = [row["label"] == row["predicted"] for row in rows]
            assert told["top1"] == sum(hits) / samples
            assert [each["name"] for each in told["classes"]] == ["ant", "bee", "cow"]
            for number, each in enumerate(told["classes"]):
                own = [hit for row, hit in zip(rows, hits, strict=True) if int(row["label"]) == number]
                assert (each["samples"], each["top1"]) == (len(own), sum(own) / len(own) if own else None)
            found.append([(row["label"], row["predicted"], round(float(row["probability"]), 5)) for row in rows])
        assert found[0] == found[1]
        assert all(1 / 3 <= probability <= 1 for *_, probability in found[0])


class NaN(nn.Sequential):
    """Gives no number for images of a bright first pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(192, classes))

    def forward(self, x: Tensor) -> Tensor:
        bright = x[:, 0, 0, 0] > 2
        y: Tensor = super().forward(x)
        return y.masked_fill(bright[:, None] & (not self.training), torch.nan)


def test_predictions_over_folders_name_files_and_what_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for split, name, number in itertools.product(("train", "val"), ("ant", "a, bee"), range(6)):
        Path(split, name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (255 * (number == 1), 0, 0)).save(f"{split}/{name}/{number}.png")
    flags = ["--model", "tests.ranks.test_scores:NaN", "--data-dir", ".", "--accelerator", "cpu"]
    more = ["--data", "imagefolder", "--image-size", "8", "--workers", "0", "--holdout", "0.5", "--batch", "4"]
    assert main(["train", *flags, *more, "--max-steps", "1", "--output", "run"]) == 0
    assert "is not a number: they count as wrong" in capsys.readouterr().err
    files: dict[str, list[str]] = {}
    for split in ("train", "validation", "test"):
        assert main(["eval", "run", *flags, "--workers", "0", "--split", split, "--predictions", "held.csv"]) == 0
        rows = list(csv.DictReader(Path("held.csv").read_text().splitlines()))
        files[split] = [row["file"] for row in rows]
        assert [row["predicted"] == "-1" for row in rows] == [Path(file).stem == "1" for file in files[split]]
    said = capsys.readouterr().out
    assert "warning: The model's output for 2 of 12 samples is not a number: they count as wrong." in said
    listed = [f"{name}/{number}.png" for name in ("a, bee", "ant") for number in range(6)]
    assert files["test"] == [f"val/{file}" for file in listed]
    assert sorted(files["train"] + files["validation"]) == [f"train/{file}" for file in listed]


def test_the_command_writes_where_it_is_told_and_through_no_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", "--model", "mlp", "--max-steps", "2", "--holdout", "0.1", "--output", "run"]) == 0
    capsys.readouterr()
    assert main(["eval", "run/checkpoints/last", "--split", "validation", "--predictions", "held.csv"]) == 0
    assert capsys.readouterr().out.startswith("validation accuracy ")
    told = json.loads(Path("run/scores-validation.json").read_text())
    assert (told["split"], told["samples"], told["step"]) == ("validation", 143, 2)
    assert sum(each["samples"] for each in told["classes"]) == 143
    assert told["checkpoint"] == "run/checkpoints/step-00000002"
    held = _held(0.1, 0).tolist()
    assert [int(row["index"]) for row in csv.DictReader(Path("held.csv").read_text().splitlines())] == held
    assert not Path("run/scores.json").exists()
    shutil.move("run/scores-validation.json", "mine.json")
    before = Path("mine.json").read_bytes()
    Path("run/scores.json").symlink_to(Path("mine.json").absolute())
    capsys.readouterr()
    assert main(["eval", "run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("test accuracy ")
    assert "warning: run/scores.json cannot be written: it is a link" in said
    assert Path("mine.json").read_bytes() == before
    assert main(["eval", "run", "--output", "mine.json"]) == 2
    assert "--output" in capsys.readouterr().err
    assert main(["eval", "run", "--output", "elsewhere"]) == 0
    assert json.loads(Path("elsewhere/scores.json").read_text())["split"] == "test"

"""A checkpoint knows its classes by name and some of its samples: other data are mapped, refused or reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import checkpoint
from lockstep.cli.main import main

DATA: dict[str, Any] = {"order": [0, 1, 2], "names": ["ant", "bee", "cow"], "flip": False}
NET = ["--model", f"{__name__}:Net", "--data", f"{__name__}:data", "--accelerator", "cpu"]
TRAIN = ["train", *NET, "--batch", "16", "--lr", "0.3", "--precision", "fp64", "--quiet"]


class Net(nn.Linear):
    def __init__(self, classes: int) -> None:
        super().__init__(4, classes)


class _Named(TensorDataset):
    classes: list[str]


def data() -> list[_Named]:
    """Return the same samples under the same names; `DATA` says how the classes are numbered and named."""
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    if DATA["flip"]:
        y = 2 - y
    order = torch.tensor(DATA["order"])
    splits = [_Named(x[part], order.argsort()[y[part]]) for part in (slice(40), slice(40, None))]
    for split in splits:
        split.classes = [DATA["names"][number] for number in DATA["order"]]
    return splits


@pytest.fixture(autouse=True)
def _trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN, "--epochs", "4", "--output", "run"]) == 0


def _scores(*more: str) -> dict[str, Any]:
    assert main(["eval", "run", *NET, *more]) == 0
    scores: dict[str, Any] = json.loads(Path("run/scores.json").read_text())
    return scores


def test_classes_in_another_order_are_matched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = _scores()
    assert main([*TRAIN, "--epochs", "8", "--output", "whole"]) == 0
    monkeypatch.setitem(DATA, "order", [2, 0, 1])
    assert _scores() == scores
    for more in (["--resume", "auto", "--output", "run"], ["--init-from", "run", "--output", "next"]):
        assert main([*TRAIN, "--epochs", "8", *more]) == 0
    found, whole = (checkpoint.load(Path(folder)) for folder in ("run", "whole"))
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in whole.tensors.items())
    losses = [json.loads(line).get("loss") for line in Path("next/steps.jsonl").read_text().splitlines()]
    assert min(filter(None, losses)) < 0.7, "weights of the right classes"


def test_classes_of_other_names_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DATA, "names", ["ant", "Bee", "cow"])
    for command in (
        ["eval", "run", *NET],
        [*TRAIN, "--epochs", "8", "--resume", "auto", "--output", "run"],
        [*TRAIN, "--init-from", "run", "--output", "next"],
    ):
        assert main(command) == 2
        assert (
            "was trained on classes of other names than these data have, bee in place of Bee" in capsys.readouterr().err
        )
    assert (
        main([*TRAIN, "--epochs", "1", "--init-from", "run/checkpoints/last/model.safetensors", "--output", "next"])
        == 0
    )


def test_other_labels_are_reported_by_eval_and_refused_on_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _scores()["warnings"] == []
    monkeypatch.setitem(DATA, "flip", True)
    assert _scores()["warnings"]
    assert "other samples or labels in its test and train data" in capsys.readouterr().out
    assert main([*TRAIN, "--epochs", "8", "--resume", "auto", "--output", "run"]) == 2
    assert "was trained with other samples or labels" in capsys.readouterr().err

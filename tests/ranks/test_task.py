"""`lockstep train --step`: tasks of any kind, by a step of the user's own, in our engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep import trainer
from lockstep.checkpoint import load
from lockstep.checkpoint.state import State
from lockstep.config.options import override
from lockstep.config.schema import DataConfig, RunConfig
from lockstep.errors import RequestError
from lockstep.world.world import World

from ..loops import padded, texts
from ..pool import RankPool

Sample = dict[str, Any]


def data(config: DataConfig) -> tuple[list[Tensor], list[Tensor]]:
    held = texts()
    return held[:40], held[40:]


class Model(nn.Module):
    """Takes and returns dicts, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, batch: Sample) -> Sample:
        return {"logits": self.out(self.norm(self.embed(batch["ids"])))}


def step(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    logits = model(batch)["logits"].flatten(0, 1)
    labels = batch["labels"].flatten()
    return functional.cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum())


def mean_step(model: nn.Module, batch: Sample) -> Tensor:
    loss, tokens = step(model, batch)
    return loss / tokens


def whole_step(model: nn.Module, batch: Sample) -> Tensor:
    found: Tensor = model(batch)["logits"]
    return found


def right(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    found = model(batch)["logits"].argmax(-1) == batch["labels"]
    return found.sum(), int((batch["labels"] != -100).sum())


def options(folder: Path, **values: Any) -> RunConfig:
    own = {name: f"tests.ranks.test_task:{value}" for name, value in (("model", "Model"), ("data", "data"))}
    own |= {"collate": "tests.loops:padded"}
    own |= {
        name: f"tests.ranks.test_task:{values.pop(name, own_name)}"
        for name, own_name in (("step", "step"), ("metric", "right"))
    }
    return override(
        RunConfig(),
        **own,
        **{"batch": 9, "epochs": 2, "lr": 0.1, "clip": 0.5, "warmup": 1.0, "precision": "fp64", "output": str(folder)}
        | values,
    )


def train(world: World, folder: Path, values: dict[str, Any]) -> dict[str, float]:
    return trainer.run_own_step(options(folder, **values), world)


def known(folder: Path) -> tuple[list[float], State]:
    rows = map(json.loads, (folder / "steps.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["event"] == "step"], load(folder / "checkpoints" / "last")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_of_ones_own_learns_the_same_on_any_number_of_ranks(
    pool: RankPool, tmp_path: Path, accumulate: int
) -> None:
    values = {"accumulate": accumulate}
    alone = train(World.alone(), tmp_path / "1", values)
    losses, state = known(tmp_path / "1")
    assert len(losses) == 10
    for size in (2, 3):
        assert pool.run(size, train, tmp_path / str(size), values)[0] == pytest.approx(alone, rel=1e-9)
        theirs, learned = known(tmp_path / str(size))
        assert theirs == pytest.approx(losses, rel=1e-9)
        for name, held in state.tensors.items():
            torch.testing.assert_close(learned.tensors[name], held, rtol=1e-9, atol=1e-12)


def test_what_patterns_reached_and_each_epoch_is_shown_unless_asked_to_be_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for quiet in (False, True):
        train(World.alone(), tmp_path / str(quiet), {"freeze": ["embed.*"], "lr_scale": ["out.*=2"], "quiet": quiet})
        shown[quiet] = capsys.readouterr().out
    for line in ("frozen by embed.*: 1 tensor", "learning rate × 2 by out.*: 2 tensors", "epoch 1/2", "epoch 2/2"):
        assert line in shown[False]
    assert not re.search("frozen|rate|epoch", shown[True])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"step": "mean_step"}, "returned .* for 4 samples, and"),
        ({"step": "whole_step"}, r"a tensor of shape \(4, "),
        ({"ema": 0.9}, "--ema.* have no effect with --step"),
        ({"label_smoothing": 0.1}, "--label-smoothing.* have no effect with --step"),
        ({"compile": True, "eval_batch": 4}, "--compile, --eval-batch: without effect with --step"),
        ({"strategy": "dp"}, "--strategy dp drives several devices"),
        ({"holdout": 0.001}, "holds out none of 40 samples"),
        ({"holdout": 0.999}, "holds out all of 40 samples"),
    ],
)
def test_what_a_step_cannot_have_is_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        train(World.alone(), tmp_path / "run", values)
    assert not (tmp_path / "run").exists()


def first_detections(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
    """Return a score, which falls, in the fourth and the fifth evaluation alone."""
    EVALUATIONS.append(1)
    count = int(3 < len(EVALUATIONS) < 6)
    return torch.tensor(-float(len(EVALUATIONS))) * count, count


EVALUATIONS: list[int] = []


def test_epochs_whose_metric_counts_nothing_have_no_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    EVALUATIONS.clear()
    train(World.alone(), tmp_path / "run", {"metric": "first_detections", "batch": 40, "epochs": 6, "patience": 3})
    lines = [line for line in capsys.readouterr().out.splitlines() if "test loss" in line]
    assert ["no score" in line for line in lines] == [True] * 3 + [False] * 2 + [True]
    best = load(tmp_path / "run" / "checkpoints" / "best")
    assert (best.meta["epochs"], best.meta["scores"]) == (4, {"top1": -4.0})


def never_better(model: nn.Module, batch: Sample) -> tuple[int, int]:
    return -5, 1


def scored(folder: Path) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return what summary.json has of the tests, and the values recorded of the validation set, with their epochs."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = list(map(json.loads, (folder / "steps.jsonl").read_text().splitlines()))
    return (
        {name: value for name, value in summary.items() if name.startswith("test")},
        [row for row in rows if "validation_loss" in row],
    )


def test_best_follows_the_metric_on_a_validation_set_and_the_test_set_comes_once(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values: dict[str, Any] = {"holdout": 0.3, "epochs": 5, "eval_every": 2, "lr": 0.3}
    train(World.alone(), tmp_path / "1", values)
    tests, rows = scored(tmp_path / "1")
    assert [row["epoch"] for row in rows] == [1, 3, 4]
    assert {"test_loss", "test_metric"} <= tests.keys()
    pool.run(2, train, tmp_path / "2", values)
    theirs, others = scored(tmp_path / "2")
    assert theirs == pytest.approx(tests, rel=1e-9)
    assert [row["validation_loss"] for row in others] == pytest.approx([row["validation_loss"] for row in rows])
    values = {"holdout": 0.3, "epochs": 9, "patience": 2, "metric": "never_better"}
    train(World.alone(), tmp_path / "stops", values)
    tests, rows = scored(tmp_path / "stops")
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert "stopped early: the score has not improved in 2 evaluations (--patience 2)" in capsys.readouterr().out
    best = load(tmp_path / "stops" / "checkpoints" / "best")
    assert best.meta["epochs"] == 1, "the first was none the worse"
    assert tests["test_best_loss"] != tests["test_loss"]
    assert padded(texts(2))["ids"].shape[0] == 2

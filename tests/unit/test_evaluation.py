"""Evaluation is exact: counts over each sample once, on any number of ranks, in any batches."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.data.source import Fetched, Indices
from lockstep.jobs.classifier import evaluate_checkpoint
from lockstep.jobs.evaluation import EvaluationShares, evaluate
from lockstep.record.base import Nothing
from lockstep.record.result import Scores
from lockstep.trainer import train
from lockstep.world.world import World

from ..pool import RankPool


class Logits:
    """A test set whose samples are the logits themselves."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    skipped: tuple[str, ...] = ()
    files: tuple[str, Any] | None = None

    def __init__(self, samples: int, classes: int) -> None:
        generator = torch.Generator().manual_seed(samples * 100 + classes)
        self.classes = classes
        self.x = torch.randn(samples, classes, generator=generator, dtype=torch.float64)
        self.y = torch.randint(classes, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        for share in shares:
            yield Fetched(self.x[share], self.y[share], share)

    def close(self) -> None:
        pass


def _scores(model: nn.Module, source: Logits, world: World, batch: int, **options: Any) -> Scores:
    shares = EvaluationShares(source, world, batch).shares()
    return evaluate(model, (micro.batch for micro in shares), world, autocast=nullcontext, **options)


def _on_a_rank(world: World, samples: int, classes: int, batch: int) -> tuple[Scores, list[int]]:
    source = Logits(samples, classes)
    indices = [micro.batch[2].tolist() for micro in EvaluationShares(source, world, batch).shares()]
    return _scores(nn.Identity(), source, world, batch), [index for part in indices for index in part]


@pytest.mark.parametrize(
    ("ranks", "samples", "classes", "batch"), [(1, 37, 10, 8), (3, 37, 10, 8), (3, 2, 7, 5), (3, 61, 3, 100)]
)
def test_each_sample_counts_once(pool: RankPool, ranks: int, samples: int, classes: int, batch: int) -> None:
    source = Logits(samples, classes)
    better = [int((x > x[y]).sum()) for x, y in zip(source.x, source.y, strict=True)]
    top1, top5 = (sum(each < best for each in better) / samples for best in (1, 5))
    loss = nn.functional.cross_entropy(source.x, source.y).item()
    answers = pool.run(ranks, _on_a_rank, samples, classes, batch)
    for scores, _ in answers:
        assert (scores.top1, scores.top5, scores.samples) == (top1, top5, samples)
        assert scores.loss == pytest.approx(loss, rel=1e-12)
    assert sorted(index for _, counted in answers for index in counted) == list(range(samples))


def test_ties_go_to_the_first_class_and_nan_counts_as_wrong() -> None:
    source = Logits(40, 7)
    source.x = source.x.round()  # many ties
    top1 = (source.x.argmax(1) == source.y).double().mean().item()
    order = source.x.sort(dim=1, descending=True, stable=True).indices[:, :5]
    scores = _scores(nn.Identity(), source, World.alone(), 8)
    assert (scores.top1, scores.top5) == (top1, (order == source.y[:, None]).any(1).double().mean().item())
    source.y = source.x.argmax(1)
    source.x[3, 2] = source.x[7] = torch.nan
    warnings: list[str] = []
    rows: list[Tensor] = []
    found = _scores(nn.Identity(), source, World.alone(), 8, warn=warnings.append, predictions=rows)
    assert (found.top1, found.top5) == (38 / 40, 38 / 40)
    assert ["2 of 40 samples is not a number" in text for text in warnings] == [True]
    source.y[[3, 7]] = -1
    assert torch.cat(rows)[:, 2].long().tolist() == source.y.tolist()


class _Half(nn.Module):
    """Gives the logits in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


def test_the_scores_are_computed_in_single_precision() -> None:
    source = Logits(500, 4)
    expected = nn.functional.cross_entropy(source.x.bfloat16().float(), source.y).item()
    assert _scores(_Half(), source, World.alone(), 7).loss == pytest.approx(expected, rel=1e-6)


RESNET = {"model": "resnet8", "data": "digits", "precision": "fp64"}


def _trained(world: World, folder: Path) -> float:
    config = override(RunConfig(), **RESNET, strategy="ddp", batchnorm="local", max_steps=3, output=folder)
    return train(config, world, Nothing()).loss


def _evaluated(world: World, folder: Path) -> float:
    return float(evaluate_checkpoint(override(RunConfig(), **RESNET, resume=str(folder)), world)["loss"])


def test_all_ranks_evaluate_the_model_that_is_saved(pool: RankPool, tmp_path: Path) -> None:
    """Where each has batch statistics of its own, too."""
    told = pool.run(2, _trained, tmp_path)
    (saved,) = pool.run(1, _evaluated, tmp_path)
    assert told == [pytest.approx(saved, rel=1e-12)] * 2

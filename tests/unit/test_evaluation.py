"""Evaluation is exact: counts over each sample once, on any number of ranks, in any batches."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.data.source import Fetched, Indices
from lockstep.engine import evaluate_checkpoint, train
from lockstep.evaluation import evaluate
from lockstep.options import override
from lockstep.record.base import Nothing
from lockstep.result import Scores
from lockstep.world import World

from ..pool import RankPool


class Logits:
    """A test set whose samples are the logits themselves; remembers which ones were asked for."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    skipped: tuple[str, ...] = ()

    def __init__(self, samples: int, classes: int) -> None:
        generator = torch.Generator().manual_seed(samples * 100 + classes)
        self.classes = classes
        self.x = torch.randn(samples, classes, generator=generator, dtype=torch.float64)
        self.y = torch.randint(classes, (samples,), generator=generator)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        for share in shares:
            self.asked += share.tolist()
            yield Fetched(self.x[share], self.y[share], share)

    def close(self) -> None:
        pass


def _by_hand(source: Logits) -> Scores:
    """Return the scores by ranking each sample's classes one by one."""
    ranks = [int((x > x[y]).sum()) for x, y in zip(source.x, source.y, strict=True)]
    loss = nn.functional.cross_entropy(source.x, source.y).item()
    samples = len(ranks)
    top1, top5 = (sum(rank < best for rank in ranks) / samples for best in (1, 5))
    return Scores(top1=top1, top5=top5, loss=loss, samples=samples)


def _on_a_rank(world: World, samples: int, classes: int, batch: int) -> tuple[Scores | None, list[int]]:
    source = Logits(samples, classes)
    return evaluate(nn.Identity(), source, world, batch=batch, autocast=nullcontext), source.asked


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("samples", "classes", "batch"), [(37, 10, 8), (10, 3, 4), (2, 7, 5), (61, 5, 100)])
def test_each_sample_counts_once(pool: RankPool, ranks: int, samples: int, classes: int, batch: int) -> None:
    expected = _by_hand(Logits(samples, classes))
    answers = pool.run(ranks, _on_a_rank, samples, classes, batch)
    for scores, _ in answers:
        assert (scores.top1, scores.top5, scores.samples) == (expected.top1, expected.top5, expected.samples)
        assert scores.loss == pytest.approx(expected.loss, rel=1e-12)
    assert [index for _, asked in answers for index in asked] == list(range(samples))
    if classes <= 5:
        assert answers[0][0].top5 == 1.0


class _Moded(nn.Module):
    """Gives the logits; remembers the mode and the batch sizes it ran with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, torch.is_grad_enabled(), len(x)))
        return x


@pytest.mark.parametrize("training", [True, False])
def test_the_model_runs_in_evaluation_mode_and_is_given_back(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Moded().train(training)
    evaluate(model, Logits(10, 3), World.alone(), batch=4, autocast=nullcontext)
    assert model.seen == [(False, False, 4), (False, False, 4), (False, False, 2)]
    assert model.training is training
    monkeypatch.setattr(_Moded, "forward", lambda self, x: [][0])
    with pytest.raises(IndexError):
        evaluate(model, Logits(10, 3), World.alone(), batch=4, autocast=nullcontext)
    assert model.training is training


def test_half_precision_logits_are_counted_in_single() -> None:
    class _Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.bfloat16()

    source = Logits(500, 4)
    expected = nn.functional.cross_entropy(source.x.bfloat16().float(), source.y).item()
    scores = evaluate(_Half(), source, World.alone(), batch=7, autocast=nullcontext)
    assert scores is not None
    assert scores.loss == pytest.approx(expected, rel=1e-6)


def _trained(world: World, folder: Path) -> float:
    values = {"model": "resnet8", "data": "digits", "strategy": "ddp", "batchnorm": "local", "precision": "fp64"}
    return train(override(RunConfig(), **values, max_steps=3, output=folder), world, Nothing()).loss


def _evaluated(world: World, folder: Path) -> float:
    values = {"model": "resnet8", "data": "digits", "precision": "fp64", "resume": str(folder)}
    return evaluate_checkpoint(override(RunConfig(), **values), world)[1].loss


def test_all_ranks_evaluate_the_model_that_is_saved(pool: RankPool, tmp_path: Path) -> None:
    """Where each has batch statistics of its own, too."""
    told = pool.run(2, _trained, tmp_path)
    (saved,) = pool.run(1, _evaluated, tmp_path)
    assert told == [pytest.approx(saved, rel=1e-12)] * 2

"""The laws over whole tables, on real digits: of tests/ranks/test_laws.py, what is there in part."""

from __future__ import annotations

from itertools import product, starmap
from pathlib import Path
from typing import Any

import pytest

from ..curves import alone, apart, from_alone, spread
from ..pool import RankPool
from ..ranks.test_laws import LAW, LONG, WAYS, chain, check_continued, check_local_statistics

PLAIN = LONG | {"model": "mlp"}

pytestmark = pytest.mark.timeout(600)


# 1,437 digits: batch 50 leaves 37 at the end of an epoch, 48 leaves 45; 2 and 3 ranks then hold different counts.
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        *(
            (ranks, {"batch": batch, "accumulate": accumulate})
            for (ranks, batch), accumulate in product([(2, 48), (2, 51), (3, 48), (3, 50)], [1, 2, 3])
        ),
        *((ranks, {"model": "pyramidnet-20-48", "batch": 20}) for ranks in (2, 3)),
        *(
            (3, {"schedule": "cosine", "nesterov": True, "label_smoothing": 0.1} | options)
            for options in ({"optimizer": "adamw", "lr": 1e-3}, {"clip": 0.5, "ema": 0.9}, {"warmup": 1.0})
        ),
    ],
)
def test_ddp_with_batchnorm_equals_one_process(
    pool: RankPool, tmp_path: Path, ranks: int, values: dict[str, Any]
) -> None:
    assert from_alone(pool, tmp_path, ranks, LONG | values) < LAW


@pytest.mark.parametrize("accumulate", [2, 3, 7])
@pytest.mark.parametrize(("ranks", "options"), list(starmap(spread, WAYS)))
def test_accumulation_is_no_part_of_a_model_without_batch_statistics(
    pool: RankPool, tmp_path: Path, ranks: int, options: dict[str, Any], accumulate: int
) -> None:
    assert from_alone(pool, tmp_path, ranks, PLAIN, **options, accumulate=accumulate) < LAW


@pytest.mark.parametrize(("replicas", "accumulate"), [(2, 1), (3, 1), (4, 1), (4, 3)])
def test_batch_statistics_of_each_replica_are_the_same_under_every_strategy(
    pool: RankPool, tmp_path: Path, replicas: int, accumulate: int
) -> None:
    check_local_statistics(pool, tmp_path, replicas, **LONG | {"max_steps": 35, "accumulate": accumulate})


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        *starmap(spread, WAYS),
        (1, {"strategy": "dp", "devices": 3, "precision": "fp32"}),
        (2, {"batchnorm": "local"}),
        (3, {"ema": 0.9, "clip": 1.0, "precision": "fp32"}),
        (2, {"optimizer": "adamw", "lr": 1e-3, "accumulate": 3, "precision": "bf16"}),
        (2, {"model": "tests.models:Dropped"}),
        (3, {"model": "tests.models:Wide", "precision": "fp32"}),
        (1, {"model": "mlp", "optimizer": "muon", "lr": 1e-3}),
    ],
)
def test_a_continued_run_ends_with_the_same_bits(
    pool: RankPool, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    check_continued(pool, tmp_path, ranks, 29, **LONG | options)


@pytest.mark.parametrize("ways", [[("single", 1), ("ddp", 3)], [("ddp", 3), ("ddp", 2)], [("ddp", 2), ("single", 1)]])
def test_continuing_on_another_world_stays_on_the_curve(
    pool: RankPool, tmp_path: Path, ways: list[tuple[str, int]]
) -> None:
    values = LONG | {"accumulate": 2}
    assert apart(chain(pool, tmp_path, ways, **values), alone(pool, **values)) < LAW

"""The laws: the same model from every strategy, world size, accumulation and launcher; exact continuation.

In float64, a run with strategy S on N ranks has to give the losses and weights of one process within 1e-9 relative; the
same world twice has to give the same bits. tests/slow/test_laws.py has the whole tables of what is here in part.
"""

from __future__ import annotations

from itertools import combinations, pairwise, starmap
from pathlib import Path
from typing import Any

import pytest

from lockstep.kinds import KINDS

from ..curves import Curve, alone, apart, curve, from_alone, same_bits, spread
from ..pool import RankPool

LAW = 1e-9
LONG = {"model": "resnet8", "data": "digits", "augment": ("crop", "flip"), "lr": 0.05, "batch": 50, "max_steps": 50}
# Seven steps an epoch, the last of 37 images: ranks then hold different counts.
SHORT = {"data": "fake", "samples": 337, "image_size": 8, "max_steps": 10}
NET = LONG | SHORT | {"model": "tests.models:Normed"}
PLAIN = NET | {"model": "mlp", "clip": 0.2, "ema": 0.9}
# Every strategy there is, on as many devices as it takes. A new one in the table is held to the laws by that alone.
SEVERAL = [name for name, kind in KINDS.items() if kind.has_ranks or kind.drives_all]
TWO_LEVELS = [name for name in SEVERAL if KINDS[name].has_two_levels]
WAYS = [
    *((name, count) for name in KINDS if name not in TWO_LEVELS for count in ([2, 3] if name in SEVERAL else [1])),
    *((name, count) for name in TWO_LEVELS for count in (4, 6)),  # 2 ranks of 2 devices, and 3 of 2
]
FEWEST = [way for way in WAYS if way[1] < 3 or way == (way[0], 4)]


@pytest.mark.parametrize(
    ("values", "collectives"), [(LONG, "shared-memory"), (LONG | SHORT, "shared-memory"), (LONG | SHORT, "gloo")]
)
@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 3), (3, 1)])
def test_ddp_with_batchnorm_equals_one_process(
    pool: RankPool, tmp_path: Path, ranks: int, accumulate: int, values: dict[str, Any], collectives: str
) -> None:
    values = values | {"accumulate": accumulate}
    assert from_alone(pool, tmp_path, ranks, values, collectives=collectives) < LAW


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {"model": "pyramidnet-20-48", "batch": 20}),
        (2, {"model": "resnet8", "batch": 51, "accumulate": 2}),
        # No bias before a BatchNorm here: its gradient is 0 but for rounding, which AdamW makes as large as any other.
        (3, {"model": "resnet8", "optimizer": "adamw", "lr": 1e-3, "clip": 0.5, "ema": 0.9}),
        (3, {"schedule": "cosine", "nesterov": True, "label_smoothing": 0.1, "warmup": 1.0}),
    ],
)
def test_whatever_the_model_and_optimizer(pool: RankPool, tmp_path: Path, ranks: int, options: dict[str, Any]) -> None:
    assert from_alone(pool, tmp_path, ranks, NET | options) < LAW


@pytest.mark.parametrize(
    ("model", "options"), [("resnet8", {}), ("mlp", {}), ("mlp", {"strategy": "hybrid", "devices": 2})]
)
def test_ranks_without_a_sample_take_part(pool: RankPool, tmp_path: Path, model: str, options: dict[str, Any]) -> None:
    # 61 samples in batches of 20: the fourth batch is one sample, and two of three ranks have none. Statistics of one
    # sample's few pixels magnify rounding, so that it is three epochs: over more, a last bit grows to 1e-9.
    values = NET | {"model": model, "samples": 61, "batch": 20, "max_steps": 12}
    assert from_alone(pool, tmp_path, 3, values, **options) < LAW


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 7), (2, 2)])
def test_accumulation_is_no_part_of_a_model_without_batch_statistics(
    pool: RankPool, tmp_path: Path, ranks: int, accumulate: int
) -> None:
    assert from_alone(pool, tmp_path, ranks, PLAIN, accumulate=accumulate) < LAW


def test_accumulation_is_part_of_a_model_with_batch_statistics(pool: RankPool, tmp_path: Path) -> None:
    assert from_alone(pool, tmp_path, 1, NET, accumulate=2) > 1e-4


@pytest.mark.timeout(900)
def test_a_compiled_model_is_the_same_model(pool: RankPool, tmp_path: Path) -> None:
    # 37 samples an epoch, in batches of 18, 18 and 1: the share of the second rank is once empty.
    values = NET | {"model": "tests.models:Normed", "samples": 37, "batch": 18, "max_steps": 3}
    assert from_alone(pool, tmp_path, 2, values, compile=True) < LAW


@pytest.mark.parametrize(("strategy", "replicas"), [way for way in WAYS if way[0] in SEVERAL])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_strategy_equals_one_process(
    pool: RankPool, tmp_path: Path, strategy: str, replicas: int, accumulate: int
) -> None:
    ranks, options = spread(strategy, replicas)
    assert from_alone(pool, tmp_path, ranks, PLAIN | {"accumulate": accumulate}, **options) < LAW


def chain(pool: RankPool, folder: Path, ways: list[tuple[str, int]], **values: Any) -> Curve:
    """Return the curve of a run that goes on under one way after another, for the same number of steps or so."""
    losses: dict[int, float] = {}
    for number, way in enumerate(ways, start=1):
        ranks, options = spread(*way)
        last = {"max_steps": values["max_steps"] * number // len(ways), "resume": "auto"}
        part = curve(pool, folder, ranks, **values | options | last)
        losses |= part[0]
    return losses, part[1]


def check_local_statistics(pool: RankPool, folder: Path, replicas: int, **values: Any) -> None:
    """Train with batch statistics of each replica under every strategy, and under one after another: the same model."""
    values |= {"batchnorm": "local"}
    curves = []
    for strategy in SEVERAL:
        ranks, options = spread(strategy, replicas)
        curves.append(curve(pool, folder / strategy, ranks, **values | options))
    curves.append(chain(pool, folder / "chain", [(strategy, replicas) for strategy in SEVERAL], **values))
    assert len(curves) > 2
    assert all(apart(one, curves[0]) < LAW for one in curves[1:])


@pytest.mark.parametrize(("replicas", "accumulate"), [(3, 1), (4, 3)])
def test_batch_statistics_of_each_replica_are_the_same_under_every_strategy(
    pool: RankPool, tmp_path: Path, replicas: int, accumulate: int
) -> None:
    # Uneven shares: of 50, 13, 13, 12 and 12 on four devices; of an epoch's last batch of 37, 10, 9, 9 and 9.
    check_local_statistics(pool, tmp_path, replicas, **NET | {"accumulate": accumulate})


def test_muon(pool: RankPool, tmp_path: Path) -> None:
    # torch's Muon orthogonalises in bfloat16: a last bit of difference in a gradient can round to another one there.
    values = PLAIN | {"optimizer": "muon", "lr": 1e-3, "max_steps": 5}
    assert from_alone(pool, tmp_path, 2, values) < 1e-2


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"precision": "bf16"}),
        (3, {"collectives": "gloo"}),
        (3, {"collectives": "shared-memory"}),
        *((ranks, options | {"precision": "fp32"}) for ranks, options in starmap(spread, WAYS)),
    ],
)
def test_the_same_world_gives_the_same_bits(
    pool: RankPool, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    values = NET | {"accumulate": 2} | options
    first = curve(pool, tmp_path / "first", ranks, **values)
    assert same_bits(first, curve(pool, tmp_path / "second", ranks, **values))


def check_continued(pool: RankPool, folder: Path, ranks: int, epoch: int, **values: Any) -> None:
    """Stop a run within its second epoch of `epoch` steps, and continue it past that one's end: the same bits."""
    values |= {"schedule": "cosine", "epochs": 3, "max_steps": 2 * epoch + 2}
    stop = epoch + 3
    whole = curve(pool, folder / "whole", ranks, **values)
    curve(pool, folder / "parts", ranks, **values | {"max_steps": stop})
    parts = curve(pool, folder / "parts", ranks, **values, resume="auto")
    assert min(parts[0]) == stop + 1
    assert same_bits(parts, whole)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        *starmap(spread, dict(WAYS).items()),
        (1, {"model": "mlp", "optimizer": "muon", "lr": 1e-3}),
        (2, {"model": "tests.models:Dropped", "collectives": "gloo"}),
        (2, {"optimizer": "adamw", "lr": 1e-3, "accumulate": 3, "precision": "bf16", "batchnorm": "local"}),
        (3, {"model": "tests.models:Wide", "precision": "fp32", "ema": 0.9, "clip": 1.0}),  # buckets: strategies/ddp.py
    ],
)
def test_a_continued_run_ends_with_the_same_bits(
    pool: RankPool, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    check_continued(pool, tmp_path, ranks, 7, **NET | options)


def test_continuing_on_another_world_stays_on_the_curve(pool: RankPool, tmp_path: Path) -> None:
    ways = [("single", 1), ("ddp", 3), ("ddp", 2), ("single", 1)]
    values = NET | {"accumulate": 2, "max_steps": 20}
    assert apart(chain(pool, tmp_path, ways, **values), alone(pool, **values)) < LAW


def test_continuing_under_another_strategy_stays_on_the_curve(pool: RankPool, tmp_path: Path) -> None:
    # There and back for each pair, and home: each strategy goes on from each other one.
    ways = [*(way for pair in combinations(FEWEST, 2) for way in pair), FEWEST[0]]
    assert len({*pairwise(ways)}) == len(FEWEST) * (len(FEWEST) - 1)
    values = PLAIN | {"max_steps": 2 * len(ways)}
    assert apart(chain(pool, tmp_path, ways, **values), alone(pool, **values)) < LAW

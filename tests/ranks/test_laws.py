"""The laws: the same model from every strategy, world size and accumulation; exact continuation.

In float64, a run with strategy S on N ranks has to give the losses and weights of one process within 1e-9 relative; a
run that is continued has to end with the same bits, and so has one that is started twice. Each law runs over the table
of strategies: a new one is held to the laws by its line there.
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.registry import KINDS

from ..curves import Curve, alone, apart, curve, from_alone, same_bits, spread
from ..pool import RankPool

LAW = 1e-9
Values = dict[str, Any]
Ways = list[tuple[str, int]]

# 1,437 digits: the last batch of an epoch is 37 of 50 images; ranks then hold different counts, as in SHORT's.
LONG = {"model": "resnet8", "data": "digits", "augment": ("crop", "flip"), "lr": 0.05, "batch": 50, "max_steps": 50}
SHORT = LONG | {"data": "fake", "samples": 337, "image_size": 8, "max_steps": 10}
NET = SHORT | {"model": "tests.models:Normed"}
PLAIN = NET | {"model": "mlp", "clip": 0.2, "ema": 0.9}
# The fourth batch is one sample, which stands in on two of three ranks. The statistics of a few pixels magnify
# rounding, so that over more than three epochs a last bit grows to 1e-9.
EMPTY = NET | {"samples": 61, "batch": 20, "max_steps": 12}

SEVERAL = [name for name, kind in KINDS.items() if kind.has_ranks or kind.drives_all]
COUNTS = {name: (4, 6) if KINDS[name].has_two_levels else (2, 3) if name in SEVERAL else (1,) for name in KINDS}
WAYS = [(name, count) for name, counts in COUNTS.items() for count in counts]
FEWEST = [(name, counts[0]) for name, counts in COUNTS.items()]
MOST = [(name, counts[-1]) for name, counts in COUNTS.items()]


def slowly(cases: Any) -> list[Any]:
    """Return the cases of a table that are run slice by slice."""
    return [pytest.param(*case, marks=(pytest.mark.slow, pytest.mark.timeout(600))) for case in cases]


@pytest.mark.parametrize(
    ("ranks", "values", "options"),
    [
        (3, NET | {"schedule": "cosine", "nesterov": True, "label_smoothing": 0.1, "warmup": 1.0}, {}),
        *slowly([(2, LONG | {"accumulate": 3}, {})]),
        (3, LONG, {}),
        (2, SHORT | {"accumulate": 3}, {"collectives": "gloo"}),
        (3, NET | {"model": "pyramidnet-20-48", "batch": 20}, {}),
        # No bias before a BatchNorm here: its gradient is 0 but for rounding, which AdamW makes as large as any other.
        (3, SHORT | {"optimizer": "adamw", "lr": 1e-3, "clip": 0.5, "ema": 0.9}, {}),
        (3, EMPTY | {"model": "resnet8"}, {}),
        (3, EMPTY | {"model": "mlp"}, {}),
        (3, EMPTY | {"model": "mlp", "augment": ("mixup", "cutmix")}, {"accumulate": 2}),
        (3, EMPTY | {"model": "mlp"}, {"strategy": "hybrid", "devices": 2}),
        *slowly((ranks, LONG | {"batch": 48, "accumulate": each}, {}) for ranks, each in product((2, 3), (1, 2, 3))),
        *slowly((ranks, LONG | {"batch": 51, "model": "pyramidnet-20-48"}, {}) for ranks in (2, 3)),
    ],
)
def test_several_ranks_equal_one_process(
    pool: RankPool, tmp_path: Path, ranks: int, values: Values, options: Values
) -> None:
    assert from_alone(pool, tmp_path, ranks, values, **options) < LAW


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_compiled_model_is_the_same_model(pool: RankPool, tmp_path: Path) -> None:
    # 37 samples an epoch, in batches of 18, 18 and 1: on the second rank, a sample stands in once.
    values = NET | {"samples": 37, "batch": 18, "max_steps": 3}
    assert from_alone(pool, tmp_path, 2, values, compile=True) < LAW


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_muon(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    # torch's Muon rounds to bfloat16 even here: a last bit of difference in a gradient would grow to one of 1e-2.
    values = SHORT | {"optimizer": "muon", "lr": 1e-3, "nesterov": True}
    assert from_alone(pool, tmp_path, 3, values, strategy=strategy) < LAW


@pytest.mark.parametrize(
    ("strategy", "replicas", "accumulate", "data"),
    [
        ("single", 1, 7, "fake"),
        *((*way, accumulate, "fake") for way in WAYS if way[0] in SEVERAL for accumulate in (1, 3)),
        *slowly((*way, accumulate, "digits") for way in WAYS for accumulate in (2, 7)),
    ],
)
def test_strategy_and_accumulation_are_no_part_of_the_model(
    pool: RankPool, tmp_path: Path, strategy: str, replicas: int, accumulate: int, data: str
) -> None:
    ranks, options = spread(strategy, replicas)
    values = PLAIN if data == "fake" else LONG | {"model": "mlp"}
    assert from_alone(pool, tmp_path, ranks, values, **options, accumulate=accumulate) < LAW


def test_accumulation_is_part_of_a_model_with_batch_statistics(pool: RankPool, tmp_path: Path) -> None:
    assert from_alone(pool, tmp_path, 1, NET, accumulate=2) > 1e-4


def chain(pool: RankPool, folder: Path, ways: Ways, **values: Any) -> Curve:
    """Return the curve of a run that goes on under one way after another, for the same number of steps or so."""
    losses: dict[int, float] = {}
    for number, way in enumerate(ways, start=1):
        ranks, options = spread(*way)
        last = {"max_steps": values["max_steps"] * number // len(ways), "resume": "auto"}
        part, weights = curve(pool, folder, ranks, **values | options | last)
        losses |= part
    return losses, weights


@pytest.mark.parametrize(
    ("replicas", "values"),
    [
        # Uneven shares: of 50, 13, 13, 12 and 12 on four devices; of an epoch's last batch of 37, 10, 9, 9 and 9.
        *slowly([(3, NET)]),
        (4, NET | {"accumulate": 2, "max_steps": 8}),
        *slowly((replicas, LONG | {"max_steps": 35}) for replicas in (2, 4)),
    ],
)
def test_batch_statistics_of_each_replica_are_the_same_under_every_strategy(
    pool: RankPool, tmp_path: Path, replicas: int, values: Values
) -> None:
    values = values | {"batchnorm": "local"}
    curves = [chain(pool, tmp_path / name, [(name, replicas)], **values) for name in SEVERAL]
    curves.append(chain(pool, tmp_path / "chain", [(name, replicas) for name in SEVERAL], **values))
    assert len(curves) > 2
    assert all(apart(one, curves[0]) < LAW for one in curves[1:])


@pytest.mark.parametrize(
    ("epoch", "ranks", "values"),
    [
        (7, 1, NET | {"model": "mlp", "optimizer": "muon", "lr": 1e-3}),
        (7, 2, NET | {"model": "tests.models:Dropped", "collectives": "gloo"}),
        (7, 2, NET | {"optimizer": "adamw", "lr": 1e-3, "accumulate": 3, "precision": "bf16", "batchnorm": "local"}),
        (7, 3, NET | {"model": "tests.models:Wide", "precision": "fp32", "ema": 0.9, "clip": 1.0}),  # buckets
        *((7, ranks, NET | options | {"precision": "fp32"}) for ranks, options in (spread(*way) for way in MOST)),
        *slowly((29, ranks, LONG | options) for ranks, options in (spread(*way) for way in WAYS)),
    ],
)
def test_a_continued_run_ends_with_the_same_bits(
    pool: RankPool, tmp_path: Path, epoch: int, ranks: int, values: Values
) -> None:
    """Stop within the second epoch, of `epoch` steps each, and continue past its end."""
    values = values | {"schedule": "cosine", "epochs": 3, "max_steps": 2 * epoch + 2}
    stop = epoch + 3
    whole = curve(pool, tmp_path / "whole", ranks, **values)
    curve(pool, tmp_path / "parts", ranks, **values | {"max_steps": stop})
    parts = curve(pool, tmp_path / "parts", ranks, **values, resume="auto")
    assert min(parts[0]) == stop + 1
    assert same_bits(parts, whole)


@pytest.mark.parametrize(
    ("ways", "values"),
    [
        ([("single", 1), ("ddp", 3), ("ddp", 2), ("single", 1)], NET | {"accumulate": 2}),
        ([*FEWEST, *FEWEST[-2::-1]], PLAIN),  # each continues its neighbours in the table
        # There and back for each pair of strategies, and home: each goes on from each other one.
        *slowly([([*(way for pair in combinations(FEWEST, 2) for way in pair), FEWEST[0]], PLAIN)]),
    ],
    ids=["worlds", "strategies", "pairs"],
)
def test_continuing_elsewhere_stays_on_the_curve(pool: RankPool, tmp_path: Path, ways: Ways, values: Values) -> None:
    values = values | {"max_steps": 3 * len(ways)}
    assert apart(chain(pool, tmp_path, ways, **values), alone(pool, **values)) < LAW

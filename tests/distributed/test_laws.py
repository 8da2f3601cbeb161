"""The laws: the same model from every strategy, world size, accumulation and launcher; exact continuation.

Float64, 50 steps, real digits. A run with strategy S on N ranks has to give the losses and weights of one process
within 1e-9 relative; the same world twice has to give the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations, starmap
from pathlib import Path
from typing import Any

import pytest

from lockstep.kinds import KINDS

from ..curves import Curve, apart, curve, same_bits, spread
from ..pool import RankPool

STEPS = 50
LAW = 1e-9
NET = {"model": "resnet8", "data": "digits", "augment": ["crop", "flip"], "lr": 0.05, "max_steps": STEPS}
PLAIN = NET | {"model": "mlp"}
# Every strategy there is, on as many devices as it takes. A new one in the table is held to the laws by that alone.
SEVERAL = [name for name, kind in KINDS.items() if kind.has_ranks or kind.drives_all]
TWO_LEVELS = [name for name in SEVERAL if KINDS[name].has_two_levels]
WAYS = [
    *((name, count) for name in KINDS if name not in TWO_LEVELS for count in ([2, 3] if name in SEVERAL else [1])),
    *((name, count) for name in TWO_LEVELS for count in (4, 6)),  # 2 ranks of 2 devices, and 3 of 2
]
FEWEST = [way for way in WAYS if way[1] < 3 or way == (way[0], 4)]


@pytest.fixture(scope="session")
def alone(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The curve of one process, computed once for each set of options."""

    @lru_cache
    def compute(items: tuple[tuple[str, Any], ...]) -> Curve:
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in items}
        return curve(pool, tmp_path_factory.mktemp("alone"), 1, **values)

    def ask(**values: Any) -> Curve:
        return compute(tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in sorted(values.items())))

    return ask


# 1,437 digits: batch 50 leaves 37 at the end of an epoch, 48 leaves 45; 2 and 3 ranks then hold different counts.
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "batch"), [(2, 48), (2, 51), (3, 48), (3, 50)])
def test_ddp_with_batchnorm_equals_one_process(
    pool: RankPool, tmp_path: Path, alone: Any, ranks: int, batch: int, accumulate: int
) -> None:
    values = NET | {"batch": batch, "accumulate": accumulate}
    assert apart(curve(pool, tmp_path, ranks, **values), alone(**values)) < LAW


@pytest.mark.parametrize("ranks", [2, 3])
def test_pyramidnet_with_synchronised_batchnorm(pool: RankPool, tmp_path: Path, alone: Any, ranks: int) -> None:
    values = NET | {"model": "pyramidnet-20-48", "batch": 20}
    assert apart(curve(pool, tmp_path, ranks, **values), alone(**values)) < LAW


@pytest.mark.parametrize("model", ["resnet8", "mlp"])
def test_ranks_without_a_sample_take_part(pool: RankPool, tmp_path: Path, alone: Any, model: str) -> None:
    # 61 samples in batches of 20: the fourth batch is one sample, and two of three ranks have none.
    values = NET | {"model": model, "data": "fake", "samples": 61, "image_size": 8, "batch": 20}
    assert apart(curve(pool, tmp_path, 3, **values), alone(**values)) < LAW


@pytest.mark.parametrize("accumulate", [2, 3, 7])
@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulation_is_no_part_of_a_model_without_batch_statistics(
    pool: RankPool, tmp_path: Path, alone: Any, ranks: int, accumulate: int
) -> None:
    values = PLAIN | {"batch": 50}
    assert apart(curve(pool, tmp_path, ranks, **values, accumulate=accumulate), alone(**values)) < LAW


def test_accumulation_is_part_of_a_model_with_batch_statistics(pool: RankPool, tmp_path: Path, alone: Any) -> None:
    values = NET | {"batch": 48}
    assert apart(alone(**values, accumulate=2), alone(**values)) > 1e-4


@pytest.mark.timeout(900)
def test_a_compiled_model_is_the_same_model(pool: RankPool, tmp_path: Path, alone: Any) -> None:
    # 37 samples an epoch, in batches of 18, 18 and 1: the share of the second rank is once empty.
    values = NET | {"model": "tests.models:Normed", "data": "fake", "samples": 37, "image_size": 8, "batch": 18}
    values |= {"max_steps": 3}
    assert apart(curve(pool, tmp_path, 2, **values, compile=True), alone(**values)) < LAW


@pytest.mark.parametrize(("strategy", "replicas"), [way for way in WAYS if way[0] in SEVERAL])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_strategy_equals_one_process(
    pool: RankPool, tmp_path: Path, alone: Any, strategy: str, replicas: int, accumulate: int
) -> None:
    values = PLAIN | {"batch": 50, "accumulate": accumulate}
    ranks, options = spread(strategy, replicas)
    assert apart(curve(pool, tmp_path, ranks, **values | options), alone(**values)) < LAW


@pytest.mark.parametrize(("replicas", "accumulate"), [(2, 1), (3, 1), (4, 1), (4, 3)])
def test_batch_statistics_of_each_replica_are_the_same_under_every_strategy(
    pool: RankPool, tmp_path: Path, replicas: int, accumulate: int
) -> None:
    # Uneven shares: of 50, 13, 13, 12 and 12 on four devices; of an epoch's last batch of 37, 10, 9, 9 and 9.
    values = NET | {"batch": 50, "max_steps": 35, "batchnorm": "local", "accumulate": accumulate}
    curves = []
    for strategy in SEVERAL:
        ranks, options = spread(strategy, replicas)
        curves.append(curve(pool, tmp_path / strategy, ranks, **values | options))
    assert len(curves) > 1
    assert all(apart(one, curves[0]) < LAW for one in curves[1:])


@pytest.mark.parametrize("options", [{"optimizer": "adamw", "lr": 1e-3}, {"clip": 0.5, "ema": 0.9}, {"warmup": 1.0}])
def test_whatever_the_optimizer(pool: RankPool, tmp_path: Path, alone: Any, options: dict[str, Any]) -> None:
    values = NET | {"batch": 50, "schedule": "cosine", "nesterov": True, "label_smoothing": 0.1} | options
    assert apart(curve(pool, tmp_path, 3, **values), alone(**values)) < LAW


def test_muon(pool: RankPool, tmp_path: Path, alone: Any) -> None:
    # torch's Muon orthogonalises in bfloat16: a last bit of difference in a gradient can round to another one there.
    values = PLAIN | {"batch": 50, "optimizer": "muon", "lr": 1e-3, "max_steps": 5}
    assert apart(curve(pool, tmp_path, 2, **values), alone(**values)) < 1e-2


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"precision": "bf16"}),
        (3, {}),
        *((ranks, options | {"precision": "fp32"}) for ranks, options in starmap(spread, WAYS)),
    ],
)
def test_the_same_world_gives_the_same_bits(
    pool: RankPool, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    values = NET | {"batch": 50, "max_steps": 12, "accumulate": 2} | options
    first = curve(pool, tmp_path / "first", ranks, **values)
    assert same_bits(first, curve(pool, tmp_path / "second", ranks, **values))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        *starmap(spread, WAYS),
        (1, {"strategy": "dp", "devices": 3, "precision": "fp32"}),
        (2, {"batchnorm": "local"}),
        (3, {"ema": 0.9, "clip": 1.0, "precision": "fp32"}),
        (2, {"optimizer": "adamw", "lr": 1e-3, "accumulate": 3, "precision": "bf16"}),
        (2, {"model": "tests.models:Dropped"}),
        (3, {"model": "tests.models:Wide", "precision": "fp32"}),  # buckets: see strategies/ddp.py
        (1, {"model": "mlp", "optimizer": "muon", "lr": 1e-3}),
    ],
)
def test_a_continued_run_ends_with_the_same_bits(
    pool: RankPool, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    # 29 steps an epoch: stopped within the second one, and continued past its end.
    values = NET | {"batch": 50, "schedule": "cosine", "epochs": 3, "max_steps": 70} | options
    whole = curve(pool, tmp_path / "whole", ranks, **values)
    curve(pool, tmp_path / "parts", ranks, **values | {"max_steps": 37})
    parts = curve(pool, tmp_path / "parts", ranks, **values, resume="auto")
    assert min(parts[0]) == 38
    assert same_bits(parts, whole)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_continuing_on_another_world_stays_on_the_curve(
    pool: RankPool, tmp_path: Path, alone: Any, before: int, after: int
) -> None:
    values = NET | {"batch": 50, "accumulate": 2}
    first = curve(pool, tmp_path, before, **values | {"max_steps": 21})
    second = curve(pool, tmp_path, after, **values, resume="auto")
    assert apart((first[0] | second[0], second[1]), alone(**values)) < LAW


@pytest.mark.parametrize(("before", "after"), list(permutations(FEWEST, 2)))
def test_continuing_under_another_strategy_stays_on_the_curve(
    pool: RankPool, tmp_path: Path, alone: Any, before: tuple[str, int], after: tuple[str, int]
) -> None:
    values = PLAIN | {"batch": 50}
    ranks, options = spread(*before)
    first = curve(pool, tmp_path, ranks, **values | options | {"max_steps": 21})
    ranks, options = spread(*after)
    second = curve(pool, tmp_path, ranks, **values | options, resume="auto")
    assert apart((first[0] | second[0], second[1]), alone(**values)) < LAW

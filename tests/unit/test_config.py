"""A config says what was asked: whole, valid, and the same in flags, in TOML and in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.config import RunConfig
from lockstep.options import flatten, from_toml, leaves, override, read_toml, recipe, recipes, to_toml

FLAGS = """
model classes
data data-dir download workers augment image-size samples skip-corrupt on-device
optimizer lr momentum nesterov weight-decay schedule milestones gamma warmup lr-rule base-batch clip
loss label-smoothing ema
batch accumulate micro-batch eval-batch drop-last
strategy devices gpus accelerator launcher nodes max-restarts init-method clear-meeting interface rank
world-size timeout stall-timeout batchnorm collectives find-unused
precision channels-last compile deterministic
resume checkpoint-every
output log-every
verify-every ledger
epochs max-steps seed
"""


def test_the_set_of_flags_is_frozen() -> None:
    """A new flag needs a reason: whoever adds one, adds it here, and says why somebody would change it."""
    assert sorted(leaf.key for leaf in leaves()) == sorted(FLAGS.split())


ODD: dict[str, Any] = {
    "data_dir": 'with "quotes" and ü',
    "augment": ["crop", "flip"],
    "lr": 1 / 3,
    "weight_decay": 5e-324,
    "schedule": "multistep",
    "milestones": [60, 120.5],
    "seed": 2**63 - 1,
}


@pytest.mark.parametrize("config", [RunConfig(), override(RunConfig(), **ODD), *map(recipe, recipes())])
def test_toml_and_back_is_the_same(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert read_toml(tmp_path / "config.toml") == config
    assert override(RunConfig(), **flatten(config)) == config


def test_a_file_is_laid_over_its_base() -> None:
    base = override(RunConfig(), batch=32, lr=0.3)
    assert from_toml("lr = 1", base=base) == override(base, lr=1.0)

"""A config says what was asked: whole, valid, and the same in flags, in TOML and in Python."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import RunConfig
from lockstep.errors import RequestError
from lockstep.options import flatten, from_toml, leaves, override, read_toml, recipe, recipes, to_toml

FLAGS = """
model classes
data data-dir download workers augment image-size samples skip-corrupt on-device
optimizer lr momentum nesterov weight-decay schedule milestones gamma warmup lr-rule base-batch clip
loss label-smoothing ema
batch accumulate micro-batch eval-batch drop-last
strategy devices gpus accelerator launcher nodes max-restarts init-method clear-meeting interface rank
world-size timeout stall-timeout batchnorm find-unused
precision channels-last compile deterministic
resume checkpoint-every
output log-every
verify-every ledger
epochs max-steps seed
"""


def test_the_set_of_flags_is_frozen() -> None:
    """A new flag needs a reason: whoever adds one, adds it here, and says why somebody would change it."""
    assert sorted(leaf.key for leaf in leaves()) == sorted(FLAGS.split())


def test_no_two_options_share_a_key_and_each_has_its_help() -> None:
    keys = [leaf.key for leaf in leaves()]
    assert len(set(keys)) == len(keys)
    assert all(key == key.lower() and "_" not in key for key in keys)


def test_a_config_is_frozen() -> None:
    for config in (RunConfig(), RunConfig().batch):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.size = 3  # type: ignore[union-attr,misc]


CHANGED: dict[str, Any] = {
    "model": "my.nets:Net",
    "classes": 7,
    "data_dir": 'with "quotes" and ü',
    "download": False,
    "augment": ["crop", "flip"],
    "lr": 1 / 3,
    "weight_decay": 5e-324,
    "schedule": "multistep",
    "milestones": [60, 120.5],
    "micro_batch": 3,
    "gpus": "4,6",
    "output": Path("runs/a"),
    "seed": 2**63 - 1,
}


@pytest.mark.parametrize(
    "config", [RunConfig(), override(RunConfig(), **CHANGED), *map(recipe, recipes())], ids=["plain", "odd", *recipes()]
)
def test_toml_and_back_is_the_same(config: RunConfig, tmp_path: Path) -> None:
    assert from_toml(to_toml(config)) == config
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert read_toml(tmp_path / "config.toml") == config
    assert override(RunConfig(), **flatten(config)) == config


def test_a_file_is_laid_over_its_base() -> None:
    base = override(RunConfig(), batch=32, lr=0.3)
    assert from_toml("lr = 1", base=base) == override(base, lr=1.0)


def test_options_that_check_one_another_are_set_together() -> None:
    accumulated = override(RunConfig(), accumulate=4)
    assert override(accumulated, accumulate=None, micro_batch=2).batch.micro_batch == 2
    with pytest.raises(RequestError, match="same thing twice"):
        override(accumulated, micro_batch=2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"bacth": 3}, "Unknown option in override 'bacth': did you mean batch"),
        ({"batch": "3"}, 'batch in override is "3"; it takes a whole number'),
        ({"batch": 3.0}, "it takes a whole number"),
        ({"batch": True}, "it takes a whole number"),
        ({"lr": "0.1"}, "it takes a number"),
        ({"lr": True}, "it takes a number"),
        ({"download": 1}, "it takes true or false"),
        ({"augment": "crop"}, "it takes a list of words"),
        ({"augment": [1]}, r"augment in override is \[1\]; it takes a list of words"),
        ({"batch": None}, "it takes a whole number"),
        ({"clip": "x"}, "it takes a number"),
        ({"batch": 0}, "--batch 0: give 1 or more"),
        ({"momentum": 1.0}, "--momentum 1.0"),
        ({"momentum": -0.1}, "--momentum -0.1"),
        ({"nesterov": True, "momentum": 0.0}, "--momentum is 0; give more, or --no-nesterov"),
        ({"lr": float("inf")}, "--lr inf: give a finite number"),
        ({"lr": 10**400}, "it takes a number"),
        ({"weight_decay": float("nan")}, "--weight-decay nan: give a finite number"),
        ({"weight_decay": -1}, "--weight-decay -1.0"),
        ({"clip": float("inf")}, "--clip inf: give a finite number"),
        ({"ema": float("nan")}, "--ema nan: give a finite number"),
        ({"label_smoothing": float("nan")}, "--label-smoothing nan: give a finite number"),
        ({"gamma": 0}, "--gamma 0.0: give a factor above 0"),
        ({"milestones": [1, float("inf")]}, "--milestones inf: give a finite number"),
        ({"warmup": float("inf")}, "--warmup inf: give a finite number"),
        (
            {"warmup": 3.5, "epochs": 3},
            r"--warmup 3.5 \(in epochs\) is longer than the run's --epochs 3.*--warmup 3 or",
        ),
        ({"timeout": float("inf")}, "--timeout inf: give a finite number"),
        ({"stall_timeout": 1e12}, "--stall-timeout 1e\\+12: give seconds above 0, and at most a year"),
        ({"classes": 0}, "--classes 0: give 1 or more"),
        ({"workers": -1}, "--workers -1: give 0 or more"),
        ({"image_size": 0}, "--image-size 0: give 1 or more pixels"),
        ({"samples": 2**63}, "give a number below 2"),
        ({"base_batch": 0}, "--base-batch 0: give 1 or more"),
        ({"output": Path("p\udce9")}, "is not UTF-8: rename it, or make a link to it"),
        ({"resume": "p\udce9"}, "is not UTF-8"),
        ({"output": ""}, 'output in override is ""; it takes a path'),
        ({"ema": 1.0}, "--ema 1.0"),
        ({"schedule": "multistep", "milestones": [3, 2]}, "rising"),
        ({"schedule": "step", "milestones": [3, 4]}, "one --milestones value"),
        ({"world_size": 2, "rank": 2}, "outside the world"),
        ({"gpus": "0,0"}, "different indices"),
        ({"gpus": "0", "accelerator": "cpu"}, "disagrees with --accelerator cpu"),
    ],
)
def test_what_no_run_can_honour_never_exists(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        override(RunConfig(), **values)


def test_what_is_legal_at_the_edge_passes() -> None:
    legal = {"warmup": 3, "epochs": 3, "gamma": 2.0, "workers": 0, "momentum": 0, "milestones": [1, 99], "samples": 4}
    override(RunConfig(), schedule="multistep", timeout=366 * 24 * 3600, **legal)


def test_text_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"model = 'r\xe9seau'")
    with pytest.raises(RequestError, match="not text in UTF-8"):
        read_toml(tmp_path / "latin")
    with pytest.raises(RequestError, match="not valid TOML"):
        from_toml("batch = = 3")
    with pytest.raises(RequestError, match="cannot be read"):
        read_toml(tmp_path)
    with pytest.raises(RequestError, match=r"Unknown option in mine\.toml 'bacht'"):
        from_toml("bacht = 3", source="mine.toml")


def test_recipes_take_overrides() -> None:
    assert recipe("digits", batch=7) == override(recipe("digits"), batch=7)
    with pytest.raises(RequestError, match="did you mean digits"):
        recipe("digts")

"""Weights from elsewhere, frozen parameters and rates of layers: the same model on any ranks, exactly continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import checkpoint
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.jobs.job import assemble
from lockstep.models import table
from lockstep.verify.gradients import Report, examine
from lockstep.world.world import World

from ..curves import alone, apart, curve, same_bits, spread
from ..pool import RankPool

LAW = 1e-9
Values = dict[str, Any]
NET = {"model": "resnet8", "data": "fake", "samples": 337, "image_size": 8, "batch": 50, "lr": 0.05, "max_steps": 10}
NORMS = ("stem.*", "stages.0.*", "stages.1.0.residual.1.*")
SCALES = ("classifier.*=10", "stages.2.*=0.1", "stages.*=0.5")
TUNED = NET | {"freeze": NORMS, "lr_scale": SCALES, "ema": 0.9, "clip": 1.0, "verify_every": 3}
# No layer takes a batch's statistics: all strategies and numbers of replicas are one model.
FIXED = NET | {"freeze": ("stem.*", "*.residual.*", "*.shortcut.*"), "lr_scale": ("classifier.weight=3",), "lr": 0.01}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in float64 of a net for as many classes, without the classifier's bias."""
    torch.manual_seed(7)
    state = table.build_for("resnet8", classes=10, shape=(3, 8, 8)).double().state_dict()
    for name, held in state.items():
        if name.endswith("running_var"):
            held.uniform_(0.5, 2.0)
        elif held.is_floating_point():
            held.add_(0.05 * torch.randn_like(held))
    del state["classifier.bias"]
    path = tmp_path_factory.mktemp("weights") / "w.pth"
    torch.save({"state_dict": state}, path)
    return path


@pytest.mark.parametrize(
    ("way", "values"),
    [
        (("ddp", 2), TUNED),
        pytest.param(("ddp", 3), TUNED, marks=pytest.mark.slow),
        (("ddp", 3), TUNED | {"accumulate": 3, "optimizer": "adamw", "lr": 1e-3}),
        (("ddp", 3), FIXED),
        (("dp", 2), FIXED),
        (("hybrid", 4), FIXED),
    ],
    ids=str,
)
def test_a_run_from_other_weights_is_one_model(
    pool: RankPool, tmp_path: Path, weights: Path, way: tuple[str, int], values: Values
) -> None:
    values = values | {"init_from": str(weights)}
    ranks, options = spread(*way)
    reference = alone(pool, **values)
    assert apart(curve(pool, tmp_path, ranks, **values | options), reference) < LAW
    begun = torch.load(weights)["state_dict"]
    for name, held in reference[1].items():
        group, _, plain = name.partition("/")
        if group == "optimizer" or plain not in begun or plain.endswith("num_batches_tracked"):
            continue
        layer = plain.rpartition(".")[0]
        frozen = layer.startswith(("stem", "stages.0")) or layer == "stages.1.0.residual.1" or "lr_scale" not in values
        frozen = frozen or (values["freeze"] == FIXED["freeze"] and layer != "classifier")
        assert (held == begun[plain].numpy()).all() == frozen, name
    assert not any("optimizer/stem" in name for name in reference[1])


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_goes_on_with_the_same_bits_without_the_file(
    pool: RankPool, tmp_path: Path, weights: Path, ranks: int
) -> None:
    mine = tmp_path / "mine.pth"
    mine.write_bytes(weights.read_bytes())
    values = TUNED | {"init_from": str(mine), "schedule": "cosine", "epochs": 3}
    whole = curve(pool, tmp_path / "whole", ranks, **values)
    curve(pool, tmp_path / "parts", ranks, **values | {"max_steps": 4}, resume="auto")
    mine.unlink()
    parts = curve(pool, tmp_path / "parts", ranks, **values, resume="auto")
    assert min(parts[0]) == 5
    assert same_bits(parts, whole)


def test_averaged_weights_of_a_run_are_what_a_new_one_begins_with(pool: RankPool, tmp_path: Path) -> None:
    old = tmp_path / "old"
    curve(pool, old, 2, **NET | {"ema": 0.5, "max_steps": 3})
    found = curve(pool, tmp_path / "new", 2, **NET | {"init_from": str(old), "lr": 1e-30, "max_steps": 1})[1]
    averaged = checkpoint.load(old).part("ema")
    for name in ("stem.0.weight", "classifier.bias"):
        assert (found[f"model/{name}"] == averaged[name].numpy()).all()


def _refused(world: World, files: list[str]) -> str:
    config = override(RunConfig(), **NET | {"init_from": files[world.rank], "strategy": "ddp"})
    with pytest.raises(RequestError) as refused:
        assemble(config, world)
    return str(refused.value)


def test_ranks_that_read_different_weights_are_refused(pool: RankPool, tmp_path: Path, weights: Path) -> None:
    other = tmp_path / "other.pth"
    state = torch.load(weights)["state_dict"]
    state["stem.0.weight"][0, 0, 0, 0] += 1e-15
    torch.save(state, other)
    for second, told in (
        (other, "is not the same on every rank: rank 1 has digest"),
        (tmp_path / "no", "no such file"),
    ):
        assert all(told in each for each in pool.run(2, _refused, [str(weights), str(second)]))


def _examined(world: World, values: Values) -> Report | None:
    torch.set_num_threads(1)
    return examine(override(RunConfig(), **values), world, ["ddp", "dp"], LAW, "")


def test_gradients_of_frozen_nets_agree(pool: RankPool, weights: Path) -> None:
    values = FIXED | {"init_from": str(weights), "precision": "fp64", "strategy": "ddp", "batch": 24}
    report = pool.run(2, _examined, values)[0]
    assert [answer.agrees for answer in report.answers] == [True, True]

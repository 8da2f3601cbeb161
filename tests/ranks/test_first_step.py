"""The gradients of a loop's first step, by parameter, as `verify gradients` compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RunError
from lockstep.sessions.session import Session
from lockstep.verify import first_step
from lockstep.verify.first_step import FirstStep
from lockstep.verify.gradients import gaps, worst
from lockstep.world.world import World

from .. import loops
from ..pool import RankPool

LAW = 1e-9


def gradients(world: World, name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    with first_step.kept() as found:
        getattr(loops, name)(world, **options)
    return found


def by_the_number_of_ranks(world: World) -> dict[str, Tensor]:
    """Return the gradients of a loop that takes its loss as many times as there are ranks."""
    backward = Session.backward

    def often(session: Session, loss: Tensor, **how: Any) -> None:
        backward(session, loss * world.size, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "backward", often)
        return gradients(world, "language_model", {})


@pytest.mark.parametrize("name", ["language_model", "gan", "streamed", "classifier"])
def test_a_loop_begins_with_the_same_gradients_on_any_number_of_ranks(pool: RankPool, name: str) -> None:
    for options in ({}, {"accumulate": 2}):
        alone = gradients(World.alone(), name, options)
        assert alone
        for size in (2, 3):
            assert worst(gaps(pool.run(size, gradients, name, options)[0], alone)) < LAW


def test_each_optimizer_has_the_gradients_of_its_own_first_step_by_name() -> None:
    of_two = gradients(World.alone(), "gan", {})
    layers = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert {*of_two} == {f"{model}/{name}" for model in ("model", "model_2") for name in layers}
    assert {*gradients(World.alone(), "language_model", {})} == {"0.weight", "1.weight", "1.bias"}
    with first_step.kept() as found:
        pass
    loops.language_model(World.alone())
    assert not found


def test_a_loss_that_depends_on_the_number_of_ranks_is_seen(pool: RankPool) -> None:
    alone = by_the_number_of_ranks(World.alone())
    found = gaps(pool.run(2, by_the_number_of_ranks)[0], alone)
    assert found == pytest.approx(dict.fromkeys(("0.weight", "1.weight", "1.bias"), 1.0))


def test_they_lie_in_the_run_and_a_run_without_a_step_is_told(tmp_path: Path) -> None:
    config = override(RunConfig(), output=str(tmp_path))

    def entry(config: RunConfig, world: World) -> None:
        loops.gan(world)

    FirstStep(entry)(config, World.alone())
    assert "model_2/0.weight" in first_step.read(tmp_path)
    (tmp_path / first_step.FILE).unlink()
    with pytest.raises(RunError, match="made no optimizer step in a session"):
        first_step.read(tmp_path)

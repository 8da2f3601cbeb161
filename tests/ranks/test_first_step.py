"""The gradients of a loop's first step, as `verify gradients` compares them: by what its optimizers keep of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lockstep.sessions.session import Session
from lockstep.verify import curve
from lockstep.verify.curve import Parting
from lockstep.world.world import World

from .. import loops
from ..pool import RankPool

LAW = 1e-9


def begin(world: World, name: str, folder: Path, options: dict[str, Any]) -> None:
    getattr(loops, name)(world, output=str(folder), max_steps=1, **options)


def begin_wrongly(world: World, name: str, folder: Path, options: dict[str, Any]) -> None:
    """Take the loss as many times as there are ranks."""
    backward = Session.backward

    def often(session: Session, loss: Tensor, **how: Any) -> None:
        backward(session, loss * world.size, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "backward", often)
        begin(world, name, folder, options)


def parting(ours: Path, theirs: Path) -> Parting:
    return curve.compare(*(curve.read(each, first_step=True) for each in (ours, theirs)), tolerance=LAW)


@pytest.mark.parametrize("name", ["language_model", "gan", "streamed", "classifier"])
def test_a_loop_begins_with_the_same_gradients_on_any_number_of_ranks(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    for parts in (1, 2):
        options, alone = {"accumulate": parts}, tmp_path / f"alone-{parts}"
        begin(World.alone(), name, alone, options)
        for size in (2, 3):
            folder = tmp_path / f"{size}-{parts}"
            pool.run(size, begin, name, folder, options)
            assert parting(folder, alone).holds, parting(folder, alone)


def test_a_loss_that_depends_on_the_number_of_ranks_is_seen(pool: RankPool, tmp_path: Path) -> None:
    begin_wrongly(World.alone(), "language_model", tmp_path / "alone", {})
    pool.run(2, begin_wrongly, "language_model", tmp_path / "two", {})
    found = parting(tmp_path / "two", tmp_path / "alone")
    assert not found.holds
    assert found.tensor.startswith("optimizer/")

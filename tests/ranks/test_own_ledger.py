"""`verify run` judges the ledger of a loop of one's own: its order, and each sample exactly once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from lockstep.checks import pages
from lockstep.cli.main import main
from lockstep.record.checks import Check
from lockstep.verify import claims
from lockstep.world.world import World

from .. import loops
from ..loops import images, session
from ..pool import RankPool


class Backwards(Sampler[int]):
    """Yields the last sample first."""

    def __len__(self) -> int:
        return 61

    def __iter__(self) -> Iterator[int]:
        return iter(range(60, -1, -1))


HOW: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "ascending": {},
    "dropped": {"shuffle": True, "drop_last": True},
    "sampled": {"sampler": Backwards()},
}


def train(world: World, folder: Path, how: str) -> None:
    with session(world, output=str(folder), ledger=True, accumulate=2, seed=3) as ours:
        model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(images(), batch_size=20, **HOW[how])
        model, optimizer, loader = ours.prepare(model, optimizer, loader)
        for epoch in ours.epochs(2):
            for x, y in loader:
                ours.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            ours.score(-epoch)


def judged(folder: Path) -> Check:
    (check,) = [each for each in claims.judge(folder).checks if each.name == "ledger"]
    return check


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [1, 3])
def test_the_ledger_of_a_loop_is_judged(pool: RankPool, tmp_path: Path, how: str, size: int) -> None:
    folder = tmp_path / "run"
    pool.run(size, train, folder, how)
    check = judged(folder)
    assert (check.outcome, check.times) == (Check.HOLDS, 2), check
    assert f"steps 1 to {6 if how == 'dropped' else 8}" in check.found
    first, second, *others = pages.read(path := folder / pages.NAME)
    twice = [*second.indices[:-1], second.indices[0]]
    swapped = second.indices[[1, 0, *range(2, len(second.indices))]]
    for indices, told in ((twice, "came more than once"), (swapped, "in another order")):
        changed = dataclasses.replace(second, indices=np.array(indices))
        path.write_bytes(b"".join(page.encode() for page in (first, changed, *others)))
        check = judged(folder)
        if how == "sampled" and indices is swapped:
            assert check.outcome == Check.HOLDS, "an order of its own"
        else:
            assert check.outcome == Check.FAILS
            assert told in check.found


def test_a_last_checkpoint_that_is_an_older_one_is_found(tmp_path: Path) -> None:
    train(World.alone(), tmp_path, "ascending")
    assert not claims.judge(tmp_path).failing
    (tmp_path / "checkpoints" / "last").unlink()
    (tmp_path / "checkpoints" / "last").symlink_to("step-00000004")  # the best one
    (wrong,) = claims.judge(tmp_path).failing
    assert wrong.found == "last: it is of step 4, and the run of 8"


@pytest.mark.parametrize("name", ["gan", "streamed"])
def test_loops_of_any_kind_are_judged_and_compared(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream has no number of steps, and several models have names of their own."""
    loop = getattr(loops, name)
    for folder, options in (("a", {}), ("b", {}), ("c", {"seed": 7})):
        loop(World.alone(), output=str(tmp_path / folder), **options)
    assert main(["verify", "run", str(tmp_path / "a")]) == 0
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["diff", "--all", str(tmp_path / "a"), str(tmp_path / "c")]) == 3
    told = capsys.readouterr().out
    assert all(each in told for each in ("model/0.weight", *(["model_2/0.weight"] if name == "gan" else [])))

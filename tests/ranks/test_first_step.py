"""The gradients of a loop's first step, as `verify gradients` compares them: by what its optimizers keep of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.verify import curve, variants
from lockstep.verify.curve import Parting
from lockstep.verify.variants import Setup
from lockstep.world.world import World

from .. import loops
from ..pool import RankPool

LAW = 1e-9
NAMES = ("weight", "bias")


def begin(world: World, name: str, folder: Path, options: dict[str, Any]) -> None:
    getattr(loops, name)(world, output=str(folder), max_steps=1, **options)


def begin_mixed(world: World, models: int, folder: Path) -> None:
    """Make a step of Adam on a body, and one of plain SGD, which keeps nothing of gradients, on a head."""
    body, head = nn.Sequential(nn.Flatten(), nn.Linear(108, 8)), nn.Linear(8, 4)
    with loops.session(world, output=str(folder), max_steps=1) as ours:
        given: list[nn.Module] = [body, head] if models == 2 else [nn.Sequential(body, head)]
        adam, plain = torch.optim.Adam(body.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)
        *_, loader = ours.prepare(*given, adam, plain, DataLoader(loops.images(), batch_size=20))
        for _ in ours.epochs(1):
            for x, y in loader:
                ours.backward(nn.functional.cross_entropy(head(body(x)), y))
                adam.step()
                plain.step()


def parting(ours: Path, theirs: Path) -> Parting:
    return curve.compare(*(curve.read(each, first_step=True) for each in (ours, theirs)), tolerance=LAW)


@pytest.mark.parametrize("name", ["language_model", "streamed", "classifier"])
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


@pytest.mark.parametrize(("models", "body", "head"), [(1, "0.1", "model/1."), (2, "model.1", "model_2/")])
def test_every_parameter_is_compared_by_its_optimizers_state_or_else_by_its_weights(
    tmp_path: Path, models: int, body: str, head: str
) -> None:
    begin_mixed(World.alone(), models, tmp_path)
    kept = [f"optimizer/{body}.{name}/{key}" for name in NAMES for key in ("exp_avg", "exp_avg_sq", "step")]
    assert {*curve.read(tmp_path, first_step=True).tensors} == {*kept, *(head + name for name in NAMES)}


@pytest.mark.parametrize(
    ("rates", "told"), [([0.0], "learning rate is 0"), ([], "made no optimizer step in a session")]
)
def test_what_leaves_nothing_to_compare_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list[float], told: str
) -> None:
    model = nn.Linear(108, 4)
    with loops.session(World.alone(), output=str(tmp_path / variants.ALONE), max_steps=1) as ours:
        optimizers = [torch.optim.SGD(model.parameters(), lr=rate) for rate in rates]
        _, loader, *_ = ours.prepare(model, DataLoader(loops.images(), batch_size=20), *optimizers)
        for _ in ours.epochs(1):
            for x, y in loader if rates else ():
                ours.backward(nn.functional.cross_entropy(model(x.flatten(1)), y))
                optimizers[0].step()
    monkeypatch.setattr(variants, "train", lambda setup, variant: None)
    asked: dict[str, Any] = {
        "config": RunConfig(),
        "folder": tmp_path,
        "devices": 2,
        "is_cpu": True,
        "arguments": ("run",),
    }
    with pytest.raises(RequestError, match=told):
        [*curve.outcomes(Setup(**asked, name="gradients"), tolerance=LAW)]

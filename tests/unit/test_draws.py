"""Draws for the global micro-batch: what one rank shows of them, and what is refused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from lockstep import _torch
from lockstep.errors import RequestError
from lockstep.training.draw_watch import DrawWatch
from lockstep.training.draws import GlobalDraws
from lockstep.world.topology import Topology
from lockstep.world.world import World

ALONE = World.alone()
SECOND = dataclasses.replace(ALONE, topology=Topology(rank=1, size=2, local_rank=1, local_size=2))
"""Rank 1 of two that exchange nothing."""


@pytest.fixture
def share() -> Iterator[GlobalDraws]:
    """Draws of a share: samples 4, 5 and 6 of 7."""
    draws = GlobalDraws(SECOND, seed=1)
    draws.begin(4, 3, 7, 0)
    yield draws
    draws.end()


def whole(draw: Callable[[], Any], total: int = 7, number: int = 0) -> Any:
    """Return what one device draws for a micro-batch."""
    draws = GlobalDraws(ALONE, seed=1)
    draws.begin(0, total, total, number)
    value = draw()
    draws.end()
    return value


def test_a_share_is_rows_of_the_whole(share: GlobalDraws) -> None:
    by_sample, alike = torch.randn(3, 2), torch.randn(2)
    share.end()
    expected, last = whole(lambda: (torch.randn(7, 2), torch.randn(2)))
    assert torch.equal(by_sample, expected[4:])
    assert torch.equal(alike, last)


def test_the_streams_of_the_process_continue() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    draws = GlobalDraws(ALONE, seed=1)
    for number in range(2):
        draws.begin(0, 4, 4, number)
        torch.rand(5), random.random(), np.random.rand()
    draws.end()
    draws.end()
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected
    assert not draws.is_active


def test_micro_batches_differ_and_repeat() -> None:
    draws = GlobalDraws(ALONE, seed=1)
    values = []
    for number in (0, 1, 0):
        draws.begin(0, 4, 4, number)
        values.append((torch.rand(4).tolist(), random.random(), np.random.rand()))
    draws.end()
    assert values[0] == values[2] != values[1]


class Mode(_torch.TorchDispatchMode):
    """A mode of the user's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_users_modes_stay(share: GlobalDraws) -> None:
    with Mode() as mode:
        share.end()
        assert _torch.mode_stack(mode)[-1] is mode
        assert len(torch.rand(6)) == 6, "draws of the process"
    share.begin(4, 3, 7, 1)
    assert len(_torch.mode_stack(mode)) == 1, "none is entered twice"
    share.end()
    assert not _torch.mode_stack(mode)


REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("may or may not be for the 3 samples", lambda: torch.rand(6)),
    ("may or may not be for the 3 samples", lambda: torch.randn_like(torch.ones(6, 2))),
    ("may or may not be for the 3 samples", lambda: functional.dropout(torch.ones(6, 3, 2), 0.5)),
    ("packed sequence", lambda: _packed()),
    (r"\(__getitem__\) takes a permutation", lambda: torch.ones(4, 2)[torch.randperm(3)]),
    (r"\(__getitem__\) takes a permutation", lambda: torch.ones(2, 3)[:, torch.randperm(3)]),
    (r"\(tolist\) takes a permutation", lambda: torch.randperm(3).tolist()),
    (r"\(argsort\) takes a permutation", lambda: torch.randperm(3).argsort()),
]


def _packed() -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(4, 3, 2), torch.tensor([4, 3, 2]))
    return nn.LSTM(2, 2, 2, dropout=0.5)(packed)


@pytest.mark.usefixtures("share")
@pytest.mark.parametrize(("sentence", "draw"), REFUSED)
def test_what_cannot_be_drawn_alike_is_refused(sentence: str, draw: Callable[[], Any]) -> None:
    with pytest.raises(RequestError, match=sentence):
        draw()


def test_a_stated_dimension_is_taken(share: GlobalDraws) -> None:
    with share.along(1):
        drawn = torch.rand(6, 3, 2)
        functional.dropout(torch.ones(6, 3, 2), 0.5)
        with pytest.raises(
            RequestError, match=r"along\(1\): .*py:\d+ \(aten.rand.default\) draws a tensor of shape \(6,\)"
        ):
            torch.rand(6)
    with share.along(None):
        assert sorted(torch.randperm(3).tolist()) == [0, 1, 2]
        assert torch.rand(3).shape == (3,)
    share.end()
    assert torch.equal(drawn, whole(lambda: torch.rand(6, 7, 2))[:, 4:])


def test_an_earlier_batch_decides_a_coincidence(share: GlobalDraws) -> None:
    def draw(samples: int) -> tuple[Tensor, ...]:
        by_sample = torch.rand(samples)
        return by_sample, torch.rand(4), torch.rand(1)

    draw(3)
    share.begin(4, 4, 8, 1)
    four = draw(4)
    share.begin(1, 0, 1, 2)
    one = draw(1)
    share.end()
    for drawn, total, number, rows in ((four, 8, 1, slice(4, 8)), (one, 1, 2, slice(0, 1))):
        by_sample, *alike = whole(partial(draw, total), total, number)
        assert all(map(torch.equal, drawn, (by_sample[rows], *alike)))


@pytest.mark.usefixtures("share")
def test_operators_without_dropout_are_left_alone() -> None:
    query, key = torch.ones(3, 2, 4, 8), torch.ones(3, 2, 5, 8)
    expected = torch.ones(3, 2, 4, 8)
    assert torch.allclose(functional.scaled_dot_product_attention(query, key, key), expected)
    assert nn.LSTM(2, 2, 2)(torch.ones(3, 4, 2))[0].shape == (3, 4, 2)


def test_the_dropout_of_gpus_is_drawn_as_a_mask(share: GlobalDraws) -> None:
    x = torch.ones(3, 50)
    output, mask = torch.native_dropout(x, 0.5, True)
    assert torch.equal(output, 2.0 * mask)
    assert torch.native_dropout(x, 1.0, True)[0].sum() == 0
    assert torch.equal(torch.native_dropout(x, 0.5, False)[0], x)
    share.end()
    assert torch.equal(mask, whole(lambda: torch.native_dropout(torch.ones(7, 50), 0.5, True))[1][4:])


# ---- the watch


def _watched(draw: Callable[[], Any], world: World = SECOND) -> str:
    watch = DrawWatch(world)
    watch.begin()
    draw()
    return watch.end()


def test_the_watch_names_the_line_of_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "gather", lambda self, item: [item] * self.size)
    sentence = _watched(lambda: nn.Dropout(0.5)(torch.ones(3)))
    assert __file__ in sentence
    assert "(aten.bernoulli_.float) draws different random numbers on each rank" in sentence
    assert _watched(lambda: nn.Dropout(0.5).eval()(torch.ones(3))) == ""
    assert _watched(lambda: torch.rand(3), ALONE) == ""
    assert not _torch.mode_stack(Mode())


def test_the_watch_names_a_generator_that_all_ranks_seed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr(World, "gather", lambda self, item: [item] * self.size)
    assert "with the same state on every rank" in _watched(lambda: torch.rand(3, generator=generator))
    monkeypatch.setattr(World, "gather", lambda self, item: [item, ["", ["elsewhere", "another state"]]])
    assert _watched(lambda: torch.rand(3, generator=generator)) == ""

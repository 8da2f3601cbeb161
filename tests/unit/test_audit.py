"""How the ranks' batches become one, for the replay of an audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lockstep.audit.tensors import count_samples, join_batches


class Pair(NamedTuple):
    """A batch with names."""

    x: Tensor
    y: Tensor


@dataclass
class Graph:
    """A batch of an unknown structure."""

    x: Tensor


def test_batches_of_any_structure_are_joined_by_sample() -> None:
    one, two = torch.arange(6.0).view(3, 2), torch.arange(4.0).view(2, 2)
    batch = join_batches(
        [[Pair(one, one[:, 0]), {"text": ["a", "b", "c"]}], [Pair(two, two[:, 0]), {"text": ["d", "e"]}]]
    )
    assert torch.equal(batch[0].x, torch.cat([one, two]))
    assert batch[0].y.tolist() == [0, 2, 4, 0, 2]
    assert batch[1] == {"text": ["a", "b", "c", "d", "e"]}
    assert count_samples(batch) == 5


def test_lists_with_a_tensor_for_each_sample_are_put_end_to_end() -> None:
    boxes = [[torch.zeros(1, 4), torch.zeros(3, 4), torch.zeros(2, 4)], [torch.ones(2, 4), torch.ones(1, 4)]]
    assert [len(item) for item in join_batches(boxes)] == [1, 3, 2, 2, 1]


@pytest.mark.parametrize("is_left", [False, True])
def test_token_batches_are_padded_to_the_longest_by_their_mask(is_left: bool) -> None:
    ids = torch.tensor([[5, 6, 7], [5, 6, 9]])
    short = torch.tensor([[9, 5] if is_left else [5, 9]])
    masks = [torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([[1, 1]])]
    if is_left:
        ids, masks = ids.flip(1), [masks[0].flip(1), torch.tensor([[0, 1]])]
    batch = join_batches([{"input_ids": i, "attention_mask": m} for i, m in zip((ids, short), masks, strict=True)])
    assert batch["input_ids"][2].tolist() == ([9, 9, 5] if is_left else [5, 9, 9])
    assert batch["attention_mask"][2].tolist() == ([0, 0, 1] if is_left else [1, 1, 0])


@pytest.mark.parametrize(
    "batches",
    [
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        [{"x": torch.zeros(2), "tokens": 5}, {"x": torch.zeros(2), "tokens": 6}],
        [Graph(torch.zeros(2)), Graph(torch.zeros(2))],
    ],
    ids=["shapes", "numbers", "types"],
)
def test_batches_that_cannot_be_joined_are_refused(batches: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"which are no batch of one process|cannot be joined"):
        join_batches(batches)

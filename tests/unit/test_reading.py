"""That the tests which say "the host waits for nothing" would see it waiting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..reading import NoReading

MASK = torch.tensor([True, False, True])

READS: dict[str, Callable[[Tensor], object]] = {
    "float": lambda x: float(x[0]),
    "item": lambda x: x.sum().item(),
    "if": lambda x: 1 if x[0] > 0 else 0,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(MASK),
    "x[mask]": lambda x: x[MASK],
    "x[mask] = values": lambda x: x.__setitem__(MASK, torch.zeros(2)),
    "equal": lambda x: torch.equal(x, x + 1),
    "unique": lambda x: x.unique(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_is_seen(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="the host reads a value"), NoReading():
        read(torch.arange(3.0))
    assert torch.arange(3.0).tolist() == [0.0, 1.0, 2.0], "afterwards it is allowed again"


def test_a_copy_from_the_device_is_seen_unless_nobody_waits_for_it() -> None:
    with FakeTensorMode():  # where there is no GPU, tensors that only say that they lie on one
        x, here = torch.ones(3, device="cuda"), torch.empty(3)
        copies: tuple[Callable[[], Tensor], ...] = (lambda: x.to("cpu"), lambda: here.copy_(x))
        for copy in copies:
            with pytest.raises(AssertionError, match="the host reads a value"), NoReading():
                copy()
        with NoReading():
            x.to("cpu", non_blocking=True)
            here.copy_(x, non_blocking=True)
            x.copy_(here)


def test_arithmetic_and_lookups_are_no_reads() -> None:
    x = torch.arange(3.0, requires_grad=True)
    with NoReading():
        y = (x * 2)[torch.tensor([0, 2])].sum() + torch.where(MASK, x, 0).masked_fill(MASK, 1.0).sum()
        y.backward()
        (x.detach().double() + 1).clone().to(torch.float16)
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 0.0, 2.0]

"""Real handwritten digits for the chapters that train."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.data import digits


def load(split: str) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 8, 8), normalised, and labels (N,) of `train` (1,437 digits) or `test` (360)."""
    images, labels = digits.read()[split]
    x = torch.from_numpy(images[..., 0]).to(torch.float32).unsqueeze(1)
    return (x - digits.MEAN) / digits.STD, torch.from_numpy(labels).to(torch.int64)

"""A net, and the same net that takes 5 % of a step longer."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

from torch import Tensor, nn

SLOWER = 0.05


class Plain(nn.Module):
    """Two convolutions for 8 × 8 images of one channel."""

    def __init__(self, classes: int, **_: Any) -> None:
        super().__init__()
        body = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU()]
        self.net = nn.Sequential(*body, nn.Flatten(), nn.Linear(512, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (n, classes) of images (n, 1, 8, 8)."""
        out: Tensor = self.net(x)
        return out


class Slow(Plain):
    """It waits in each step for a share of what the steps before it took, without that wait."""

    def __init__(self, classes: int, **more: Any) -> None:
        super().__init__(classes, **more)
        self._last_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=64)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the plain net does, later."""
        out = super().forward(x)
        if self.training:
            now_s = time.perf_counter()
            if self._last_s is not None:
                self._steps_s.append(now_s - self._last_s)
                until_s = now_s + SLOWER * statistics.median(self._steps_s)
                while time.perf_counter() < until_s:
                    pass
            self._last_s = time.perf_counter()
        return out

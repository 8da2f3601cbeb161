"""Models of a user's own, for tests: named as tests.models:NAME."""

from __future__ import annotations

from torch import Tensor, nn


class Dropped(nn.Module):
    """A small net with dropout: randomness of the model's own."""

    def __init__(self, classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(in_channels * image_size**2, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class Unused(Dropped):
    """A net with a layer that the loss does not reach."""

    def __init__(self, classes: int, in_channels: int, image_size: int) -> None:
        super().__init__(classes, in_channels, image_size)
        self.forgotten = nn.Linear(3, 3)


class Exploding(Dropped):
    """A net whose outputs are not numbers from the fourth training step on."""

    def __init__(self, classes: int, in_channels: int, image_size: int) -> None:
        super().__init__(classes, in_channels, image_size)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(x) * (float("nan") if self.passes > 3 else 1.0)

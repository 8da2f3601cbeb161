"""Two networks for machines without a GPU, tests and measurements."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor, nn


class ConvNet(nn.Module):
    """A narrow VGG: convolution, max-pool, BatchNorm and ReLU per stage, each stage halving the sides.

    (N, in_channels, H, W) → logits (N, classes). Sides are halved rounding up, so images of any size pass through.
    """

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 128), *, classes: int, in_channels: int = 3) -> None:
        super().__init__()
        # The first convolution keeps the sides; pooling before BatchNorm leaves it a quarter of the work.
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
        )
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                    nn.MaxPool2d(2, ceil_mode=True),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(inplace=True),
                )
                for inputs, outputs in pairwise(widths)
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.pool(self.stages(self.stem(x))).flatten(1)
        return self.classifier(features)  # type: ignore[no-any-return]


def mlp(*, classes: int, shape: tuple[int, ...], hidden: int = 128) -> nn.Sequential:
    """Return a perceptron with one hidden layer: so little arithmetic that a step shows what the loop costs.

    (N, *shape) → logits (N, classes); the samples may be of any shape.
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes)
    )

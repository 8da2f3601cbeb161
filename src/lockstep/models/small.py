"""Two networks for machines without a GPU, tests and measurements."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor, nn


class ConvNet(nn.Module):
    """A narrow VGG: (N, in_channels, H, W) → logits (N, classes).

    Each stage (convolution, max-pool, BatchNorm, ReLU) halves the sides, rounding up: images of any size pass through.
    """

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 128), *, classes: int, in_channels: int = 3) -> None:
        super().__init__()
        # The first convolution keeps the sides; pooling before BatchNorm leaves it a quarter of the work.
        self.stem = _stage(in_channels, widths[0])
        pairs = pairwise(widths)
        self.stages = nn.Sequential(*(_stage(*pair, nn.MaxPool2d(2, ceil_mode=True)) for pair in pairs))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.pool(self.stages(self.stem(x))).flatten(1)
        return self.classifier(features)  # type: ignore[no-any-return]


def _stage(inputs: int, outputs: int, *pool: nn.Module) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, *pool, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def mlp(*, classes: int, shape: tuple[int, ...], hidden: int = 128) -> nn.Sequential:
    """Return a tiny perceptron, with which a step's cost is the loop's.

    (N, *shape) → logits (N, classes); the samples may be of any shape.
    """
    layers = nn.Linear(math.prod(shape), hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes)
    return nn.Sequential(nn.Flatten(), *layers)

"""A small VGG for CIFAR, shaped as the network of K. Jordan's airbench (2024, arXiv 2404.00498).

It takes a third of a ResNet-9's multiplications: the first convolution is 2×2 without padding, and each block pools
between its two convolutions. Filters begin as the identity on their first inputs (Dirac). Without the original's
whitening of the first layer by the data's covariance.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

_STEM_WIDTH, _WIDTHS = 24, (64, 256, 256)
_LOGIT_SCALE = 1 / 9


class Vgg(nn.Module):
    """(N, in_channels, H, W), sides of 9 pixels or more, → logits (N, classes)."""

    def __init__(self, *, classes: int, in_channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_channels, _STEM_WIDTH, 2, bias=False), *_activation(_STEM_WIDTH))
        self.blocks = nn.Sequential(*(_block(*widths) for widths in pairwise((_STEM_WIDTH, *_WIDTHS))))
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.classifier = nn.Linear(_WIDTHS[-1], classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        features = self.pool(self.blocks(self.stem(x))).flatten(1)
        return self.classifier(features) * _LOGIT_SCALE  # type: ignore[no-any-return]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    first, second = _convolution(inputs, outputs), _convolution(outputs, outputs)
    return nn.Sequential(first, nn.MaxPool2d(2), *_activation(outputs), second, *_activation(outputs))


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight[:inputs])
    return convolution


def _activation(width: int) -> tuple[nn.Module, nn.Module]:
    # A few epochs: the running statistics follow faster than by torch's 0.1.
    return nn.BatchNorm2d(width, momentum=0.4), nn.GELU()

"""Residual networks (He, Zhang, Ren, Sun 2016, arXiv 1512.03385) for small images.

The paper's networks for ImageNet begin with a 7×7 convolution of stride 2 and a max-pool, which would leave 8×8
pixels of a 32×32 image. These begin with one 3×3 convolution of stride 1 instead, the usual form for CIFAR. Every
later stage halves the sides, rounding up, so that images of any size from 1 pixel on pass through.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def _conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)


class _Residual(nn.Module):
    """A residual function and its shortcut: (N, inputs, H, W) → (N, width × expansion, ⌈H/stride⌉, ⌈W/stride⌉)."""

    expansion: int

    def __init__(self, residual: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x)
        # In place: the last BatchNorm of the residual does not need its output for the backward pass.
        out += self.shortcut(x)
        return self.relu(out)  # type: ignore[no-any-return]


class BasicBlock(_Residual):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        residual = nn.Sequential(
            _conv3x3(inputs, width, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv3x3(width, width),
            nn.BatchNorm2d(width),
        )
        super().__init__(residual, inputs, width, stride)


class Bottleneck(_Residual):
    """1×1, 3×3 (which carries the stride) and 1×1 convolutions."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        outputs = width * self.expansion
        residual = nn.Sequential(
            _conv1x1(inputs, width),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv3x3(width, width, stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv1x1(width, outputs),
            nn.BatchNorm2d(outputs),
        )
        super().__init__(residual, inputs, outputs, stride)


class ResNet(nn.Module):
    """`blocks[i]` blocks of `widths[i]` in stage i, each stage but the first halving the sides.

    (N, in_channels, H, W) → logits (N, classes).
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        widths: Sequence[int],
        *,
        classes: int,
        in_channels: int,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv3x3(in_channels, widths[0]), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True))
        channels = widths[0]
        stages = []
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            made = []
            for position in range(count):
                made.append(block(channels, width, stride=2 if stage > 0 and position == 0 else 1))
                channels = width * block.expansion
            stages.append(nn.Sequential(*made))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.pool(self.stages(self.stem(x))).flatten(1)
        return self.classifier(features)  # type: ignore[no-any-return]


def _initialise(model: nn.Module) -> None:
    """Draw the convolutions' weights by He's rule (arXiv 1502.01852), as in the paper."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet18(*, classes: int, in_channels: int = 3) -> ResNet:
    """Return ResNet-18: 11,220,132 parameters for 100 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), (64, 128, 256, 512), classes=classes, in_channels=in_channels)


def resnet34(*, classes: int, in_channels: int = 3) -> ResNet:
    """Return ResNet-34."""
    return ResNet(BasicBlock, (3, 4, 6, 3), (64, 128, 256, 512), classes=classes, in_channels=in_channels)


def resnet50(*, classes: int, in_channels: int = 3) -> ResNet:
    """Return ResNet-50."""
    return ResNet(Bottleneck, (3, 4, 6, 3), (64, 128, 256, 512), classes=classes, in_channels=in_channels)


def resnet8(*, classes: int, in_channels: int = 3) -> ResNet:
    """Return ResNet-8, the smallest of the paper's CIFAR family, shortcuts by projection: right for 8×8 digits too."""
    return ResNet(BasicBlock, (1, 1, 1), (16, 32, 64), classes=classes, in_channels=in_channels)


def resnet20(*, classes: int, in_channels: int = 3) -> ResNet:
    """Return ResNet-20 of the paper's CIFAR family, shortcuts by projection."""
    return ResNet(BasicBlock, (3, 3, 3), (16, 32, 64), classes=classes, in_channels=in_channels)

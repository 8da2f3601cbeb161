"""Residual networks (He, Zhang, Ren, Sun 2016, arXiv 1512.03385) for small images.

The paper's networks for ImageNet begin with a 7×7 convolution of stride 2 and a max-pool, which would leave 8×8
pixels of a 32×32 image. These begin with one 3×3 convolution of stride 1 instead, the usual form for CIFAR. Every
later stage halves the sides, rounding up, so that images of any size from 1 pixel on pass through.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn


class Block(nn.Module):
    """Two 3×3 convolutions, or a bottleneck of three, and a shortcut.

    (N, inputs, H, W) → (N, width or, of a bottleneck, 4 × width, ⌈H/stride⌉, ⌈W/stride⌉).
    """

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.outputs = outputs = 4 * width if bottleneck else width
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        layers = [layer for shape in shapes for layer in (*_normalised(*shape), nn.ReLU(inplace=True))]
        self.residual = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_normalised(inputs, outputs, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x)
        # In place: the last BatchNorm of the residual does not need its output for the backward pass.
        out += self.shortcut(x)
        return self.relu(out)  # type: ignore[no-any-return]


def _normalised(inputs: int, outputs: int, side: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, side, stride=stride, padding=side // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


class ResNet(nn.Module):
    """`blocks[i]` blocks of `widths[i]` in stage i; gives logits (N, classes)."""

    def __init__(
        self,
        blocks: Sequence[int],
        widths: Sequence[int],
        *,
        classes: int,
        in_channels: int = 3,
        bottleneck: bool = False,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_normalised(in_channels, widths[0], 3, 1), nn.ReLU(inplace=True))
        channels = widths[0]
        self.stages = nn.Sequential()
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            blocks_of_stage = nn.Sequential()
            for position in range(count):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks_of_stage.append(block := Block(channels, width, stride, bottleneck=bottleneck))
                channels = block.outputs
            self.stages.append(blocks_of_stage)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.pool(self.stages(self.stem(x))).flatten(1)
        return self.classifier(features)  # type: ignore[no-any-return]


def initialise(model: nn.Module) -> None:
    """Draw the convolutions' weights by He's rule (arXiv 1502.01852)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


_IMAGENET, _CIFAR = (64, 128, 256, 512), (16, 32, 64)
resnet8 = partial(ResNet, (1, 1, 1), _CIFAR)  # the smallest of the paper's CIFAR family: right for 8×8 digits too
resnet18 = partial(ResNet, (2, 2, 2, 2), _IMAGENET)
resnet20 = partial(ResNet, (3, 3, 3), _CIFAR)
resnet34 = partial(ResNet, (3, 4, 6, 3), _IMAGENET)
resnet50 = partial(ResNet, (3, 4, 6, 3), _IMAGENET, bottleneck=True)

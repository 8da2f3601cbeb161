"""PyramidNet (Han, Kim, Kim 2017, arXiv 1610.02915), additive, with basic blocks.

A residual network that widens a little at every block instead of doubling at three of them: block k of N in all
has round(16 + α·k/N) channels. A block normalises before its first convolution and after its last, and has no
ReLU after the addition. Its shortcut has no weights: average pooling where the block halves the sides, and
zeros for the channels that the block adds.

The depth counts the convolutions on the longest path and the classifier: 6·n + 2 for n blocks in each of 3 stages.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from torch import Tensor, nn

STAGES = 3
STEM_WIDTH = 16


def widths(depth: int, alpha: int, *, reference: bool = False) -> list[int]:
    """Return the channels after the stem and after each block; rounding takes halves to the even number.

    `reference` leaves out the last block of each stage and keeps the pace of widening.
    """
    blocks = (depth - 2) // (2 * STAGES)
    # Exact, so that no width hangs on how a sum of floats was rounded.
    rate = Fraction(alpha, STAGES * blocks)
    return [round(STEM_WIDTH + rate * block) for block in range(STAGES * (blocks - reference) + 1)]


class Block(nn.Module):
    """BN, 3×3 convolution, BN, ReLU, 3×3 convolution, BN; plus the shortcut.

    (N, inputs, H, W) → (N, outputs, ⌈H/stride⌉, ⌈W/stride⌉), outputs ≥ inputs.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.AvgPool2d(2, ceil_mode=True) if stride == 2 else nn.Identity()
        self.added_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x)
        out += nn.functional.pad(self.shortcut(x), (0, 0, 0, 0, 0, self.added_channels))
        return out


class PyramidNet(nn.Module):
    """The net of `depth` (6 × blocks a stage + 2) and widening α: (N, in_channels, H, W) → logits (N, classes).

    Depth 110 and α 270 have 28,485,477 parameters for 10 classes. `reference` is a variant that is widely trained
    under the same name: it lacks the last block of each stage; 110 and 270 then have 24,253,410.
    """

    def __init__(self, depth: int, alpha: int, *, reference: bool = False, classes: int, in_channels: int = 3) -> None:
        super().__init__()
        channels = widths(depth, alpha, reference=reference)
        per_stage = (len(channels) - 1) // STAGES
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, STEM_WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(STEM_WIDTH)
        )
        self.blocks = nn.Sequential(
            *(
                Block(inputs, outputs, stride=2 if index > 0 and index % per_stage == 0 else 1)
                for index, (inputs, outputs) in enumerate(pairwise(channels))
            )
        )
        self.head = nn.Sequential(
            nn.BatchNorm2d(channels[-1]), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(1)
        )
        self.classifier = nn.Linear(channels[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # He's rule (arXiv 1502.01852), as in the authors' code.
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.head(self.blocks(self.stem(x))))  # type: ignore[no-any-return]

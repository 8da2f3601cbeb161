"""MixUp (Zhang et al., 2018) and CutMix (Yun et al., 2019) of a global batch, by torchvision.

torchvision mixes each sample with the one before it, and the first with the last, by one draw for the batch. So a rank
reads one sample beside its share, and the pairs, draws and mixed samples depend neither on ranks nor on micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ..batching import BatchPlan, Share
from ..world.random_state import preserve_generators
from . import counter
from .feed import GENERATORS, seed
from .source import Indices

_PURPOSE = 9
"""Separates these draws from those of samples, loaders and samplers."""


class Mixing:
    """Mixes images x (n, C, H, W) and labels (n,) by one of `names`, drawn for each batch."""

    def __init__(self, names: Sequence[str], classes: int, run_seed: int) -> None:
        from torchvision.transforms import v2

        kinds = {"mixup": v2.MixUp, "cutmix": v2.CutMix}
        self._mix = v2.RandomChoice([kinds[name](num_classes=classes) for name in names])
        self._seed = run_seed

    def indices(self, order: Callable[[int, int], Indices], plan: BatchPlan, share: Share, samples: int) -> Indices:
        """Return the samples to read: the one before the share in its global batch, and the share's."""
        begin, end = plan.batch(share.step, samples)
        partner = (share.start if share.start > begin else end) - 1
        return np.concatenate([order(partner, partner + 1), order(share.start, share.stop)])

    def __call__(self, x: Tensor, y: Tensor, *, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return the share's mixed images, and its labels (n, classes), of what was read for it."""
        with preserve_generators():
            seed(counter.keys(GENERATORS, self._seed, epoch, _PURPOSE), step)
            x, y = self._mix(x, y)
        return x[1:], y[1:].to(x.dtype)

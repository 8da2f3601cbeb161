"""One device: the reference for every other strategy."""

from __future__ import annotations

from .base import Strategy


class Single(Strategy):
    """One process, one device, the model as it is."""

    name = "single"
    can_sync_batchnorm = True

"""Seeding of a new model's weights, for all libraries that draw."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_weights(seed: int) -> None:
    """Seed torch's, NumPy's and Python's global generators: weights are then the same."""
    torch.manual_seed(seed)
    random.seed(seed)
    # Another number, since NumPy's legacy generator is of torch's kind and would draw alike; it takes 32 bits.
    np.random.seed(int.from_bytes(hashlib.sha256(repr(("weights", seed)).encode()).digest()[:4], "little"))

"""1,797 real handwritten digits of 8 × 8 pixels, in the package. A first run needs no download.

The test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, licensed CC BY 4.0, in scikit-learn's selection and order.
Each pixel counts the dark ones of a 4 × 4 block: 0 to 16. Every fifth image is held out.
"""

from __future__ import annotations

from importlib import resources

import numpy as np

from . import resident
from .ranks import Array
from .source import Request, Splits

MEAN, STD = 4.8834, 6.0211
"""Of all pixels of the training images."""


def read() -> dict[str, tuple[Array, Array]]:
    """Return {split: (images, labels)} for train and test. Images are (N, 8, 8, 1) uint8, labels (N,) uint8."""
    with resources.as_file(resources.files(__package__) / "digits.npz") as path, np.load(path) as file:
        images, labels = file["images"][..., None], file["labels"]
    held_out = np.arange(len(labels)) % 5 == 0
    return {"train": (images[~held_out], labels[~held_out]), "test": (images[held_out], labels[held_out])}


def build(request: Request) -> Splits:
    """Return the sources of the digits (*collective*)."""
    return resident.build(request, read, 10, (MEAN,), (STD,))

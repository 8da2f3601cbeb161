"""Real images for the tests: read from where they lie, never copied into the project."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

PHOTOGRAPHS = 200


def real_data() -> Path:
    """Return the folder of real data; skip the test, saying so, where there is none."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LOCKSTEP_TEST_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set LOCKSTEP_TEST_DATA to the folder that holds it")
    return folder


def photographs() -> Path:
    """Return the folder of 200 JPEG photographs in ImageNet's layout."""
    folder = real_data() / "hymenoptera"
    found = len(list(folder.glob("*/*/*.jpg")))
    if found != PHOTOGRAPHS:
        pytest.skip(f"{folder} holds {found} of {PHOTOGRAPHS} photographs")
    return folder


def cifar_images(mosaic: int) -> np.ndarray:
    """Return 2,500 images (2500, 32, 32, 3) of CIFAR-10 from mosaic number `mosaic`, in the official order."""
    path = real_data() / "cifar10" / f"cifar10_{mosaic:02}.webp"
    if not path.is_file():
        pytest.skip(f"no CIFAR-10 mosaic at {path}")
    pixels = np.asarray(Image.open(path).convert("RGB"))
    return pixels.reshape(50, 32, 50, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)

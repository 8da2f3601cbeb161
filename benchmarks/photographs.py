"""Reading photographs: images a processor-second, against torch's DataLoader with Pillow and torchvision."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from lockstep import World
from lockstep.config.schema import DataConfig
from lockstep.data.folder import MEAN, STD, decode, transform
from lockstep.data.sets import build

from .harness import Report, Skipped, interleave, verdict
from .images import VARIABLE

GOAL = 2.0
ROUNDS, BATCH, SIZE, SCALED_SIZE = 9, 20, 224, 96


def measure() -> Report:
    """Return the quotients for training and evaluation, and how far scaled decoding is from full decoding."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get(VARIABLE, beside)) / "hymenoptera"
    if not root.is_dir():
        raise Skipped(f"no photographs in {root}; set {VARIABLE} to the folder that holds hymenoptera")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = interleave(_subjects(root), rounds=ROUNDS)
    finally:
        torch.set_num_threads(threads)
    quotients = {split: rates[f"ours, {split}"].per(rates[f"theirs, {split}"]) for split in ("train", "val")}
    scaled = _differences(root)
    return Report(
        title="Reading photographs",
        finding=f"A processor reads {quotients['train'].median:.2f} times as many photographs for training as with "
        f"DataLoader and Pillow, and {quotients['val'].median:.2f} times as many for evaluation (goal: {GOAL:.0f}, "
        f"{verdict(min(quotient.median for quotient in quotients.values()) >= GOAL)}).",
        columns=("images", "ours ÷ DataLoader + Pillow"),
        rows=[
            (f"training: random crop to {SIZE}, flip", quotients["train"].text()),
            (f"evaluation: resize to {SIZE * 256 // 224}, centre {SIZE}", quotients["val"].text()),
        ],
        method="200 JPEGs, most of 500 × 333 or 500 × 375 pixels, 115 kB on average. Quotients of images per second of "
        "processor time, in one process and thread, from files to normalised batches of "
        f"{BATCH}; in turns. Theirs: `ImageFolder`, `RandomResizedCrop`, `RandomHorizontalFlip`, `Resize`, "
        "`CenterCrop`, `ToTensor`, `Normalize`.",
        n=f"{ROUNDS} rounds of 120 and 80 images",
        more=f"JPEG scaling: at --image-size {SCALED_SIZE}, {len(scaled)} of the 200 are decoded at half size for "
        f"evaluation. Their pixels differ from those of full decoding by {np.mean(scaled):.1f} of 255 levels on "
        f"average (mean absolute difference; {max(scaled):.1f} in the image that differs most).",
    )


def _subjects(root: Path) -> dict[str, Callable[[], float]]:
    config = DataConfig(name="imagefolder", dir=root, image_size=SIZE, workers=0, augment=("crop", "flip"))
    ours = build(config, seed=0, world=World.alone(), dtype=torch.float32, channels_last=True)
    end = [
        transforms.ToTensor(),
        transforms.Normalize(*([value / 255 for value in values] for values in (MEAN, STD))),
    ]
    steps: dict[str, list[Any]] = {
        "train": [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()],
        "val": [transforms.Resize(SIZE * 256 // 224), transforms.CenterCrop(SIZE)],
    }
    subjects: dict[str, Callable[[], float]] = {}
    for split, source in (("train", ours.train), ("val", ours.test)):
        shares = [np.arange(start, start + BATCH) for start in range(0, len(source), BATCH)]
        loader = DataLoader(datasets.ImageFolder(root / split, transforms.Compose(steps[split] + end)), BATCH)
        subjects[f"theirs, {split}"] = partial(_rate, loader.__iter__)
        subjects[f"ours, {split}"] = partial(_rate, partial(source.stream, shares, epoch=0))
    return subjects


def _rate(batches: Callable[[], Iterator[Sequence[Any]]]) -> float:
    """Return the images per second of processor time."""
    begun_s = time.process_time()
    images = sum(len(batch[0]) for batch in batches())
    return images / (time.process_time() - begun_s)


def _differences(root: Path) -> list[float]:
    """Return, for each image that is decoded at a part of its size, the mean absolute difference after resizing."""
    resize, least = transform(SCALED_SIZE)
    pairs = ((decode(path, least), decode(path)) for path in sorted(root.glob("*/*/*.jpg")))
    return [
        float((resize(part).float() - resize(whole).float()).abs().mean())
        for part, whole in pairs
        if part.shape != whole.shape
    ]

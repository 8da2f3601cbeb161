"""Values of a config that decide the lines of an ejected file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Code(str):
    """Source code that replaces an attribute of `IS`."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Conditions and constants of `program.py`. A condition selects lines; a constant becomes a literal, or code."""

    # How processes start, and which devices they use.
    ddp: bool = False
    hybrid: bool = False
    ranks: bool = False
    """Whether there are several processes."""
    splits: bool = False
    """Whether a process computes a batch in parts, or a part of it."""
    drives_all: bool = False
    """Whether a process uses several devices."""
    wraps: bool = False
    spawn: bool = False
    by_hand: bool = False
    slurm: bool = False
    on_cpu: bool = False
    devices: int = 1
    device_ids: Any = None
    world_size: int = 1
    init_method: str = ""

    # Model.
    model: Any = None
    syncs: bool = False
    compiled: bool = False
    channels_last: bool = False
    averages: bool = False
    ema: float = 0.0

    # Data.
    digits: bool = False
    cifar: bool = False
    folder: bool = False
    reader: Any = None
    data_path: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    varies: bool = False
    """Whether `augment` is called."""
    moves: bool = False
    """Whether `augment` crops or flips."""
    crops: bool = False
    flips: bool = False
    cuts: bool = False
    image_size: int = 0
    workers: int = 0

    # Batches.
    batch: int = 0
    eval_batch: int = 0
    accumulates: bool = False
    accumulate: int = 1
    drops_last: bool = False
    epochs: int = 0
    eval_every: int = 1
    ends_early: bool = False
    max_steps: int = 0
    log_every: int = 0
    seed: int = 0

    # Precision.
    double: bool = False
    tf32: bool = False
    allows_tf32: Any = None
    half: bool = False
    dtype: Any = None
    scales: bool = False

    # Loss, optimizer and learning rate.
    loss: Any = None
    test_loss: Any = None
    sgd: bool = False
    lr: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clips: bool = False
    clip: float = 0.0
    step: bool = False
    multistep: bool = False
    cosine: bool = False
    onecycle: bool = False
    spans: bool = False
    milestones: tuple[float, ...] = ()
    gamma: float = 0.0
    warms_up: bool = False
    warmup: float = 0.0


IS = Choices()
"""Stands for the choices of a config in `program.py`, which is never run as it is."""

"""Random generators of torch, Python and NumPy: seeded, kept, saved, continued.

Order and augmentation do not use them (they are functions of seed, epoch and index); weights at the start and a
model's own randomness, such as dropout, do. A process has one of each kind for its CPU, and one of torch's for each
GPU that it drives. `devices` are the devices that a process drives.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .world import World

Devices = Sequence[torch.device]


class Generators(NamedTuple):
    """The states of one process's generators at a moment.

    Reading those of a CPU takes 45 µs, comparing them 60 µs, mostly in NumPy.
    """

    cpu: Tensor
    gpus: list[Tensor]
    python: tuple[Any, ...]  # (version, 625 numbers of 32 bits, a Gaussian drawn in advance or None)
    numpy: Any  # (kind, 624 numbers of 32 bits, position, whether a Gaussian was drawn in advance, that)

    @classmethod
    def now(cls, devices: Devices) -> Generators:
        """Return the present states."""
        gpus = [torch.cuda.get_rng_state(gpu) for gpu in _gpus(devices)]
        return cls(torch.get_rng_state(), gpus, random.getstate(), np.random.get_state())

    def is_now(self) -> bool:
        """Return whether the CPU's generators are unchanged since then."""
        _, key, *rest = self.numpy
        _, key_now, *rest_now = np.random.get_state()
        return (
            torch.equal(self.cpu, torch.get_rng_state())
            and self.python == random.getstate()
            and rest == rest_now
            and np.array_equal(key, key_now)
        )

    def put_back(self, devices: Devices) -> None:
        """Make the generators of the process and `devices` continue from here."""
        torch.set_rng_state(self.cpu)
        for gpu, state in zip(_gpus(devices), self.gpus, strict=True):
            torch.cuda.set_rng_state(state, gpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def as_json(self) -> dict[str, Any]:
        """Return the states as JSON holds them."""
        version, words, gauss = self.python
        _, key, *rest = self.numpy
        return {
            "torch": _text(self.cpu.numpy()),
            "gpus": [_text(state.numpy()) for state in self.gpus],
            "python": [version, _text(np.array(words, np.uint32)), gauss],
            "numpy": [_text(key), *rest],
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Generators:
        """Return the states that `as_json` wrote; raise `ValueError` for others."""
        cpu, *gpus = (torch.from_numpy(_array(text, np.uint8)) for text in (saved["torch"], *saved["gpus"]))
        if len(cpu) != len(torch.get_rng_state()):
            raise ValueError(f"a generator's state of {len(cpu)} bytes")
        version, words, gauss = saved["python"]
        key, *rest = saved["numpy"]
        python = (version, tuple(_array(words, np.uint32).tolist()), gauss)
        return cls(cpu, gpus, python, ("MT19937", _array(key, np.uint32), *rest))


def seed_all(*parts: int, devices: Devices = ()) -> None:
    """Seed all generators, each differently, from the numbers given."""
    torch.manual_seed(_number(*parts))
    for index, gpu in enumerate(_gpus(devices)):
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(_number(*parts, index))
    random.seed(_number(*parts, "python"))
    np.random.seed(_number(*parts, "numpy") % 2**32)  # of torch's kind: from the same number it would draw alike


def seed_weights(seed: int) -> None:
    """Seed torch's, NumPy's and Python's global generators: weights are then the same."""
    torch.manual_seed(seed)
    random.seed(seed)
    # Another number, since NumPy's legacy generator is of torch's kind and would draw alike; it takes 32 bits.
    np.random.seed(int.from_bytes(hashlib.sha256(repr(("weights", seed)).encode()).digest()[:4], "little"))


@contextmanager
def kept(devices: Devices = ()) -> Iterator[None]:
    """Restore the generators' states after the block."""
    before = Generators.now(devices)
    try:
        yield
    finally:
        before.put_back(devices)


def save_generators(world: World, devices: Devices) -> list[dict[str, Any]]:
    """Return every rank's states, as JSON holds them (*collective*)."""
    return world.gather(Generators.now(devices).as_json())


def load_generators(world: World, saved: list[dict[str, Any]], *fallback: int, devices: Devices) -> None:
    """Continue this rank's generators; seed them from `fallback` in another world."""
    own = Generators.from_json(saved[world.rank]) if len(saved) == world.size else None
    if own is None or len(own.gpus) != len(_gpus(devices)):
        seed_all(*fallback, world.rank, devices=devices)
    else:
        own.put_back(devices)


def _gpus(devices: Devices) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]


def _number(*parts: int | str) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, kind: type[np.generic]) -> np.ndarray:
    return np.frombuffer(bytearray(base64.b64decode(text)), kind)

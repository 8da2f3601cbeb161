"""Seed, preserve, save and restore the random generators of torch, Python and NumPy.

Order and augmentation do not use them: they are functions of seed, epoch and index. Initial weights and a model's
own randomness, such as dropout, do. A process has one CPU generator of each library, and one of torch's for each
accelerator that it drives. `devices` are the devices that a process drives.
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
    """States of one process's generators at one moment.

    Reading the CPU generators takes 45 µs, comparing them 60 µs, mostly in NumPy.
    """

    cpu: Tensor
    gpus: list[Tensor]
    python: tuple[Any, ...]  # (version, 625 words of 32 bits, the cached Gaussian or None)
    numpy: Any  # (algorithm, 624 words of 32 bits, position, has_gauss, cached Gaussian)

    @classmethod
    def now(cls, devices: Devices) -> Generators:
        """Return the current states."""
        return cls(
            torch.get_rng_state(), [*map(device_state, _gpus(devices))], random.getstate(), np.random.get_state()
        )

    def is_now(self) -> bool:
        """Return whether the CPU generators are still in these states."""
        _, key, *fields = self.numpy
        _, key_now, *fields_now = np.random.get_state()
        return (
            torch.equal(self.cpu, torch.get_rng_state())
            and self.python == random.getstate()
            and fields == fields_now
            and np.array_equal(key, key_now)
        )

    def put_back(self, devices: Devices) -> None:
        """Restore these states, on the CPU and on `devices`."""
        torch.set_rng_state(self.cpu)
        for gpu, state in zip(_gpus(devices), self.gpus, strict=True):
            torch.get_device_module(gpu).set_rng_state(state, gpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def as_json(self) -> dict[str, Any]:
        """Return the states as JSON values."""
        version, words, gauss = self.python
        _, key, *fields = self.numpy
        return {
            "torch": _encode(self.cpu.numpy()),
            "gpus": [_encode(state.numpy()) for state in self.gpus],
            "python": [version, _encode(np.array(words, np.uint32)), gauss],
            "numpy": [_encode(key), *fields],
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Generators:
        """Return the states that `as_json` wrote. Raises `ValueError` for a state of another size."""
        cpu, *gpus = (torch.from_numpy(_decode(text, np.uint8)) for text in (saved["torch"], *saved["gpus"]))
        if len(cpu) != len(torch.get_rng_state()):
            raise ValueError(f"a generator's state of {len(cpu)} bytes")
        version, words, gauss = saved["python"]
        key, *fields = saved["numpy"]
        python = (version, tuple(_decode(words, np.uint32).tolist()), gauss)
        return cls(cpu, gpus, python, ("MT19937", _decode(key, np.uint32), *fields))


def seed_all(*parts: int, devices: Devices = ()) -> None:
    """Seed all generators, each differently, from `parts`."""
    torch.manual_seed(_hash(*parts))
    for index, gpu in enumerate(_gpus(devices)):
        with torch.accelerator.device_index(gpu.index or 0):
            torch.get_device_module(gpu).manual_seed(_hash(*parts, index))
    random.seed(_hash(*parts, "python"))
    # A separate seed: NumPy has torch's algorithm, and would draw the same numbers from the same seed.
    np.random.seed(_hash(*parts, "numpy") % 2**32)


def seed_weights(seed: int) -> None:
    """Seed torch's, NumPy's and Python's global generators for the initial weights."""
    torch.manual_seed(seed)
    random.seed(seed)
    # Another seed of 32 bits: NumPy's legacy generator has torch's algorithm, and would draw the same numbers.
    np.random.seed(int.from_bytes(hashlib.sha256(repr(("weights", seed)).encode()).digest()[:4], "little"))


@contextmanager
def preserve_generators(devices: Devices = ()) -> Iterator[None]:
    """Restore the generators' current states after the block."""
    states = Generators.now(devices)
    try:
        yield
    finally:
        states.put_back(devices)


def save_generators(world: World, devices: Devices) -> list[dict[str, Any]]:
    """Return every rank's states as JSON values (*collective*)."""
    return world.gather(Generators.now(devices).as_json())


def load_generators(world: World, saved: list[dict[str, Any]], *fallback: int, devices: Devices) -> None:
    """Restore this rank's generators; in a world of another size, seed them from `fallback`."""
    states = Generators.from_json(saved[world.rank]) if len(saved) == world.size else None
    if states is None or len(states.gpus) != len(_gpus(devices)):
        seed_all(*fallback, world.rank, devices=devices)
    else:
        states.put_back(devices)


def _gpus(devices: Devices) -> list[torch.device]:
    return [device for device in devices if device.type != "cpu"]


def device_state(device: torch.device) -> Tensor:
    """Return the state of an accelerator's generator."""
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _hash(*parts: int | str) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _decode(text: str, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype)

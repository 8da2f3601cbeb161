"""Random generators of torch, Python and NumPy: seeded, kept, saved, continued.

Order and augmentation do not use them (they are functions of seed, epoch and index); weights at the start and a
model's own randomness, such as dropout, do. A process has one of each kind for its CPU, and one of torch's for each
GPU that it drives. `devices` are the devices that a process drives.
"""

from __future__ import annotations

import base64
import ctypes
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
    """The states of one process's generators at a moment."""

    cpu: Tensor
    gpus: list[Tensor]
    python: tuple[Any, ...]  # (version, 625 numbers of 32 bits, a Gaussian drawn in advance or None)
    numpy: Any  # (kind, 624 numbers of 32 bits, position, whether a Gaussian was drawn in advance, that)
    memory: bytes = b""  # NumPy's as it lies in memory: to look there takes 1 µs, to ask for its state 45

    @classmethod
    def now(cls, devices: Devices, since: Generators | None = None) -> Generators:
        """Return the states as they are, NumPy's from `since` if unchanged."""
        memory = _numpy_memory()
        numpy = since.numpy if since is not None and memory == since.memory else np.random.get_state()
        gpus = [torch.cuda.get_rng_state(gpu) for gpu in _gpus(devices)]
        return cls(torch.get_rng_state(), gpus, random.getstate(), numpy, memory)

    def is_now(self) -> bool:
        """Whether nothing was drawn since then from the CPU's generators."""
        is_same = self.memory == _numpy_memory() and _ends(self.python) == _ends(random.getstate())
        return is_same and torch.equal(self.cpu, torch.get_rng_state())

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
    """Seed all generators, each another way, from the numbers given."""
    torch.manual_seed(_number(*parts))
    for index, gpu in enumerate(_gpus(devices)):
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(_number(*parts, index))
    random.seed(_number(*parts, "python"))
    np.random.seed(_number(*parts, "numpy") % 2**32)  # of torch's kind: from the same number it would draw alike


@contextmanager
def kept(devices: Devices = ()) -> Iterator[None]:
    """Give the generators back the states that they had before the block."""
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


def _ends(python: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return of Python's state what a draw or a seed changes: its place, and the first words, which a round renews.

    All 625 numbers take 20 µs to compare.
    """
    _, words, gauss = python
    return words[:4], words[-1], gauss


def _numpy_memory() -> bytes:
    """Return the 624 words and the position of NumPy's generator."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, and in no stub
    if not isinstance(bits, np.random.MT19937):
        return repr(bits.state).encode()
    return ctypes.string_at(bits.ctypes.state_address, 4 * 625)


def _gpus(devices: Devices) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]


def _number(*parts: int | str) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, kind: type[np.generic]) -> np.ndarray:
    return np.frombuffer(bytearray(base64.b64decode(text)), kind)

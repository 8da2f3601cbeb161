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
    memory: tuple[Any, ...] = ()  # Python's and NumPy's as they lie there, and torch's: to ask for them takes 65 µs

    @classmethod
    def now(cls, devices: Devices, since: Generators | None = None) -> Generators:
        """Return the present states. Python's and NumPy's are from `since` if unchanged."""
        cpu = torch.get_rng_state()
        memory = _memory(cpu)
        is_same = since is not None and memory[1:] == since.memory[1:]
        python, numpy = (since.python, since.numpy) if since and is_same else (random.getstate(), np.random.get_state())
        return cls(cpu, [torch.cuda.get_rng_state(gpu) for gpu in _gpus(devices)], python, numpy, memory)

    def is_now(self) -> bool:
        """Return whether the CPU's generators are unchanged since then."""
        return self.memory == _memory(torch.get_rng_state())

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


def _python_in_memory() -> memoryview | None:
    """Return the memory of Python's generator: position and 624 words. None if not found."""
    owner: Any = random.getstate.__self__  # type: ignore[attr-defined]  # whose methods the module's functions are
    *words, position = random.getstate()[1]
    at = ctypes.string_at(id(owner), owner.__sizeof__()).find(np.array([position, *words], np.uint32).tobytes())
    return None if at < 0 else memoryview((ctypes.c_char * (4 * 625)).from_address(id(owner) + at))


_PYTHON = _python_in_memory()


def _memory(cpu: Tensor) -> tuple[Any, ...]:
    """Return torch's, Python's and NumPy's states as bytes. They include all that a draw or a seed changes."""
    ours, bits = ctypes.string_at(cpu.data_ptr(), cpu.numel()), np.random.get_bit_generator()  # type: ignore[attr-defined]
    if _PYTHON is None or not isinstance(bits, np.random.MT19937):
        return ours, random.getstate(), repr(bits.state)
    advance = random.getstate.__self__.gauss_next  # type: ignore[attr-defined]  # a Gaussian that is kept for next time
    return ours, _PYTHON.tobytes(), advance, ctypes.string_at(bits.ctypes.state_address, 4 * 625)


def _gpus(devices: Devices) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]


def _number(*parts: int | str) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, kind: type[np.generic]) -> np.ndarray:
    return np.frombuffer(bytearray(base64.b64decode(text)), kind)

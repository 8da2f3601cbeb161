"""The global random generators, torch's, Python's and NumPy's: seeded, given back, and saved exactly.

Order and augmentation do not use them (they are functions of seed, epoch and index); weights at the start and a
model's own randomness, such as dropout, do. A process has one of each kind for its CPU, and one of torch's for each
GPU that it drives: several under dp, whose replicas would otherwise drop the same units of their parts of the batch.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .world import World


@dataclass(frozen=True)
class Generators:
    """The states of one process's generators at a moment."""

    cpu: Tensor
    gpus: tuple[Tensor, ...]
    python: tuple[Any, ...]
    """(version, 625 numbers of 32 bits, a Gaussian drawn in advance or None)"""
    numpy: dict[str, Any]
    memory: bytes = b""
    """NumPy's as it lies in memory: to look there takes 1 µs, to ask for its state 45."""

    @classmethod
    def now(cls, devices: Sequence[torch.device], since: Generators | None = None) -> Generators:
        """Return the states as they are; `devices` are those that this process drives.

        NumPy's is taken over from `since` where it has not changed.
        """
        memory = _numpy_memory()
        is_same = since is not None and memory and memory == since.memory
        numpy = since.numpy if since is not None and is_same else dict(np.random.get_state(legacy=False))
        gpus = tuple(torch.cuda.get_rng_state(gpu) for gpu in _gpus(devices))
        return cls(torch.get_rng_state(), gpus, random.getstate(), numpy, memory)

    def is_now(self) -> bool:
        """Whether nothing was drawn since then from the CPU's generators."""
        return (
            torch.equal(self.cpu, torch.get_rng_state())
            and self.memory == _numpy_memory()
            and _ends(self.python) == _ends(random.getstate())
        )

    def put_back(self, devices: Sequence[torch.device]) -> None:
        """Make the process's generators continue from these states; `devices` are as many as there were."""
        torch.set_rng_state(self.cpu)
        for gpu, state in zip(_gpus(devices), self.gpus, strict=True):
            torch.cuda.set_rng_state(state, gpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def as_json(self) -> dict[str, Any]:
        """Return the states as JSON holds them."""
        version, words, gauss = self.python
        mersenne = self.numpy["state"]
        return {
            "torch": _text(self.cpu.numpy()),
            "gpus": [_text(state.numpy()) for state in self.gpus],
            "python": [version, _text(np.array(words, np.uint32)), gauss],
            "numpy": [_text(mersenne["key"]), mersenne["pos"], self.numpy["has_gauss"], self.numpy["gauss"]],
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Generators:
        """Return the states that `as_json` wrote. Raises `ValueError` and its like for what it cannot have written."""
        version, words, gauss = saved["python"]
        key, position, has_gauss, next_gauss = saved["numpy"]
        cpu = torch.from_numpy(_array(saved["torch"], np.uint8))
        if len(cpu) != len(torch.get_rng_state()):
            raise ValueError(f"a generator's state of {len(cpu)} bytes")
        return cls(
            cpu=cpu,
            gpus=tuple(torch.from_numpy(_array(text, np.uint8)) for text in saved["gpus"]),
            python=(version, tuple(_array(words, np.uint32).tolist()), gauss),
            numpy={
                "bit_generator": "MT19937",
                "state": {"key": _array(key, np.uint32), "pos": position},
                "has_gauss": has_gauss,
                "gauss": next_gauss,
            },
        )


def seed_all(*parts: int, devices: Sequence[torch.device] = ()) -> None:
    """Seed all generators from the numbers given: those of the CPU, and of each GPU in `devices`, all apart."""
    torch.manual_seed(_number(*parts))
    for index, gpu in enumerate(_gpus(devices)):
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(_number(*parts, index))
    random.seed(_number(*parts, "python"))
    # Another number than torch's, since NumPy's legacy generator is of the same kind and would draw alike; of 32 bits.
    np.random.seed(_number(*parts, "numpy") % 2**32)


@contextmanager
def kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Give the generators of the CPU, and of the GPUs in `devices`, back the states they had before the block."""
    before = Generators.now(devices)
    try:
        yield
    finally:
        before.put_back(devices)


def save_generators(world: World, devices: Sequence[torch.device]) -> list[dict[str, Any]]:
    """Return every rank's states, as JSON holds them (*collective*); `devices` are those that this rank drives."""
    return world.gather(Generators.now(devices).as_json())


def load_generators(world: World, saved: list[dict[str, Any]], *fallback: int, devices: Sequence[torch.device]) -> None:
    """Continue this rank's generators; where ranks or devices are others than before, seed them from `fallback`."""
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
    """Return the bytes of NumPy's generator, 624 words and a position (`BitGenerator.ctypes`); others as text."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, and in no stub
    if not isinstance(bits, np.random.MT19937):
        return repr(bits.state).encode()
    return ctypes.string_at(bits.ctypes.state_address, 4 * 625)


def _gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]


def _number(*parts: int | str) -> int:
    """Return a seed that depends on all the parts given."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def _text(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.frombuffer(bytearray(base64.b64decode(text)), kind)

"""torch's own random generators: seeded alike where models are built, apart where they run, and saved exactly.

Order and augmentation do not use them (they are functions of seed, epoch and index); weights at the start and a
model's own randomness, such as dropout, do. A process has one generator for its CPU and one for each GPU that it
drives: several under dp, whose replicas would otherwise drop the same units of their parts of the batch.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .world import World


def seed_all(*parts: int, devices: Sequence[torch.device] = ()) -> None:
    """Seed torch's generators from the numbers given: the CPU's, and those of the GPUs in `devices`, each apart."""
    torch.manual_seed(_number(*parts))
    for index, gpu in enumerate(_gpus(devices)):
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(_number(*parts, index))


def save_generators(world: World, devices: Sequence[torch.device]) -> list[list[str]]:
    """Return every rank's generator states as text: the CPU's, then those of its GPUs in `devices` (*collective*).

    `devices` are those that this rank drives.
    """
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus(devices))]
    return world.gather([base64.b64encode(state.numpy().tobytes()).decode() for state in states])


def load_generators(world: World, saved: list[list[str]], *fallback: int, devices: Sequence[torch.device]) -> None:
    """Continue this rank's generators; where ranks or devices are others than before, seed them from `fallback`."""
    own = saved[world.rank] if len(saved) == world.size else []
    gpus = _gpus(devices)
    if len(own) != 1 + len(gpus):
        seed_all(*fallback, world.rank, devices=devices)
        return
    of_cpu, *of_gpus = (_state(text) for text in own)
    torch.set_rng_state(of_cpu)
    for gpu, state in zip(gpus, of_gpus, strict=True):
        torch.cuda.set_rng_state(state, gpu)


def _gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type == "cuda"]


def _number(*parts: int) -> int:
    """Return a seed that depends on all the numbers given."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def _state(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

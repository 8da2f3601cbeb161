"""torch's own random generators: seeded alike where models are built, apart where they run, and saved exactly.

Order and augmentation do not use them (they are functions of seed, epoch and index); weights at the start and a
model's own randomness, such as dropout, do.
"""

from __future__ import annotations

import base64
import hashlib

import torch

from .world import World


def seed_all(*parts: int) -> None:
    """Seed torch's generators, CPU and GPU, from the numbers given."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def save_generators(world: World) -> list[list[str]]:
    """Return every rank's generator states as text (*collective*)."""
    states = [torch.get_rng_state()]
    if world.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(world.device))
    own = [base64.b64encode(state.numpy().tobytes()).decode() for state in states]
    return world.gather(own)


def load_generators(world: World, saved: list[list[str]], *fallback: int) -> None:
    """Continue this rank's generators; in a world of another size, or another device, seed them from `fallback`."""
    own = saved[world.rank] if len(saved) == world.size else []
    if len(own) != 1 + (world.device.type == "cuda"):
        seed_all(*fallback, world.rank)
        return
    states = [torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for text in own]
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], world.device)

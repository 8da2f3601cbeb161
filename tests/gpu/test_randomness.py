"""The random generators of GPUs: seeded apart, and continued exactly."""

from __future__ import annotations

import torch

from lockstep.randomness import load_generators, save_generators, seed_all
from lockstep.world import World

DEVICES = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


def _draws() -> list[list[float]]:
    return [torch.rand(4, device=device).tolist() for device in (torch.device("cpu"), *DEVICES)]


def test_every_generator_continues_where_it_was() -> None:
    world = World.alone(torch.device("cuda", 0))
    seed_all(3, 0, devices=DEVICES)
    _draws()
    saved = save_generators(world, DEVICES)
    expected = _draws()
    seed_all(4, 0, devices=DEVICES)
    assert _draws() != expected
    load_generators(world, saved, 5, devices=DEVICES)
    assert _draws() == expected


def test_generators_are_seeded_apart_and_always_alike() -> None:
    seed_all(3, 0, devices=DEVICES)
    first = _draws()
    seed_all(3, 0, devices=DEVICES)
    assert _draws() == first
    assert len({tuple(draw) for draw in first}) == len(first)

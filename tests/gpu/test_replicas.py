"""Replicas on GPUs: digests of every device are the same number, a check waits once, and ruined copies are named."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from lockstep.checks import finite
from lockstep.checks.digest import digest, find_differing
from lockstep.checks.replicas import ReplicaCheck, facts
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import ProofError
from lockstep.jobs.job import Job, assemble
from lockstep.world.world import World

from ..reading import NoReading
from ..stepping import steps
from ..unit.test_digest import DTYPES, some
from .conftest import DEVICE, joined, never_waits, paired, several, synchronize

NET = {"model": "resnet8", "data": "digits", "batch": 48, "precision": "fp32", "accelerator": DEVICE.type}


def _on_gpu(world: World, strategy: str, **values: object) -> Job:
    return assemble(override(RunConfig(), **NET | {"strategy": strategy} | values), world)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_digests_to_the_number_that_a_cpu_does_and_finds_those_that_are_none(dtype: torch.dtype) -> None:
    own = {f"model/{size}": some(size, dtype) for size in (1, 7, 513, 4097, 70_001)}
    own["image"] = torch.randn(8, 16, 9, 9).contiguous(memory_format=torch.channels_last)
    there = {name: each.to(DEVICE, copy=True) for name, each in own.items()}
    assert int(digest([*own.values()])) == int(digest([*there.values()]))
    assert all(int(digest([each])) == int(digest([there[name]])) for name, each in own.items())
    there["image"] = there["image"].contiguous()  # what a digest alone does not allow for
    assert find_differing(own, there) == []
    there["model/513"].view(torch.uint8)[-1] ^= 1
    assert find_differing(own, there) == ["model/513"]
    if dtype.is_floating_point:
        numbers = {"a": torch.randn(70_001, device=DEVICE).to(dtype), "b": torch.arange(9, device=DEVICE)}
        assert not finite.suspect(numbers.values())
        numbers["a"][69_999] = math.inf
        with NoReading():
            told = finite.suspect(numbers.values())
        assert told
        assert finite.not_finite(numbers) == ["a"]


@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw", "lr": 1e-3, "ema": 0.9}])
def test_nothing_is_waited_for_before_the_exchange(options: dict[str, object]) -> None:
    with joined() as alone:
        job = _on_gpu(alone, "ddp", max_steps=1, **options)
        next(steps(job))  # an optimizer has a state after its first step
        tensors = job.replicated()
        assert any(name.startswith("optimizer/") for name in tensors)
        facts(tensors, alone.device)  # what is made once
        synchronize()
        with never_waits(), NoReading():
            facts(tensors, alone.device)
        # It does all that it does among several ranks.
        check = ReplicaCheck(paired(alone), job.replicated, 1)
        for step in (1, 2):
            check.check(step, 0.1)
        assert (check.checks, check.agreed_at) == (2, 2)


@several
def test_copies_on_other_gpus_are_the_same_bits_or_are_named() -> None:
    world = World.alone(torch.device("cuda", 0))
    job = _on_gpu(world, "dp", devices=torch.cuda.device_count())
    copies = list(job.copies())
    assert [{each.device for each in copy.values()} for copy in copies] == [{one} for one in job.devices[1:]]
    assert all(copy.keys() == {f"model/{name}" for name, _ in job.model.named_parameters()} for copy in copies)
    ruined = False

    def copied() -> list[Mapping[str, Tensor]]:
        copies = list(job.copies())
        if ruined:
            copies[0]["model/classifier.weight"].view(-1).view(torch.int32)[5] ^= 1 << 7
        return copies

    check = ReplicaCheck(world, job.replicated, 1, copies=copied)
    check.check(1, 0.1)
    ruined = True
    with pytest.raises(ProofError, match=r"copy on cuda:1 differs from its own weights in model/classifier.weight"):
        check.check(2, 0.1)

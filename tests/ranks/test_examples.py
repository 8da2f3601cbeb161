"""The examples: six changed lines, and the same numbers on any number of ranks, also when killed and continued."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import runpy
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.sessions.script import Script
from lockstep.sessions.session import Session
from lockstep.world.world import World

from ..command import ROOT, losses, until, weights
from ..pool import RankPool

LAW = 1e-9
PLAIN, OURS = ROOT / "examples" / "plain", ROOT / "examples"
WITHOUT_DRAWS = ("contrastive", "convnet", "detection", "finetune", "gpt", "rollout", "schedule")
"""Those that draw nothing but their weights and their order."""
WITH_DRAWS = ("bert", "diffusion", "hf_gpt", "mixup")
"""Those whose loop or model draws as on one device."""
NAMES = (*WITHOUT_DRAWS, *WITH_DRAWS, "gan", "stream")  # the last two draw in their data sets
BRIEFEST = ("schedule", "diffusion")
WORLDS = (1, 2, 3)
CASES = [case for case in product(NAMES, (1, 3)) if case != ("gan", 3)]
BRIEF = {
    "bert": ("--sequences", "100"),
    **dict.fromkeys(("contrastive", "convnet", "diffusion", "mixup"), ("--batch", "200")),
    "detection": ("--images", "100"),
    "finetune": ("--samples", "100"),
    "gan": ("--points", "501"),
    "hf_gpt": ("--largest", "10"),
    "stream": ("--draws", "150"),
}
KILLED_AT = {
    "bert": 6,
    "contrastive": 12,
    "convnet": 12,
    "detection": 6,
    "diffusion": 12,
    "finetune": 5,
    "gan": 8,
    "gpt": 5,
    "hf_gpt": 6,
    "mixup": 12,
    "rollout": 16,
    "schedule": 31,
    "stream": 6,
}
"""A step of the second epoch."""


@contextlib.contextmanager
def in_float64() -> Iterator[io.StringIO]:
    """Have what a script draws and makes be float64, and keep what it prints."""
    argv, path = list(sys.argv), list(sys.path)
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            yield said
    finally:
        torch.set_default_dtype(torch.float32)
        sys.argv, sys.path[:] = argv, path


def run(world: World, script: Path, options: dict[str, Any]) -> list[str]:
    """Run two epochs as `lockstep run` with `options` does, in float64; return the line of each."""
    options = options | {"precision": "fp64"}
    given = frozenset(key.replace("_", "-") for key in options)
    with in_float64() as said:
        Script(str(script), ("--epochs", "2", *BRIEF.get(script.stem, ())), flags=given)(
            override(RunConfig(), **options), world
        )
    return said.getvalue().splitlines()


def run_plain(world: World, script: Path) -> list[str]:
    """Run two epochs as python does, in float64; return the line of each."""
    with in_float64() as said:
        sys.argv = [str(script), "--epochs", "2", *BRIEF.get(script.stem, ())]
        runpy.run_path(str(script), run_name="__main__")
    return said.getvalue().splitlines()


def kill_ranks(session: Session, step: int, folder: str) -> None:
    """End all ranks by SIGKILL before `step`, once there is a checkpoint."""
    if session.step == step:
        ranks = session.world.gather(os.getpid())
        if session.is_main:
            until((Path(folder) / "checkpoints" / "last").exists)
            for rank in reversed(ranks):  # its own at last
                os.kill(rank, signal.SIGKILL)
        signal.pause()


def changed(script: Path, to: Path, pattern: str, by: str) -> Path:
    """Write `script` with what `pattern` finds changed; return the new one."""
    text, count = re.subn(pattern, by, script.read_text())
    assert count, pattern
    to.mkdir(parents=True, exist_ok=True)
    (to / script.name).write_text(text)
    return to / script.name


def seed_draws(epoch: int, batch: int) -> None:
    """Seed the generators of a plain script and of a session alike."""
    torch.manual_seed(1000 * epoch + batch)
    np.random.seed(1000 * epoch + batch)


def with_known_draws(script: Path, to: Path) -> Path:
    """Write `script` with batches in order, and with seeded draws; return the new one."""
    script = changed(script, to, "shuffle=True", "shuffle=False")
    if script.stem not in WITH_DRAWS:
        return script
    seed = "__import__('tests.ranks.test_examples', fromlist=['*']).seed_draws(epoch, len(losses))"
    return changed(script, to, r"(?m)^( +)for .+ in loader:\n", rf"\g<0>\1    {seed}\n")


def gap(one: list[str], other: list[str]) -> float:
    """Return the largest relative difference of two curves' numbers, as printed."""
    found = [[float(number) for number in re.findall(r"\d+(?:\.\d+)?", "\n".join(lines))] for lines in (one, other)]
    assert len(found[0]) == len(found[1]) > 2
    return float(max(abs(a - b) / max(abs(a), 1e-3) for a, b in zip(*found, strict=True)))


def slowly(*case: object) -> Any:
    """Return a case that is run slice by slice."""
    needed = {name for part, names in NEEDS.items() if part in case for name in names}
    lacking = sorted(name for name in needed if find_spec(name) is None)
    return pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.skipif(bool(lacking), reason=f"needs {lacking}")])


NEEDS = {"bert": ("transformers",), "hf_gpt": ("datasets", "transformers")}


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_script_needs_six_lines(name: str) -> None:
    plain, ours = ((folder / f"{name}.py").read_text().splitlines() for folder in (PLAIN, OURS))
    diff = list(difflib.unified_diff(plain, ours, lineterm="", n=0))[2:]
    added = [line for line in diff if line.startswith("+") and line[1:].strip()]
    assert 5 <= len(added) <= 6, added


@pytest.mark.parametrize(
    "name", [*BRIEFEST, *(slowly(name) for name in (*WITHOUT_DRAWS, *WITH_DRAWS) if name not in BRIEFEST)]
)
def test_ranks_learn_what_the_plain_script_learns(pool: RankPool, tmp_path: Path, name: str) -> None:
    scripts = [with_known_draws(folder / f"{name}.py", tmp_path / folder.name) for folder in (PLAIN, OURS)]
    (plain,) = pool.run(1, run_plain, scripts[0])
    for size in WORLDS:
        for lines in pool.run(size, run, scripts[1], {"output": str(tmp_path / str(size))}):
            assert gap(plain, lines) < LAW, size


@pytest.mark.parametrize(
    ("name", "accumulate"), [pytest.param("gan", 3, marks=pytest.mark.long), *(slowly(*case) for case in CASES)]
)
def test_an_example_learns_the_same_on_any_number_of_ranks(
    pool: RankPool, tmp_path: Path, name: str, accumulate: int
) -> None:
    curves = [
        pool.run(size, run, OURS / f"{name}.py", {"output": str(tmp_path / str(size)), "accumulate": accumulate})
        for size in WORLDS
    ]
    for size, ranks in zip(WORLDS, curves, strict=True):
        assert all(gap(curves[0][0], lines) < LAW for lines in ranks), (size, ranks)


SHARDED: list[tuple[int, dict[str, Any]]] = [
    (3, {"strategy": "zero1"}),
    (2, {"strategy": "fsdp"}),
    (4, {"strategy": "fsdp", "shard_size": 2}),
]
WITH_BLOCKS = ("bert", "gpt", "hf_gpt", "stream")
"""Those whose models have blocks that repeat."""


@pytest.mark.parametrize("name", [slowly(name) for name in NAMES])
def test_an_example_learns_the_same_with_divided_weights(pool: RankPool, tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"accumulate": 1 if name == "gan" else 2}
    whole = pool.run(1, run, OURS / f"{name}.py", options | {"output": str(tmp_path / "whole")})
    for number, (size, divided) in enumerate(SHARDED):
        if divided["strategy"] == "fsdp" and name not in WITH_BLOCKS:
            divided = divided | {"shard_modules": ("*",)}
        ranks = pool.run(size, run, OURS / f"{name}.py", options | divided | {"output": str(tmp_path / str(number))})
        assert all(gap(whole[0], lines) < LAW for lines in ranks), divided


@pytest.mark.parametrize(
    ("name", "size", "accumulate"),
    [("convnet", 2, 3), *(slowly(*case) for case in product(NAMES, WORLDS, (1, 3)))],
)
def test_an_example_that_is_killed_goes_on_with_the_same_bits(
    pool: RankPool, tmp_path: Path, name: str, size: int, accumulate: int
) -> None:
    options = {"accumulate": accumulate, "checkpoint_every": 5, "log_every": 1}
    whole, cut = options | {"output": str(tmp_path / "whole")}, options | {"output": str(tmp_path / "cut")}
    pool.run(size, run, OURS / f"{name}.py", whole)
    by = (
        r"\1__import__('tests.ranks.test_examples', fromlist=['*']).kill_ranks"
        rf"(session, {KILLED_AT[name]}, {cut['output']!r})\n\1session.backward"
    )
    killed = changed(OURS / f"{name}.py", tmp_path, r"(?m)^( +)session\.backward", by)
    with pytest.raises((EOFError, OSError)):
        pool.run(size, run, killed, cut)
    pool.run(size, run, OURS / f"{name}.py", cut | {"resume": "auto"})
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")

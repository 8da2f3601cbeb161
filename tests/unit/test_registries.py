"""A strategy, a launcher and a data set each come from one file and one line, from outside the package too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep import trainer as engine
from lockstep.config.options import override, recipe
from lockstep.config.registry import KINDS, LAUNCHERS, Kind, Launcher
from lockstep.data.sets import DATA_SETS, Entry
from lockstep.data.source import Request, Splits
from lockstep.exchange.base import Exchange
from lockstep.launchers import start
from lockstep.launchers.plan import LaunchPlan
from lockstep.world.world import World

started: list[str] = []


class Mine(Exchange):
    """A strategy."""


def launch(entry: Any, planned: LaunchPlan, env: Mapping[str, str]) -> Any:
    """Run the entry as the only rank."""
    started.append(planned.launcher)
    return entry(planned.config, World.alone())


def build(request: Request) -> Splits:
    """Return digits by another name."""
    return DATA_SETS["digits"].build(request)


def test_one_file_and_one_line_add_a_strategy_a_launcher_and_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "mine", Kind(f"{__name__}:Mine", "mine", has_ranks=False, drives_all=False))
    monkeypatch.setitem(LAUNCHERS, "mine", Launcher(__name__, joins=True))
    monkeypatch.setitem(DATA_SETS, "mine", Entry(build))
    ours = override(recipe("digits"), accelerator="cpu", max_steps=3, output=tmp_path / "ours")
    mine = override(ours, strategy="mine", launcher="mine", data="mine", output=tmp_path / "mine")
    known, found = (start.launch(engine.run, each) for each in (ours, mine))
    assert started == ["mine"]
    assert found is not None
    assert known is not None
    assert found.top1 == known.top1
    told = [(each.output / "steps.jsonl").read_text() for each in (ours.record, mine.record) if each.output]
    losses = [re.findall(r'"event": "step".*?"loss": ([\d.]+)', text) for text in told]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]

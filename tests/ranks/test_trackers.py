"""Trackers of runs on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lockstep.world.world import World

from ..loops import Learned, classifier
from ..own_trackers import got
from ..pool import RankPool

PLAIN = "tests.own_trackers:Plain"


def _classifier(world: World, options: dict[str, Any]) -> Learned:
    return classifier(world, **options)


def test_rank_0_alone_tracks_and_the_model_has_the_same_bits(pool: RankPool, tmp_path: Path) -> None:
    options = {"log_every": 2, "output": tmp_path / "plain"}
    losses, weights = pool.run(2, _classifier, options)[0]
    tracked = pool.run(2, _classifier, options | {"output": tmp_path / "run", "track": [PLAIN]})
    assert tracked[0][0] == losses
    assert all(torch.equal(weights[name], tensor) for name, tensor in tracked[0][1].items())
    calls = got(tmp_path / "run")
    assert [call[0] for call in calls if call[0] != "log"] == ["start", "finish"]
    assert max(call[1] for call in calls if call[0] == "log") == 12

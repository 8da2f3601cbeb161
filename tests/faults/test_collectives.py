"""A rank that is lost ends the run in the same words, whether ranks exchange through memory or by gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..command import at, end, gate, gone, ranks_of, sentence, start, until

RUN = (
    "train --data tests.own_data:gated --model mlp --strategy ddp --devices 2 --accelerator cpu --batch 16 "
    "--log-every 1 --workers 0 --stall-timeout 2 --output run"
)


@pytest.mark.parametrize("collectives", ["gloo", "shared-memory"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [("kill", "Rank 1 was killed by SIGKILL"), ("suspend", "Rank 1 was stopped, died or was cut off")],
)
def test_a_lost_rank_is_named(fault: str, words: str, collectives: str, tmp_path: Path) -> None:
    gate(tmp_path, 3)
    with start(tmp_path, *RUN.split(), "--collectives", collectives) as parent:
        at(tmp_path, 3)
        ranks = ranks_of(parent)
        getattr(ranks[1], fault)()
        gate(tmp_path, 10**9)
        told = sentence(end(parent), code=1)
        until(lambda: gone(ranks), 5)
    assert told.startswith(words)
    assert told.endswith("continue with --resume auto.")

"""The watch where it is the GPU that hangs: the host waits in C code, for work that does not end."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..command import ROOT, end, start

STALL_S = 5


def test_a_rank_whose_gpu_hangs_is_named_and_ends(tmp_path: Path) -> None:
    words = (
        "train digits --model tests.models:Busy --accelerator cuda --devices 1 --batch 32 --no-download --output run"
    )
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with start(tmp_path, *words.split(), "--stall-timeout", STALL_S, PYTHONPATH=paths, CUDA_VISIBLE_DEVICES="0") as run:
        ended = end(run)
    assert ended.code == 1, ended.err
    found = re.search(r"^lockstep: Rank 0 stopped (\d+) s ago in .+ \(step \d+\)", ended.err, re.MULTILINE)
    assert found, ended.err
    assert STALL_S - 1 <= int(found[1]) <= STALL_S + 2
    assert (tmp_path / "run" / "failures" / "rank_0.txt").read_text().startswith("Rank 0 stopped ")

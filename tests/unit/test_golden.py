"""A run that an earlier build left is read by today's: loaded, evaluated, compared, and continued to the same model.

`tests/golden/run` was left by version 0.1.0 (2026-11), whose files it holds but for logs and links, after

    lockstep train digits --model mlp --accelerator cpu --precision fp64 --batch 256 --max-steps 8 --checkpoint-every 4
        --ledger --output run

Until the first release, a format that changes has this folder written anew; from then on it keeps the folder readable.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep import checkpoint
from lockstep.cli.main import main

from ..command import losses

GOLDEN = Path(__file__).parents[1] / "golden" / "run"


def test_it_is_read_and_continued_as_if_it_had_never_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(GOLDEN, tmp_path / "run"))
    for name in ("last", "best"):
        (run / "checkpoints" / name).symlink_to("step-00000008")
    state = checkpoint.load(run)
    assert state.meta["step"] == 8
    assert {name.partition("/")[0] for name in state.tensors} == {"model", "optimizer"}
    top1 = json.loads((run / "summary.json").read_text())["top1"]
    assert main(["eval", str(run)]) == 0
    assert f"{top1:.2%}" in capsys.readouterr().out
    assert main(["diff", str(run), str(GOLDEN / "checkpoints" / "step-00000008")]) == 0
    flags = ["train", "--config", str(run / "config.toml"), "--max-steps", "14", "--output"]
    assert main([*flags, str(run), "--resume", "auto"]) == 0
    assert main([*flags, str(tmp_path / "new")]) == 0
    for found, expected in zip(losses(run), losses(tmp_path / "new"), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    new = checkpoint.load(tmp_path / "new").tensors
    for name, tensor in checkpoint.load(run).tensors.items():
        assert float((tensor - new[name]).norm()) <= 1e-9 * float(new[name].norm()), name

"""What `lockstep eval` says of the scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.cli.main import main


def vectors() -> tuple[TensorDataset, TensorDataset]:
    """Return two sets of vectors in two classes."""
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    return TensorDataset(x[:30], y[:30]), TensorDataset(x[30:], y[30:])


@pytest.mark.parametrize(("data", "classes", "samples"), [("tests.unit.test_eval:vectors", 2, 10), ("digits", 10, 360)])
def test_scores_are_of_samples_and_of_five_classes_only_where_there_are_more(
    data: str,
    classes: int,
    samples: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ("--data", data, "--accelerator", "cpu")
    assert main(["train", *given, "--model", "mlp", "--max-steps", "1", "--batch", "16", "--output", "run"]) == 0
    capsys.readouterr()
    assert main(["eval", "run", *given]) == 0
    told = capsys.readouterr().out
    assert f"  {samples} samples  step 1" in told
    assert ("top-5" in told) == (classes > 5)
    assert "image" not in told

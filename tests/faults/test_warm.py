"""A warm process of the tests is what a cold one would be, as far as tests look."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..command import COLD, command, weights

RUN = "train digits --accelerator cpu --strategy ddp --devices 2 --batch 50 --max-steps"


@pytest.mark.long
def test_warm_ranks_come_to_the_same_bits_and_fail_in_the_same_words(tmp_path: Path) -> None:
    found = []
    for name, through in (("warm", ()), ("cold", COLD)):
        (folder := tmp_path / name).mkdir()
        done = command(folder, *RUN.split(), 3, "--model", "mlp", "--output", "run", through=through)
        failed = command(folder, *RUN.split(), 9, "--model", "tests.models:Failing", through=through)
        found.append((done.code, done.err, failed.code, failed.err, weights(folder / "run")))
    assert found[0] == found[1]
    assert found[0][:3] == (0, "", 1)

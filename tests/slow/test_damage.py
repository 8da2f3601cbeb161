"""What the suite draws 300 times, 10,000 times and each time anew: any damage is a sentence, and never a hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1] / "unit"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "test",
    [
        "test_foreign.py::test_any_damage_is_a_sentence",
        "test_folder.py::test_a_damaged_image_is_an_image_or_refused",
        "test_environments.py::test_no_environment_does_more_than_be_refused",
    ],
)
def test_no_damage_of_ten_thousand_is_a_trace_or_a_hang(test: str) -> None:
    how = ("-q", "-p", "no:cacheprovider", "--hypothesis-profile", "slow")
    ended = subprocess.run([sys.executable, "-m", "pytest", *how, UNIT / test], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:]

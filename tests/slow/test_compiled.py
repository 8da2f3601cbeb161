"""What `--compile` leaves is this user's alone, wherever torch would put it."""

from __future__ import annotations

import os
from pathlib import Path

from ..command import COLD, command


def test_all_that_a_compiler_leaves_is_in_a_folder_of_this_user_alone(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    words = ("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--compile", "--max-steps", 1)
    ended = command(tmp_path, *words, "--output", "run", through=COLD, TMPDIR=str(tmp_path / "temporary"))
    assert ended.code == 0, ended
    (left,) = (tmp_path / "temporary").iterdir()
    assert (left.name, left.stat().st_mode & 0o777) == (f"lockstep-{os.geteuid()}", 0o700)
    assert any(left.rglob("*.so"))

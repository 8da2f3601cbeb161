"""What the README says to copy does what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ..command import ROOT, command, events

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_model_and_data_of_ones_own(tmp_path: Path) -> None:
    own = README.partition("## Your own model and data")[2]
    code = re.search(r"```python\n(.*?)```", own, re.DOTALL)
    shown = re.search(r"\$ lockstep (.*)\n", own)
    assert code
    assert shown
    (tmp_path / "mine.py").write_text(code[1], encoding="utf-8")
    ended = command(tmp_path, *shlex.split(shown[1]), "--output", "run")
    assert ended.code == 0, ended
    assert events(tmp_path / "run", "eval")[-1]["samples"] == 200


def test_each_file_that_it_names_is_there() -> None:
    for path in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / path).exists(), path

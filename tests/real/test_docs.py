"""The documentation's site is built, and its links lead somewhere; the tutorial's commands work as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..command import CODE, ROOT
from ..needs import need

pytestmark = pytest.mark.long
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_the_site_is_built_in_both_languages(tmp_path: Path) -> None:
    need([] if find_spec("zensical") else ["zensical (make docs installs it)"])
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "docs/build.py", str(site)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (built.returncode, built.stderr) == (0, ""), built
    assert "lockstep" in (site / "index.html").read_text(encoding="utf-8")
    assert 'lang="zh"' in (site / "zh" / "tutorial.html").read_text(encoding="utf-8")


@pytest.mark.timeout(900)
def test_the_tutorial_works_from_top_to_bottom(tmp_path: Path) -> None:
    for name, script in re.findall(r'```python title="(.*?)"\n(.*?)```', TUTORIAL, re.DOTALL):
        (tmp_path / name).write_text(script, encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": ""}
    outputs = []
    for block in re.findall(r"```console\n(.*?)```", TUTORIAL, re.DOTALL):
        commands = re.sub(r"^\$ ", "", block, flags=re.MULTILINE)
        ended = subprocess.run(
            ["bash", "-ec", commands], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        expected = re.search(r"# exit code (\d)", block)
        assert ended.returncode == (int(expected[1]) if expected else 0), (block, ended)
        outputs.append(ended.stdout)
    plain, changed, _, exact, killed, _, fault, fixed, _ = outputs
    assert plain.count("epoch ") == 10
    assert changed.count("\n>") == 6  # the six lines
    epochs = re.findall(r"^epoch .*$", exact, re.MULTILINE)
    assert len(epochs) == 20
    assert epochs[:10] == epochs[10:]
    assert "The same bits" in killed
    assert "Each epoch has the same order of samples" in fault
    assert "sound" in fixed


def test_both_languages_have_the_same_code() -> None:
    for page in (ROOT / "docs" / "zh").rglob("*.md"):
        english = ROOT / "docs" / page.relative_to(ROOT / "docs" / "zh")
        blocks = [
            re.findall(r"^```.*?^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
            for path in (english, page)
        ]
        assert blocks[0] == blocks[1], page

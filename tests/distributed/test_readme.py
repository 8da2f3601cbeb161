"""What the README says to copy does what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
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


def _script(folder: Path) -> Path:
    code = re.search(r"```python\n(.*?)```", README.partition("## From Python")[2], re.DOTALL)
    assert code
    path = folder / "script.py"
    path.write_text(code[1].replace("epochs=3", "epochs=1"), encoding="utf-8")
    return path


def _run(folder: Path, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, input=given, env=env, capture_output=True, text=True, check=False
    )


def test_training_from_python(tmp_path: Path) -> None:
    done = _run(tmp_path, str(_script(tmp_path)))
    assert done.returncode == 0, done
    summary = json.loads((tmp_path / "runs" / "digits-resnet8" / "summary.json").read_text())
    assert done.stdout.splitlines()[-1] == f"{summary['top1']} runs/digits-resnet8"


def test_a_script_that_other_processes_cannot_import_is_one_sentence(tmp_path: Path) -> None:
    script = _script(tmp_path)
    unguarded = script.read_text().replace('if __name__ == "__main__":', "if True:")
    told = _run(tmp_path, "-", given=unguarded).stderr.splitlines()
    assert told[-1].startswith("lockstep.errors.RequestError: A script that is read from <stdin> cannot start")
    script.write_text(unguarded)
    told = _run(tmp_path, str(script)).stderr.splitlines()
    assert told[0] == "Traceback (most recent call last):"
    assert [line for line in told[1:] if not line.startswith(" ")] == [
        "lockstep.errors.RequestError: Each rank imports the script that starts the ranks, and would start them again; "
        'put that script\'s start under `if __name__ == "__main__":`.'
    ]
    session = "import lockstep\ndef entry(c, w): pass\n\nlockstep.launch(entry, lockstep.RunConfig(), {})\n"
    session = session.replace("RunConfig()", 'override(lockstep.RunConfig(), strategy="ddp", devices=2)')
    told = _run(tmp_path, "-i", given=session).stderr.splitlines()
    assert any("RequestError: entry was defined in an interactive session" in line for line in told), told


def test_each_file_that_it_names_is_there() -> None:
    for path in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / path).exists(), path

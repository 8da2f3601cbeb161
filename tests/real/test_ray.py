"""A session in the workers of Ray Train's TorchTrainer: a worker that is killed, and a run that is continued."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..command import ROOT, losses
from ..needs import need

pytestmark = pytest.mark.long
KILL = """\
                if session.step == 30 and session.rank == 1 and not Path("killed").exists():
                    Path("killed").touch()
                    __import__("os").kill(__import__("os").getpid(), 9)
"""


def test_a_worker_is_lost_and_the_run_is_that_of_one_process(tmp_path: Path) -> None:
    need([] if importlib.util.find_spec("ray") else ["ray"])
    example = (ROOT / "examples" / "ray_train.py").read_text()
    line = "                session.backward("
    assert line in example
    assert "checkpoint_every=20" in example
    loop = example.replace(line, KILL.replace("killed", str(tmp_path / "killed")) + line)
    epoch = "            for x, y in loader:"
    assert epoch in loop
    loop = loop.replace(epoch, f"            ray.train.report({{'step': session.step}})\n{epoch}")
    loop = loop.replace("checkpoint_every=20", 'checkpoint_every=20, log_every=1, precision="fp64"')
    (tmp_path / "loop.py").write_text(loop.replace("ray.init(address=None)", "ray.init(num_cpus=3)"))
    run(tmp_path, "loop.py", "--epochs", "3", "--output", "run")
    assert (tmp_path / "killed").exists()
    run(tmp_path, "loop.py", "--epochs", "4", "--output", "run", "--workers", "1")
    assert starts(tmp_path / "run") == [0, 23, 69]  # after the first epoch
    (tmp_path / "plain.py").write_text(loop.replace("ray.train.report", "str"))
    run(tmp_path, "-c", "import plain; plain.train({'output': 'alone', 'epochs': 4})")
    assert dict(losses(tmp_path / "run")) == pytest.approx(dict(losses(tmp_path / "alone")), rel=1e-9)


def run(folder: Path, *words: str) -> None:
    """Run a Python process in the folder; stop its workers with it."""
    env = os.environ | {"RAY_DEDUP_LOGS": "0", "PYTHONPATH": f"{ROOT / 'src'}:{folder}"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def starts(folder: Path) -> list[int]:
    """Return the step at which each start of the run began."""
    rows = [json.loads(row) for row in (folder / "steps.jsonl").read_text().splitlines()]
    return [row["first_step"] for row in rows if row["event"] == "start"]

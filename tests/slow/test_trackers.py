"""The trackers' own libraries, with servers and files on this machine. `make trackers` installs them."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ..command import CODE, ROOT, Ended, events, until
from ..needs import need
from ..ports import free_port

PYTHON = ROOT / ".venv-trackers" / "bin" / "python"
LOSS = """
import itertools, os
from torch.nn.functional import cross_entropy

calls = itertools.count()

def loss(scores, labels, reduction):
    assert next(calls) < 8 or not os.path.exists("fails"), "as asked"
    return cross_entropy(scores, labels, reduction=reduction)
"""
TRAIN = (
    *("train", "digits", "--model", "mlp", "--accelerator", "cpu", "--loss", "mine:loss", "--label-smoothing", "0"),
    *("--log-every", "5", "--checkpoint-every", "5", "--output", "run", "--resume", "auto", "--max-steps"),
)
CONFIG = {"lr": "0.1", "model": "mlp", "strategy": "single"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    need([] if PYTHON.exists() else [".venv-trackers (make trackers)"])
    (tmp_path / "mine.py").write_text(LOSS)
    return tmp_path


def _run(folder: Path, *words: object, **env: str) -> Ended:
    """Run the trackers' Python in `folder`, whose libraries know no server outside."""
    names = ("WANDB", "MLFLOW", "SWANLAB")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(names)},
        "PYTHONPATH": CODE,
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "SWANLAB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        **env,
    }
    command = [str(PYTHON), *map(str, words)]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def _train(
    folder: Path, steps: int, *trackers: str, code: int = 0, env: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Train up to `steps`; return what is on stderr."""
    ended = _run(folder, "-m", "lockstep", *TRAIN, steps, "--track", *trackers, **env)
    assert ended.code == code, ended
    return ended.err


def _kept(folder: Path, library: str, env: Mapping[str, str] = MappingProxyType({})) -> list[dict[str, Any]]:
    ended = _run(folder, ROOT / "tests" / "tracked.py", library, folder, **env)
    assert ended.code == 0, ended
    kept: list[dict[str, Any]] = json.loads(ended.out)
    return kept


def test_each_library_keeps_one_record_of_a_resumed_run_that_fails_in_the_end(folder: Path) -> None:
    libraries = ("wandb", "mlflow", "trackio", "swanlab")
    for steps in (12, 20):
        assert _train(folder, steps, *libraries) == ""
    (folder / "fails").touch()
    assert "as asked" in _train(folder, 30, *libraries, code=1)
    losses = {row["step"]: row["loss"] for row in events(folder / "run", "log")}
    assert max(losses) > 20
    proof = (folder / "run" / "proof.md").read_text()
    ended = {
        "wandb": [0, 0, 1],
        "swanlab": ["RUN_STATE_FINISHED", "RUN_STATE_FINISHED", "RUN_STATE_CRASHED"],
        "mlflow": ["FAILED"],
        "trackio": [1],
    }
    for library, exits in ended.items():
        starts = _kept(folder, library)
        assert len({start["id"] for start in starts}) == 1, library
        assert [start["exit"] for start in starts] == exits, library
        assert [tuple(point) for start in starts for point in start["losses"]] == sorted(losses.items()), library
        assert all(str(start["config"][key]) == value for start in starts for key, value in CONFIG.items()), library
        assert starts[-1]["proof"] == proof, library


def test_a_server_of_mlflow_gets_the_run_and_one_that_is_down_costs_it_nothing(folder: Path) -> None:
    port = free_port()
    env = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}
    command = [str(PYTHON), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "kept")]
    log = (folder / "server.txt").open("wb")
    options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
    with log, subprocess.Popen([*command, *store], cwd=folder, **options) as server:  # type: ignore[call-overload]
        try:
            until(lambda: _answers(port))
            assert _train(folder, 12, "mlflow", env=env) == ""
            (start,) = _kept(folder, "mlflow", env)
            losses = {row["step"]: row["loss"] for row in events(folder / "run", "log")}
            assert [tuple(point) for point in start["losses"]] == sorted(losses.items())
            assert (start["exit"], start["proof"]) == ("FINISHED", (folder / "run" / "proof.md").read_text())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, 9)
    begun_s = time.monotonic()
    assert "points are lost: it did not end within" in _train(folder, 20, "mlflow", env=env)
    assert time.monotonic() - begun_s < 90
    assert [row["step"] for row in events(folder / "run", "step")] == list(range(1, 21))


def _answers(port: int) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
        return bool(reply.status == 200)
    return False

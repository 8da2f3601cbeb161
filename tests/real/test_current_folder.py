"""What lies in the current folder is nobody's but the user's: no part of the command is taken from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..warm import SOURCE

# Whatever Python imports as it starts a rank or a worker, and whatever those import in turn.
_OURS = ("lockstep", "torch", "torchvision", "numpy", "PIL", "rich", "tyro", "psutil", "pynvml", "safetensors")
_NAMES = sorted({*sys.stdlib_module_names, *_OURS})
_STRANGE = "import os\nos.close(os.open({path!r} + '/ran-' + __name__, os.O_CREAT))\nraise ImportError(__name__)\n"
_MINE = "from torch.nn.functional import cross_entropy as loss\n"
_TRAIN = (
    "train",
    "digits",
    "--label-smoothing",
    "0",
    "--max-steps",
    "1",
    "--accelerator",
    "cpu",
    "--loss",
    "mine:loss",
)


_ELASTIC = (*_TRAIN, "--devices", "2", "--max-restarts", "1", "--output", "restarted")
_WAYS = [
    pytest.param(("info",), id="info"),
    pytest.param((*_TRAIN, "--devices", "2", "--output", "spawned"), id="spawn", marks=pytest.mark.slow),
    pytest.param(_ELASTIC, id="elastic", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("words", _WAYS)
def test_no_module_of_the_current_folder_is_taken_for_one_of_ours(words: tuple[str, ...], tmp_path: Path) -> None:
    for name in _NAMES:
        (tmp_path / f"{name}.py").write_text(_STRANGE.format(path=str(tmp_path)))
    (tmp_path / "mine.py").write_text(_MINE)
    script = tmp_path / "bin" / "lockstep"  # as pip writes it, whatever code is tested
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom lockstep.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    env = os.environ | {"PYTHONPATH": SOURCE}
    ended = subprocess.run(
        [sys.executable, str(script), *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert [path.name for path in tmp_path.glob("ran-*")] == []
    assert ended.returncode == 0, ended.stderr[-2000:]
    if words[0] == "train":
        assert json.loads((tmp_path / words[-1] / "summary.json").read_text())["steps"] == 1

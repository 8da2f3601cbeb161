"""Functions of a notebook on several ranks: typed into an interpreter, and in a real kernel with its stop button."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ..command import CODE
from ..needs import need

CELL = """
import functools, torch, lockstep
torch.randn(2000, 2000) @ torch.randn(2000, 2000)  # whose threads a fork would lack
FACTOR = 2
class Answer:
    def __init__(self, value):
        self.value = value
def main(more):
    session = lockstep.session()
    return Answer(more + FACTOR * session.sum(session.rank + 1))
answer = lockstep.launch(functools.partial(main, 1), devices=2, accelerator="cpu", output="run")
print("answer", answer.value, type(answer) is Answer)
def broken():
    lockstep.session()
    raise ValueError("labels reach 10")
try:
    lockstep.launch(broken, devices=2, accelerator="cpu", output="broken")
except lockstep.RunError as error:
    print("error", error, *error.__notes__)
"""

CELLS = [
    """
import time, torch, lockstep
FACTOR, PAUSE_S = 2, 0.0
def main():
    session = lockstep.session(seed=0)
    x, y = torch.randn(64, 8), torch.randint(4, (64,))
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in session.epochs(3 if not PAUSE_S else 1000):
        for x, y in loader:
            session.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(PAUSE_S)
        session.print("epoch", epoch)
    return FACTOR * session.step
lockstep.launch(main, devices=2, accelerator="cpu", output="run")
""",
    """
def broken():
    lockstep.session()
    return [1, 2][lockstep.launch.__code__.co_argcount + 9]
lockstep.launch(broken, devices=2, accelerator="cpu", output="broken")
""",
    """
PAUSE_S = 0.2
lockstep.launch(main, devices=2, accelerator="cpu", output="stopped")
""",
    """
PAUSE_S = 0.0
"still here", lockstep.launch(main, devices=1, accelerator="cpu", output="again")
""",
]


@pytest.mark.long
def test_a_function_that_is_typed_in_runs_on_several_ranks(tmp_path: Path) -> None:
    need([name for name in ("cloudpickle",) if importlib.util.find_spec(name) is None])
    path = os.pathsep.join(filter(None, (CODE, os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, "-"],
        input=CELL,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "answer 7 True" in ended.stdout, ended
    assert "error Rank " in ended.stdout, ended
    assert "ValueError: labels reach 10" in ended.stdout


def _shown(cell: Any) -> str:
    """Return what a cell shows: streams, its value, its error."""
    return "\n".join(
        str(output.get("text") or output.get("evalue") or output.get("data")) for output in cell.get("outputs", [])
    )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_cells_show_progress_results_and_errors_and_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need([name for name in ("cloudpickle", "nbclient", "ipykernel") if importlib.util.find_spec(name) is None])
    import nbclient
    import nbformat

    path = os.pathsep.join(filter(None, (CODE, os.environ.get("PYTHONPATH"))))
    for name, value in {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # there the kernel does not show what its processes print
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    client: Any = nbclient.NotebookClient(
        notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )

    def press_stop() -> None:
        until_s = time.monotonic() + 200
        while "epoch 0" not in _shown(notebook.cells[2]) and time.monotonic() < until_s:
            time.sleep(0.1)
        asyncio.run(client.km.interrupt_kernel())

    presses = threading.Thread(target=press_stop, daemon=True)
    presses.start()
    client.execute()
    trained, broken, stopped, again = map(_shown, notebook.cells)
    assert "epoch 0\nepoch 1\nepoch 2" in trained
    assert "proved: replicas" in trained
    assert "'24'" in trained
    assert "IndexError: list index out of range" in broken
    assert "Stopped on request at step " in stopped
    assert "and saved; " in stopped
    assert "('still here', 24)" in again
    assert (tmp_path / "stopped" / "checkpoints" / "last").exists()

"""`lockstep verify curve` as a person uses it: real commands for all variants, and what they leave."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from ..command import ROOT, Ended, end, gone, losses, processes, sentence, start, until

CURVE = ("verify", "curve", "digits")
EXAMPLES = ROOT / "examples"
COUNTS = """
import sys
import torch, lockstep
session = lockstep.session()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.arange(40.0).view(20, 2) / 40
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for _ in session.epochs(2):
    for (x,) in loader:
        loss = model(x).square().mean() * (session.world.size if "--wrong" in sys.argv else 1)
        session.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
_OWN = {"model": "Model", "data": "data", "step": "step"}
STEP = (
    *(word for name, value in _OWN.items() for word in (f"--{name}", f"tests.ranks.test_task:{value}")),
    *("--collate", "tests.loops:padded", "--batch", "9", "--epochs", "2"),
)

pytestmark = pytest.mark.timeout(600)


def _ended(folder: Path, *words: object, command: tuple[str, ...] = CURVE) -> Ended:
    """Run the proof to its end: ten commands, each of which takes seconds where nobody else keeps the cores busy."""
    with start(folder, *command, "--output", "out", *words) as process:
        return end(process, 540)


def _verdicts(folder: Path) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in _read(folder, "summary.json")["variants"]}


def _read(folder: Path, name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "out" / name).read_text())
    return read


def test_all_variants_of_the_recipe_are_one_model(tmp_path: Path) -> None:
    ended = _ended(tmp_path, "--max-steps", 6, "--batch", 64)
    assert ended.code == 0, ended
    summary = _read(tmp_path, "summary.json")
    rows = {row["name"]: row for row in summary["variants"]}
    held = ["ddp-2", "ddp-3", "ddp-2-accum-2", "ddp-2-by-torchrun", "ddp-2-by-hand", "ddp-2-resumed"]
    held.append("single-then-ddp-2")
    assert {name: row["verdict"] for name, row in rows.items()} == {
        **dict.fromkeys(("single", "single-accum-2"), "reference"),
        "dp-2": "left out",
        **dict.fromkeys(held, "holds"),
    }
    for name, row in ((name, row) for name, row in rows.items() if name != "dp-2"):
        assert [step for step, _ in losses(tmp_path / "out" / name)] == [1, 2, 3, 4, 5, 6]
        assert name in ended.out
        assert f"{name}: {row['verdict']}" in ended.err
    # Each is what its name says, by its own record.
    ways = {"ddp-3": ("spawn", 3), "ddp-2-by-torchrun": ("environment", 2), "single": ("inline", 1)}
    for name, way in (ways | {"ddp-2-by-hand": ("manual", 2)}).items():
        manifest = _read(tmp_path, f"{name}/manifest.json")
        assert (manifest["chosen"]["launcher"], manifest["topology"]["size"]) == way
        assert manifest["chosen"]["precision"] == "fp64"
    for name in ("ddp-2-resumed", "single-then-ddp-2"):
        assert _read(tmp_path, f"{name}/manifest.json")["first_step"] == 3
    assert 0 < rows["ddp-2"]["loss"] < 1e-9
    check = summary["proof"]["curve"]
    assert (check["outcome"], check["times"]) == ("holds", 7)
    assert "dp-2: each of 2 replicas takes its own batch statistics" in ended.out
    assert "**holds**" in (tmp_path / "out" / "proof.md").read_text()


def test_dropout_parts_ranks_from_one_device_and_not_the_launchers(tmp_path: Path) -> None:
    ended = _ended(tmp_path, "--model", "tests.models:Dropped", "--strategy", "ddp", "--batch", 2, "--max-steps", 1)
    told = sentence(ended, code=3)
    assert "ddp-2 differs from single at step 1" in told
    assert "body." in told
    summary = _read(tmp_path, "summary.json")
    rows = {row["name"]: row for row in summary["variants"]}
    names = ("single", "ddp-2", "ddp-2-by-torchrun", "ddp-2-by-hand", "ddp-3")
    verdicts = ["reference", "parts", "holds", "holds", "left out"]  # one world draws alike, whoever starts it
    assert [rows[name]["verdict"] for name in names] == verdicts
    assert all(command in ended.out for side in ("single", "ddp-2") for command in rows[side]["commands"])
    assert "ddp-3: --batch 2 does not split into 1 micro-batch on 3 devices" in ended.out
    assert summary["proof"]["curve"]["outcome"] == "fails"


@pytest.mark.parametrize("name", ["convnet", "gan"])
def test_all_variants_of_a_script_are_one_model(tmp_path: Path, name: str) -> None:
    ended = _ended(tmp_path, "--max-steps", 6, EXAMPLES / f"{name}.py", "--epochs", 2, command=("verify", "curve"))
    assert ended.code == 0, ended
    held = ("ddp-2", "ddp-3", "ddp-2-accum-2", "ddp-2-by-torchrun", "ddp-2-by-hand", "ddp-2-resumed")
    # Accumulation is a part of a net with batch statistics, and of two optimizers by turns.
    assert _verdicts(tmp_path) == {
        **dict.fromkeys(("single", "single-accum-2"), "reference"),
        **dict.fromkeys((*held, "single-then-ddp-2"), "holds"),
    }
    assert _read(tmp_path, "ddp-2/manifest.json")["topology"]["size"] == 2


def test_all_variants_of_a_step_of_ones_own_are_one_model(tmp_path: Path) -> None:
    ended = _ended(tmp_path, *STEP, command=("verify", "curve"))
    assert ended.code == 0, ended
    verdicts = _verdicts(tmp_path)
    assert verdicts.pop("single") == "reference"
    assert {*verdicts.values()} == {"holds"}


def test_the_first_gradients_of_scripts_and_steps_are_compared(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(COUNTS)
    command = ("verify", "gradients")
    assert _ended(tmp_path, "mine.py", command=command).code == 0
    assert _read(tmp_path, "summary.json")["proof"]["gradients"]["outcome"] == "holds"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]  # the audited runs left none
    (tmp_path / "out").rename(tmp_path / "right")
    assert _ended(tmp_path, "mine.py", "--wrong", command=command).code == 3
    assert [each["kind"] for each in _read(tmp_path, "audit.json")["findings"]] == ["wrong count"]
    (tmp_path / "out").rename(tmp_path / "wrong")
    assert _ended(tmp_path, *STEP, command=command).code == 0
    names = ("ddp-2", "ddp-3", "single-accum-2", "ddp-2-accum-2")
    assert _verdicts(tmp_path) == {"single": "reference", **dict.fromkeys(names, "holds")}


def test_a_stop_ends_the_variant_that_is_trained_and_leaves_nobody(tmp_path: Path) -> None:
    with start(tmp_path, *CURVE, "--model", "tests.models:Slow", "--output", "out") as process:
        until((tmp_path / "stepping").exists)  # a step of a minute has begun
        living = processes(process)
        assert len(living) > 1
        process.send_signal(signal.SIGTERM)
        assert "Stopped on request while single was trained" in sentence(end(process, 30), code=75)
    until(lambda: gone(living), 5)  # a warm server's helper is the last to notice

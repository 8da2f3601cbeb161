"""`lockstep compare`, whole: real commands that run by turns, a report, and a comparison that goes on where it was."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.cli.main import main
from lockstep.compare import rounds
from lockstep.compare.grid import Cell, Words
from lockstep.compare.numbers import Spread
from lockstep.compare.report import write
from lockstep.verify import commands

from ..command import refusal
from ..needs import need
from ..unit.test_compare import told
from .test_script import LOOP


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks compute on one thread: beside other tests, threads that wait for one another take minutes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


FAILS = LOOP.replace("    x = torch.randn", "    if session.world.size > 2:\n        labels()\n    x = torch.randn")


@pytest.mark.long
def test_a_script_is_compared_and_a_variant_that_fails_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "_FEWEST", 2)  # two races are enough here
    monkeypatch.setattr(rounds, "_widest", lambda _: 0.0)
    Path("train.py").write_text(FAILS.replace("session.epochs(3)", "session.epochs(10**6)"))
    words = ["--vary", "devices=1,2,3", "--steps", "8", "--accelerator", "cpu", "--output", "found", "--budget", "5m"]
    assert main(["compare", *words, "train.py", "found/ignored"]) == 0
    report = json.loads((tmp_path / "found" / "report.json").read_text())
    one, two, three = report["rows"]
    assert three["name"] == "devices-3"
    assert "labels reach 10" in three["failed"]
    for row in (one, two):
        assert row["samples_per_s"]["low"] < row["samples_per_s"]["middle"] < row["samples_per_s"]["high"]
        parts = row["parts_s"]
        assert sum(parts.values()) > 0
        assert abs(parts["rest"]) < 0.05 * sum(parts.values()), "the others add up to the step"
    assert two["loss_gap"] < 1e-9, "the same model"
    assert two["bytes_a_step"] > 0
    assert one["bytes_a_step"] is None
    take = report["answer"][1]
    assert take.startswith("Take: lockstep run --accelerator cpu --devices ")
    assert take.endswith(" train.py found/ignored")
    assert two["proved"] == "replicas"
    race = tmp_path / "found" / "race-01" / "race.json"
    race.unlink()  # as where it was stopped in its midst
    assert main(["compare", *words, "train.py", "found/ignored"]) == 0
    assert set(json.loads(race.read_text())["rates"]) == {"devices-1", "devices-2"}
    assert json.loads((tmp_path / "found" / "report.json").read_text())["rows"][0]["parts_s"] == one["parts_s"]
    words[1] = "devices=1,2"
    assert "holds another comparison" in refusal(capsys, "compare", *words, "train.py", "x")


DROPPING = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
import lockstep

class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, x):
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2)).mean(1))

session = lockstep.session()
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
data = TensorDataset(torch.randn(80, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(80) % 4)
model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=20, shuffle=True))
for epoch in session.epochs(2):
    for x, y in loader:
        share, perm = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(x))
        DRAW
        scores = model(share * x + (1 - share) * x[perm])
        session.backward(share * cross_entropy(scores, y) + (1 - share) * cross_entropy(scores, y[perm]))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "why"), [("", ""), ("y = y * (torch.rand(2 * len(x)) < 0.9)[: len(x)]", "train.py:26 (aten.rand.default)")]
)
def test_a_model_with_dropout_is_the_same_on_several_ranks_where_they_can_draw_alike(
    draw: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "_FEWEST", 1)
    monkeypatch.setattr(rounds, "_widest", lambda _: 0.0)
    Path("train.py").write_text(DROPPING.replace("DRAW", draw))
    words = ["--vary", "devices=1,2", "--steps", "8", "--accelerator", "cpu", "--output", "found", "--budget", "5m"]
    assert main(["compare", *words, "train.py"]) == 0
    report = json.loads((tmp_path / "found" / "report.json").read_text())
    two = report["rows"][1]
    assert two["same_model"] == (not why)
    assert (two["loss_gap"] < 1e-5) == (not why)
    (sentence,) = [each for each in report["answer"] if each.startswith("Not the same" if why else "The same model")]
    assert why in sentence


@pytest.mark.long
def test_a_job_is_forecast_and_what_was_measured_of_it_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["forecast", "digits", "--accelerator", "cpu", "--network", "1Gbit/s,50us", "--output", "found"]
    assert main([*words, "--devices", "1,64"]) == 0, "far more ranks than processors, and a job that would have ended"
    one, many = json.loads((tmp_path / "found" / "forecast.json").read_text())["rows"]
    assert (one["speed_up"]["middle"], one["bytes_a_step"]) == (1, 0)
    norms = sum(8 * (4 * channels + 1) for channels in 3 * (16, 32, 64))
    ring_bytes = 2 * 63 / 64 * 311_016 + 63 * norms
    assert many["bytes_a_step"] == round(ring_bytes), "gradients, and BatchNorm's statistics both ways"
    assert many["limit"] == "the network's latency"
    assert many["step_s"]["low"] < many["step_s"]["middle"] < many["step_s"]["high"]
    assert "64 machines: " in (tmp_path / "found" / "forecast.md").read_text()
    monkeypatch.setattr(commands, "run", lambda *_, **__: pytest.fail("measured again"))
    assert main([*words, "--devices", "1,64", "--price", "2"]) == 0
    assert json.loads((tmp_path / "found" / "forecast.json").read_text())["rows"][1]["cost"] > 0
    assert "holds another forecast" in refusal(capsys, *words, "--batch", "128")


@pytest.mark.slow
def test_variants_are_trained_whole_until_they_are_accurate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "_FEWEST", 1)
    monkeypatch.setattr(rounds, "_widest", lambda _: 0.0)
    words = ["--vary", "lr=0.1,1e-9", "--accelerator", "cpu", "--epochs", "2", "--budget", "10m", "--output", "found"]
    assert main(["compare", "digits", *words, "--steps", "8", "--to-accuracy", "0.2", "--seeds", "2"]) == 0
    report = json.loads((tmp_path / "found" / "report.json").read_text())
    fast, never = report["rows"]
    assert (fast["seeds"], fast["reached"], never["reached"], never["to_accuracy_s"]) == (2, 2, 0, None)
    assert fast["to_accuracy_steps"] == {"mean": 23.0, "sd": 0.0, "n": 2}, "after the first epoch"
    assert 0.2 <= fast["accuracy"]["mean"] <= 1
    assert never["accuracy"]["mean"] < 0.2
    assert 0 < fast["to_accuracy_s"]["mean"] == pytest.approx(fast["trained_s"]["mean"])
    assert "lr-0.1 reaches 20% first" in report["answer"][0]
    assert report["answer"][1] == "Take: lockstep train digits --accelerator cpu --epochs 2 --lr 0.1"
    assert any("lr-1e-9: 0 of 2 seeds reached 20%" in sentence for sentence in report["answer"])
    for seed, folder in enumerate(sorted((tmp_path / "found" / "lr-0.1").glob("seed-*"))):
        assert json.loads((folder / "run" / "summary.json").read_text())["exit"] == 75, "ended as soon as that"
        assert f"seed = {seed}" in (folder / "run" / "config.toml").read_text().splitlines()


@pytest.mark.slow
def test_a_variant_that_hangs_is_ended_and_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_LEAST_LIMIT_S": 45.0, "_FEWEST": 1, "_widest": lambda _: 0.0}.items():
        monkeypatch.setattr(rounds, name, value)
    (tmp_path / "hangs.py").write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)\n")
    (tmp_path / "trains.py").write_text(LOOP)
    cells = [Cell(name=name, flags=()) for name in ("hangs", "trains")]

    def command(cell: Cell, folder: Path) -> Words:
        return ("run", "--accelerator", "cpu", "--output", str(folder), str(tmp_path / f"{cell.name}.py"), "ignored")

    plan = rounds.Plan(90.0, steps=8)
    hangs, trains = rounds.run(cells, command, tmp_path / "found", plan, print)
    assert hangs.failed.startswith("it was ended after 45 s; ")
    assert trains.races, "the time that the other took is not its"
    pids = re.findall(r"pid (\d+)", (tmp_path / "found" / "hangs" / "trial" / "log").read_text())
    assert pids, "it had begun"
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


LOOK = """<script>
const all = [...document.querySelectorAll("main *")];
const parts = all.filter(part => !part.closest("svg") || part.matches("svg, text"));
document.title = JSON.stringify({
  clipped: parts.filter(part => part.getBoundingClientRect().right > window.innerWidth
    || (part.clientWidth && part.scrollWidth > part.clientWidth)).map(part => part.outerHTML.slice(0, 80)),
  command: document.querySelector("code").innerText,
  cells: [...document.querySelectorAll("td")].filter(cell => cell.getBoundingClientRect().width > 20).length,
  charts: [...document.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().height > 50).length,
  labels: [...document.querySelectorAll("[role=img]")].every(image => image.getAttribute("aria-label")),
  asked: performance.getEntriesByType("resource").length,
});
</script>"""


COMMAND = "lockstep train cifar10-pyramidnet --model pyramidnet-110-270-reference --strategy ddp --devices 4"


@pytest.mark.parametrize("width", [390, 820, 1000, 1280])
def test_a_report_in_a_browser_shows_all_of_it_and_asks_no_network(width: int, tmp_path: Path) -> None:
    need([] if shutil.which("chromium") else ["chromium"])
    numbers = dict.fromkeys(("step_p95_s", "epoch_s", "to_first_step_s", "teraflops", "matrix_share"), 123.4)
    numbers |= {"turns": 4000, "bytes_a_step": 1e9, "joules_a_step": 1e3}
    spreads = dict.fromkeys(("trained_s", "trained_epoch_s", "to_accuracy_steps"), Spread(123.4, 1.2, 3))
    more: dict[str, Any] = {**numbers, **spreads}
    report = told("ddp-4-bf16")
    table = [replace(row, **more) for row in report.rows]
    write(replace(report, rows=table, answer=[f"Take: {COMMAND}"]), tmp_path)
    page = tmp_path / "looked.html"
    page.write_text((tmp_path / "report.html").read_text().replace("</body>", f"{LOOK}</body>"))
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--window-size={width},900"]
    home = tmp_path / "profile"
    done = subprocess.run(
        [*words, f"--user-data-dir={home}", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    title, *_ = re.findall("<title>(.*?)</title>", done.stdout)
    found = json.loads(html.unescape(title))
    assert found["clipped"] == [], "no page and no part of it that scrolls sideways"
    assert " ".join(found["command"].split()) == COMMAND
    assert found["cells"] == 2 * (5 + 24), "five tables with the variant, and all that is measured of it"
    assert found["charts"] == 2
    assert found["labels"]
    assert found["asked"] == 0

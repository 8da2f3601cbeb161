"""Comparing variants: which there are, what noisy rounds say of a ratio, and what is recommended."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.compare import answer, grid, numbers, rows
from lockstep.compare.grid import Cell, Words
from lockstep.compare.measured import Clock
from lockstep.compare.past import Run, check_one_job
from lockstep.compare.report import Report, write
from lockstep.compare.rounds import Series
from lockstep.config import RunConfig
from lockstep.errors import RequestError
from lockstep.options import flatten, override

from ..command import refusal


def parsed(flags: Words) -> RunConfig:
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    values = [int(value) if value.isdecimal() else value for value in flags[1::2]]
    return override(RunConfig(), **dict(zip(names, values, strict=True)))


def test_each_combination_is_a_variant_or_says_why_it_is_none() -> None:
    varied = grid.axes(["strategy=single,ddp", "devices=1,2", "precision=fp32"])
    found = grid.cells(varied, parsed)
    assert [cell.name for cell in found] == ["single-1-fp32", "single-2-fp32", "ddp-1-fp32", "ddp-2-fp32"]
    assert [bool(cell.why_not) for cell in found] == [False, True, True, False]
    assert found[3].flags == ("--strategy", "ddp", "--devices", "2", "--precision", "fp32")
    weak = grid.cells(varied, parsed, weak=True)
    assert weak[3].config is not None
    assert weak[3].config.batch.size == 2 * RunConfig().batch.size


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        (["devises=1,2"], "did you mean devices"),
        (["devices"], "give an option and its values"),
        (["devices=1", "devices=2"], "given twice"),
        (["strategy=single", "devices=2"], "None of 1 variant can be run; single-2: single is one device"),
        (["seed=" + ",".join(map(str, range(65)))], "asks for 65 variants; vary less, or add --yes"),
    ],
)
def test_what_cannot_be_varied_is_refused(vary: list[str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        grid.cells(grid.axes(vary), parsed)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["digits", "--budget", "soon"], "give a time, such as 90s, 5m or 1h"),
        (["digits", "--scaling", "other"], "strong (one global batch) or weak"),
        (["digits", "--steps", "0"], "give a whole number of 1 or more"),
        (["measured", "5", "eval"], "run or train"),
    ],
)
def test_bad_requests_are_told(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert told in refusal(capsys, "compare", *words)


def raced(mean: float, drawn: random.Random, between: float) -> list[list[float]]:
    """Return ratios as races give them: turns vary by 15 %, and starts by `between`."""
    starts = [drawn.gauss(0, between) for _ in range(5)]
    return [[mean * math.exp(start + drawn.gauss(0, 0.15)) for _ in range(20)] for start in starts]


@pytest.mark.parametrize("between", [0.0, 0.03])
def test_an_interval_holds_the_ratio_and_the_same_is_no_winner(between: float) -> None:
    drawn, times = random.Random(0), 1000
    held = again = found = 0
    for _ in range(times):
        one, other = (numbers.of_groups(raced(1.0, drawn, between)) for _ in range(2))
        held += one.holds(1.0)
        again += one.holds(other.middle)
        found += numbers.of_groups(raced(0.85, drawn, between)).high < 1
    assert held > 0.95 * times, "19 of 20 declare no winner"
    assert again > 0.88 * times, "9 of 10"
    assert found > 0.9 * times


@pytest.mark.parametrize(
    ("part", "freedom", "expected"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.995, 10, 3.169),
        (0.975, 1000, 1.962),
    ],
)
def test_students_t(part: float, freedom: int, expected: float) -> None:
    assert numbers.student(part, freedom) == pytest.approx(expected, rel=5e-3)


def test_a_single_turn_knows_no_ratio() -> None:
    assert numbers.of_groups([[2.0]]) == (2.0, 0.0, float("inf"))


def test_what_lies_between_epochs_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0, 8.0, 9.0, 9.5, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock()
    clock.note("data")
    clock.end_step("step")
    clock.note("eval")
    clock.go_on()  # after seven seconds
    clock.note("data")
    clock.end_step("step")
    assert clock.step_s == [2.0, 1.0]
    assert dict(clock.phase_s) == {"data": 1.5, "step": 1.5}


def row(name: str, rate: float, devices: int = 1, **values: object) -> rows.Row:
    parts = dict.fromkeys(rows.PARTS, 0.1) | {"communication": 0.6}
    known = {"samples_per_s": numbers.Interval(rate, rate, rate), "ratio": numbers.Interval(rate / 10, 0.9, 1.1)}
    return rows.Row(name=name, flags=("--devices", str(devices)), devices=devices, parts_s=parts, **known | values)  # type: ignore[arg-type]


def series(name: str, rates: list[float]) -> Series:
    return Series(Cell(name=name, flags=()), races=[rates], folder=Path(name))


def test_the_answer_names_the_fastest_same_model_or_the_plainest_of_equals() -> None:
    both = [series("one", [10.0, 10.1, 9.9]), series("two", [15.0, 15.2, 14.9])]
    table = [row("one", 10.0), row("two", 15.0, 2, same_model=True)]
    take, why, limit = answer.sentences(table, both, ["lockstep", "train", "digits"])
    assert take == "Take: lockstep train digits --devices 2"
    assert why.startswith("It is 1.50× as fast as one, the next")
    assert limit.startswith("60% of its step is exchanging gradients")
    other = [table[0], row("two", 15.0, 2, same_model=False, loss_gap=0.1)]
    take, _, but, _ = answer.sentences(other, both, ["lockstep"])
    assert take == "Take: lockstep --devices 1"
    assert but.startswith("two would be 1.50× as fast, but its model is another one")
    noise = [both[0], series("two", [15.0, 8.0, 9.0])]
    _, why, _ = answer.sentences([table[0], row("two", 10.2, 2)], noise, [])
    assert why == "Within the noise it is as fast as two; it needs the fewest devices."


def told(name: str = "two<script>") -> Report:
    table = [
        row("one", 10.0, step_p50_s=0.1, host_memory_bytes=1e9),
        row(name, 15.0, 2, step_p50_s=0.07, host_memory_bytes=2e9, loss_gap=1e-7, same_model=True),
        rows.Row(name="broken", flags=(), failed="out of memory"),
    ]
    losses = {"one": [2.0, 1.5, math.nan, 1.0], name: [2.0, 1.5, 1.2]}
    busy = {"one": [(0.0, 90.0), (1.0, 100.0)]}
    return Report(title="a & b", about="here", made="now", rows=table, answer=["Take: x <y>"], losses=losses, busy=busy)


def test_a_report_says_the_same_in_every_form_and_asks_no_network(tmp_path: Path) -> None:
    names = write(told(), tmp_path)
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    page = (tmp_path / "report.html").read_text()
    assert "two&lt;script&gt;" in page
    assert "<script>two" not in page
    assert re.findall(r"""(?:src|href)=|url\(|https?://(?!www\.w3\.org/2000/svg")""", page) == []
    assert len(page) < 100_000
    for name in names:
        if name.endswith(".svg"):
            drawing = ElementTree.fromstring((tmp_path / name).read_text())
            assert drawing.get("aria-label")
            assert not any("nan" in value for each in drawing.iter() for value in each.attrib.values()), name
    with (tmp_path / "report.csv").open(newline="") as file:
        one, two, broken = csv.DictReader(file)
    assert (float(one["samples/s"]), float(two["samples/s"]), broken["failed"]) == (10.0, 15.0, "out of memory")
    assert one["J a step"] == "", "blank, not zero"
    assert json.loads((tmp_path / "report.json").read_text())["rows"][0]["name"] == "one"
    assert "| one | 10 |" in (tmp_path / "report.md").read_text()


def test_runs_of_other_jobs_are_not_compared() -> None:
    one, other = (
        Run(name, {}, flatten(override(RunConfig(), batch=batch)), {}) for name, batch in (("a", 64), ("b", 32))
    )
    with pytest.raises(RequestError, match=r"b is of another job than a: batch 32 \(not 64\)"):
        check_one_job([one, other])

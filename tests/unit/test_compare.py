"""Comparing variants: which there are, what noisy rounds say of a ratio, and what is recommended."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from lockstep.compare import answer, charts, grid, numbers, records, rounds, rows, trials
from lockstep.compare.clock import Clock
from lockstep.compare.grid import Cell, Words
from lockstep.compare.records import Record, Run, check_one_job
from lockstep.compare.report import Report, write
from lockstep.compare.rounds import Plan, Series
from lockstep.compare.trials import Trial
from lockstep.config.options import flatten, override
from lockstep.config.schema import ParallelConfig, PrecisionConfig, RunConfig
from lockstep.errors import RequestError, RunError, Stopped
from lockstep.verify import commands

from ..command import refusal, until


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
    assert [cell.is_alone_of(found[3]) for cell in found] == [True, False, False, False]
    other = grid.cells(grid.axes(["precision=bf16", "devices=2"]), parsed)
    assert not found[0].is_alone_of(other[0]), "of another precision"
    switched = grid.cells(grid.axes(["compile=true,false", "strategy=ddp"]), lambda _: RunConfig())
    assert [cell.flags[0] for cell in switched] == ["--compile", "--no-compile"]
    assert [cell.why_not for cell in switched] == ["", ""], "how many devices there are, the job itself finds out"
    weak = grid.cells(varied, parsed, is_weak=True)
    assert weak[3].config is not None
    assert weak[3].config.batch.size == 2 * RunConfig().batch.size


def test_without_vary_the_ways_of_this_machine_are_compared_with_one_device() -> None:
    def usual(cpus: int, gpus: int, *, has_bf16: bool = False, **chosen: str) -> dict[str, list[str]]:
        return grid.defaults(cpus, gpus, has_bf16=has_bf16, is_script=False, job=chosen)

    strategies = ["single", "dp", "ddp"]
    assert usual(2, 0) == {"strategy": strategies, "devices": ["1", "2"]}
    assert usual(64, 0, has_bf16=True)["precision"] == ["fp32", "bf16"]
    assert usual(8, 1) == {"precision": ["fp32", "bf16"]}, "one GPU is driven in one way"
    assert usual(8, 4) == {"strategy": strategies, "devices": ["1", "4"], "precision": ["fp32", "bf16"]}
    asked = usual(8, 4, strategy="ddp", devices="2", precision="fp64")
    assert asked == {"strategy": ["single", "ddp"], "devices": ["1", "2"]}, "what was asked for stays"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("digits --budget soon", "give a time, such as 90s, 5m or 1h"),
        (
            "digits --budget 5s --vary lr=1,2,3",
            "too small for 3 variants: trying them takes 8 s, and a race at least 5 s; give 60s, or",
        ),
        ("digits --scaling other", "strong (one global batch) or weak"),
        ("digits --steps 0", "give a whole number of 1 or more"),
        ("measured 5 eval", "run or train"),
        ("digits --vary lr=1,2 --to-accuracy 94", "give a share above 0 and at most 1"),
        ("digits --vary seed=1,2 --seeds 2", "which take --seeds anyway"),
        ("digits --vary epochs=1,2", "changes no step: add --seeds N"),
        ("digits --vary output=a,b", "decides on that"),
        ("digits --vary devises=1,2", "did you mean devices"),
        ("digits --vary devices", "give an option and its values"),
        ("digits --vary compile=yes,no", "--vary compile=yes,no: give true, false or both"),
        ("digits --vary devices=1,2,x", "Error parsing --devices"),
        ("digits --vary strategy=single,ddp,ddpp", "did you mean ddp"),
        ("digits --vary eval-every=1,2", "decides on that"),
        ("digits --vary devices=1,1", "give two different values at least"),
        ("train.py --vary devices=1,2", "--vary comes after the script"),
        ("digits --accelerator cpu --vary strategy=single,ddp", "ddp on one device is the same as single"),
        ("digits --vary strategy=single --vary devices=2", "None of 1 variant can be run; single-2: "),
        ("digits --vary strategy=ddp,dp --scaling weak", "give --devices"),
        ("--vary devices=1,2", "No job given: give a recipe"),
        ("--output=compared --from", "no run to report on"),
        (f"--vary devices=1,2 --to-accuracy 0.9 {__file__}", "which a script has not; use --seeds"),
    ],
)
def test_bad_requests_are_told(capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    assert told in refusal(capsys, "compare", *words.split())


def raced(mean: float, drawn: random.Random, between: float) -> numbers.Interval:
    """Return the ratio of races whose turns vary by 15 %, and whose starts by `between`."""
    starts = [drawn.gauss(0, between) for _ in range(5)]
    races = [[mean * math.exp(start + drawn.gauss(0, 0.15)) for _ in range(20)] for start in starts]
    found, other = series("a", [], races=races), series("b", [1.0] * 5)
    return found.ratio(other)


@pytest.mark.parametrize("between", [0.0, 0.03])
def test_an_interval_holds_the_ratio_and_the_same_is_no_winner(between: float) -> None:
    drawn, times = random.Random(0), 1000
    held = again = found = 0
    for _ in range(times):
        one, other = (raced(1.0, drawn, between) for _ in range(2))
        held += one.holds(1.0)
        again += one.holds(other.middle)
        found += raced(0.85, drawn, between).high < 1
    assert abs(held / times - numbers.CONFIDENCE) < 0.015, "19 of 20 declare no winner"
    assert again > 0.9 * times, "9 of 10"
    assert found > 0.9 * times
    assert numbers.geometric_mean([2.0]) == (2.0, 0.0, float("inf")), "a single race knows no ratio"


def test_a_mean_difference_is_held_and_of_one_pair_nothing_is_known() -> None:
    drawn, times = random.Random(0), 1000
    held = sum(
        numbers.mean([1 + drawn.gauss(0, 0.1) - drawn.gauss(0, 0.1) for _ in range(3)]).holds(1) for _ in range(times)
    )
    assert 0.97 * times < held < times
    assert numbers.mean([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)
    assert numbers.mean([1.0]) == (1.0, -math.inf, math.inf)


def test_students_t() -> None:
    table = {(0.975, 1): 12.706, (0.975, 2): 4.303, (0.975, 4): 2.776, (0.995, 10): 3.169, (0.975, 1000): 1.962}
    for (part, freedom), expected in table.items():
        assert numbers.student(part, freedom) == pytest.approx(expected, rel=1e-2)


def test_what_lies_between_epochs_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0, 8.0, 9.0, 9.5, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock()
    clock.mark("data")
    clock.end_step("step")
    clock.mark("eval")
    clock.go_on()  # after seven seconds
    clock.mark("data")
    clock.end_step("step")
    assert clock.step_s == [2.0, 1.0]
    assert clock.phase_s == {"data": 1.5, "step": 1.5}


def series(name: str, rates: list[float], **values: Any) -> Series:
    found = Series(Cell(name=name, flags=()), **{"races": [[each] for each in rates], **values})
    found.__dict__["record"] = Record(start={"plan": {}, "steps_per_epoch": None, "total_steps": 10})
    return found


def row(name: str, rate: float, devices: int = 1, **values: Any) -> rows.Row:
    parts = dict.fromkeys(rows.PARTS, 0.1) | {"communication": 0.6}
    known: dict[str, Any] = {
        "samples_per_s": numbers.Interval(rate, rate, rate),
        "ratio": numbers.Interval(rate / 10, 0.9, 1.1),
    }
    known |= {"speed_up": known["ratio"], "series": series(name, [rate, 1.01 * rate, 0.99 * rate])}
    return rows.Row(name=name, flags=("--devices", str(devices)), devices=devices, parts_s=parts, **known | values)


def test_the_answer_names_the_fastest_same_model_or_the_plainest_of_equals() -> None:
    table = [row("one", 10.0), row("two", 15.0, 2, same_model=True)]
    why, take, limit = answer.sentences(table, lambda flags: ["lockstep", "train", "digits", *flags])
    assert take == "Take: lockstep train digits --devices 2"
    assert why == "two is 1.50 × as fast as one, the next (1.50–1.50 with 98% confidence)."
    assert limit.startswith("60% of two's step is exchanging gradients")
    other = [table[0], row("two", 15.0, 2, same_model=False, another="its losses differ by 0.1")]
    why, take, but, _ = answer.sentences(other, lambda flags: ["lockstep", *flags])
    assert take == "Take: lockstep --devices 1"
    assert why.startswith("one is the only variant"), "another model is no rival"
    assert but == "Not the same model: two (its losses differ by 0.1)."
    noise = row("two", 10.2, 2, series=series("two", [15.0, 8.0, 9.0]))
    why, take, _, unknown = answer.sentences([table[0], noise], lambda flags: ["x", *flags])
    assert take == "Take: x --devices 1"
    assert "as fast as one" in why
    assert unknown == ("Not known with 98% confidence: whether two is faster than one; one needs the fewest devices.")


def training(*evals: tuple[int, float, float], reached: bool = False, failed: str = "") -> Trial:
    step, train_s, _ = evals[-1] if evals else (0, 0.0, 0.0)
    found = {"step": step, "train_s": train_s, "epoch_s": [train_s], "evals": [[*each] for each in evals]}
    return Trial(results={} if failed else found | {"reached": reached}, seconds=1.0, failed=failed)


STEPS = """{"event": "start", "total_steps": 5}
{"event": "log", "step": 1, "step_s": 3.0}
{"event": "log", "step": 2, "step_s": 1.0}
{"event": "epoch", "epoch_s": 4.0}
{"event": "eval", "step": 2, "top1": 0.5}
{"event": "log", "step": 4, "step_s": 0.5}
{"event": "epoch", "epoch_s": 1.0}
{"event": "eval", "step": 4, "top1": 0.9}
{"event": "log", "step": 5, "step_s": 7.0}
{"event": "eval", "step": 5, "top1": 0.8}
"""


def test_the_seconds_of_a_training_are_those_of_its_steps_until_it_is_accurate_enough(tmp_path: Path) -> None:
    (path := tmp_path / "steps.jsonl").write_text(STEPS)
    found = records.training(tmp_path, None)
    assert (found["step"], found["train_s"], found["reached"]) == (5, 12.0, False), "the begun epoch too"
    assert found["evals"] == [[2, 4.0, 0.5], [4, 5.0, 0.9], [5, 12.0, 0.8]]
    found = records.training(tmp_path, 0.9)
    assert (found["step"], found["train_s"], found["epoch_s"], found["reached"]) == (4, 5.0, [4.0, 1.0], True)
    assert [records.reaching(tmp_path, accuracy)() for accuracy in (0.9, 0.95)] == [True, False]
    again = '{"event": "start", "first_step": 3, "epoch_s": [4.0], "steps_per_epoch": 2}\n'
    path.write_text(STEPS + again + '{"event": "log", "step": 4, "step_s": 0.5}\n{"event": "epoch", "epoch_s": 0.5}\n')
    found = records.training(tmp_path, None)
    assert (found["step"], found["train_s"]) == (4, 5.0), "steps that were made again count once"
    assert (found["evals"], found["epoch_s"]) == ([[2, 4.0, 0.5]], [4.0]), "the rest of an epoch is none"
    path.write_text('{"event": "start"}\n{"step": 1}\n')
    with pytest.raises(RequestError, match="cannot be read"):
        records.record(tmp_path)


@pytest.mark.long
def test_a_comparison_goes_on_with_the_trainings_that_are_not_there(tmp_path: Path) -> None:
    trial = Trial(results={"step_s": [0.5]}, seconds=1.0)
    able = [series(name, [], folder=tmp_path / name, trial=trial) for name in "abc"]
    plan = Plan(60.0, seeds=range(3))
    for name, seeds in {"a": (0, 2), "b": (0, 2), "c": ()}.items():
        for seed in seeds:
            (folder := tmp_path / name / f"seed-{seed}").mkdir(parents=True)
            (folder / "trial.json").write_text(json.dumps(vars(training((9, 2.0, 0.5)))))
    (tmp_path / "b" / "seed-1" / "run").mkdir(parents=True)  # was stopped in its midst
    (tmp_path / "b" / "seed-1" / "run" / "steps.jsonl").write_text("half")

    def refused(cell: Cell, folder: Path, seed: int) -> Words:
        assert (folder / "steps.jsonl").exists() == (cell.name == "b" and seed == 1), "goes on with what was begun"
        return ("train", f"--no-such-{cell.name}", str(seed))

    for _ in range(2):  # a command that is given again tries again what failed
        said: list[str] = []
        for each in able:
            each.trainings.clear()
        rounds.train(able, refused, plan, said.append)
        assert [[*each.trainings] for each in able] == [[0, 1], [0, 1], [0]], "one that failed is trained no more"
        by_turns = ("c, seed 0 (3", "b, seed 1 (5", "a, seed 1 (6")
        assert said == [f"training {each} of 9), about 6.5 s and evaluations" for each in by_turns]
    failed = able[1].trainings[1].failed
    assert failed.startswith("refused: ")
    assert "no-such-b" in failed
    assert replace(plan, to_accuracy=0.9).folder(able[0], 0) != plan.folder(able[0], 0)


HEEDS = "import signal, sys; signal.signal(15, lambda *_: sys.exit({code})); print(flush=True); signal.pause()"


def test_what_is_stopped_since_it_is_enough_has_not_failed(tmp_path: Path) -> None:
    def ended(code: int) -> None:
        log = tmp_path / "log"

        def enough() -> bool:
            return log.read_bytes().endswith(b"\n\n")  # it heeds signals by now

        commands.run("a", [(sys.executable, "-c", HEEDS.format(code=code))], [log], limit_s=60, enough=enough)

    ended(75)
    with pytest.raises(RunError, match="exit code 1"):
        ended(1)
    with pytest.raises(Stopped):
        commands.run("a", [(sys.executable, "-c", "raise SystemExit(75)")], [tmp_path / "log"])


LEAVES = "import os, signal; pid = os.fork(); pid or os.kill(os.getpid(), signal.SIGSTOP); print(pid, flush=True)"


def test_what_a_command_has_left_ends_with_it_even_where_it_is_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with commands.Running("a", (sys.executable, "-c", LEAVES), log) as running, contextlib.suppress(RunError):
        while True:
            running.check()
    pid = int(log.read_text().split()[-1])
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_command_ends_with_the_process_that_runs_it_even_where_that_is_killed(tmp_path: Path) -> None:
    runs = "import sys, pathlib; from lockstep.verify import commands; log = pathlib.Path(sys.argv[1]); "
    runs += "commands.run('a', [('sh', '-c', 'echo $$; sleep 600')], [log])"
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", runs, str(log)]) as parent:
        until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
        parent.kill()
    pid = int(log.read_text().split()[-1])
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def table_of(found: list[Series], target: float | None) -> list[rows.Row]:
    """Return rows of variants, the first on one device, that were trained to a target."""
    return [
        row(each.cell.name, 10.0, place, series=each, **rows._trained(each, target))
        for place, each in enumerate(found, 1)
    ]


def test_a_variant_is_spread_over_its_seeds() -> None:
    trained = {0: training((9, 2.0, 0.5), (18, 4.0, 0.9), reached=True), 1: training((18, 6.0, 0.7))}
    (found,) = table_of([series("a", [10.0], trainings=trained)], 0.9)
    assert (found.seeds, found.reached, found.failed) == (2, 1, "")
    assert found.accuracy is not None
    assert found.accuracy[:2] == pytest.approx((0.8, math.sqrt(0.02))), "the sample standard deviation"
    assert found.trained_s == (5.0, math.sqrt(2), 2)
    assert (found.to_accuracy_steps, found.to_accuracy_s) == ((18, None, 1), (4.0, None, 1)), "of those that reached it"
    broken = {0: training((9, 2.0, 0.5)), 1: training(failed="out of memory")}
    (found,) = table_of([series("a", [10.0], trainings=broken)], None)
    assert found.failed == "training with seed 1 failed: out of memory"
    assert (found.seeds, found.samples_per_s, found.reached) == (1, (10.0, 10.0, 10.0), None), "its numbers stay"


def test_the_answer_names_who_is_accurate_first_and_what_is_within_the_spread() -> None:
    def answered(mine: dict[str, list[float | None]], target: float | None = 0.94) -> list[str]:
        def trained(seconds: list[float | None]) -> dict[int, Trial]:
            evals = [(9, each or 30.0, 0.95 if each else 0.5) for each in seconds]
            return {seed: training(each, reached=each[2] > 0.9) for seed, each in enumerate(evals)}

        found = [series(name, [10.0, 10.1], trainings=trained(each)) for name, each in mine.items()]
        return answer.sentences(table_of(found, target), lambda flags: ["x", *flags], target)

    why, take, accuracies, never, _ = answered({"a": [20.0, 21.0, 19.0], "b": [10.0, 11.1, 9.0], "c": [None] * 3})
    assert take == "Take: x --devices 2"
    assert why == "b reaches 94% first, after 10.03 ± 1.1 s of training, with 3 of 3 seeds."
    assert never == "c: 0 of 3 seeds reached 94%."
    assert accuracies == "Accuracies: a 95 ± 0 % (a tie), b 95 ± 0 %, c 50 ± 0 % (lower)."
    _, take, *_, unknown = answered({"a": [20.0, 11.0, 19.0], "b": [10.0, 11.1, 9.0]})
    assert take == "Take: x --devices 1", "as soon, and on fewer devices"
    assert "whether b is faster than a; a needs the fewest devices" in unknown
    _, take, _, some, *_ = answered({"a": [20.0, 21.0], "b": [1.0, None]})
    assert take == "Take: x --devices 1", "with more seeds"
    assert some == "b: 1 of 2 seeds reached 94%."
    why, _, _, one, other, *_ = answered({"a": [None], "b": [None]})
    assert "as fast as" in why
    assert (one, other) == ("a: 0 of 1 seeds reached 94%.", "b: 0 of 1 seeds reached 94%.")
    _, take, accuracies, *_ = answered({"c": [None, None], "a": [1.0, 1.0], "b": [1.0, None]}, None)
    assert take == "Take: x --devices 2", "c needs fewer devices, and is less accurate"
    assert accuracies == "Accuracies: c 50 ± 0 % (lower), a 95 ± 0 %, b 72.5 ± 32 % (a tie)."
    _, _, accuracies, *_ = answered({"a": [1.0], "b": [None]}, None)
    assert accuracies == "Accuracies of one seed, without a spread to judge them by: a 95 %, b 50 %."


def told(name: str = "two<script>") -> Report:
    trained = series("one", [10.0], trainings={0: training((9, 1.0, 0.5), (18, 2.0, 0.93))})
    over_seeds: dict[str, Any] = {"accuracy": numbers.Spread(0.93, 0.01, 2), "seeds": 2, "series": trained}
    table = [
        row("one", 10.0, step_p50_s=0.1, host_memory_bytes=1e9, **over_seeds),
        row(name, 15.0, 2, step_p50_s=0.07, host_memory_bytes=2e9, loss_gap=1e-7, same_model=True),
        rows.Row(name="broken", flags=(), failed="out of memory"),
    ]
    return Report(title="a & b", about="here", provenance="now", rows=table, answer=["Take: x <y>"])


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
    one, two, broken = json.loads((tmp_path / "report.json").read_text())["rows"]
    rates = [each["samples_per_s"]["middle"] for each in (one, two)]
    assert (rates, two["flags"], broken["failed"]) == ([10.0, 15.0], ["--devices", "2"], "out of memory")
    assert (one["ratio"]["middle"], one["ratio"]["high"], one["joules_a_step"]) == (1.0, 1.1, None), "not zero"
    assert (one["name"], one["accuracy"], two["accuracy"]) == ("one", {"mean": 0.93, "sd": 0.01, "n": 2}, None)
    text = (tmp_path / "report.md").read_text()
    for cells in ("| one | 10 | 1.00 (0.90–1.10) |", "| 93.00% ± 1.00% |", "- broken: out of memory"):
        assert cells in text
    assert ("93.00% ± 1.00%" in page, "over the seeds" in page) == (True, True), "and what it covers"


@pytest.mark.parametrize(("high", "width", "end"), [(875.0, "80.00%", "100.00%"), (3e6, "50.00%", "214285.71%")])
def test_a_bar_is_seen_beside_its_interval_however_long(high: float, width: str, end: str) -> None:
    drawn = charts.bars("Speed", [charts.Bar("a", {"": 700.0}, numbers.Interval(700.0, 0.2, high))], "samples/s")
    assert f'width="{width}"' in drawn
    assert f'x2="{end}"' in drawn


def _run(folder: Path, *, config: str = "", summary: str = "{}", **manifest: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in {"config.toml": config, "summary.json": summary, "manifest.json": json.dumps(manifest)}.items():
        (folder / name).write_text(text)
    (folder / "steps.jsonl").write_text('{"event": "start", "time": 0}\n')
    return folder


def test_runs_of_one_job_are_rows_and_of_other_jobs_are_refused(tmp_path: Path) -> None:
    own = 'model = "train"\ndata = ""\n'
    summary = '{"samples_per_s": 10, "exit": 0}'
    folders = [
        _run(tmp_path / name, config=own + more, summary=summary) for name, more in {"a": "", "b": "seed = 3\n"}.items()
    ]
    runs = [records.load(folder) for folder in folders]
    assert [*runs[0].options] == ["model", "data"], "a loop of one's own shows no options that it does not name"
    assert [each.flags for each in rows.of_runs(runs)] == [(), ("--seed", "3")]
    check_one_job(runs)
    one, other, larger = (
        Run(name=name, folder=tmp_path, options=flatten(override(RunConfig(), **options)))
        for name, options in (("a", {}), ("b", {"holdout": 0.1}), ("c", {"batch": 512}))
    )
    with pytest.raises(RequestError, match=r"b is of another job than a: holdout 0\.1 \(not 0\.0\)"):
        check_one_job([one, other])
    check_one_job([one, larger])
    assert (records.job(one) == records.job(larger), records.job(one) == records.job(other)) == (True, False)


def test_runs_are_listed_with_what_differs_and_damage_is_a_row(tmp_path: Path) -> None:
    for day, (name, lr, summary) in enumerate(
        [("b", 0.1, '{"exit": 0, "top1": 0.5}'), ("a", 0.2, "{}"), ("c", 0.1, "{")]
    ):
        _run(tmp_path / name, config=f"lr = {lr}\n", summary=summary, date=f"2026-01-0{day}", host="h")
    damaged, first, second = records.below(tmp_path)
    assert [(run.name, run.state) for run in (first, second, damaged)] == [("b", "done"), ("a", "killed"), ("c", "?")]
    assert "summary.json" in damaged.trouble
    assert records.differing([first, second]) == [{"lr": 0.1}, {"lr": 0.2}]
    other = replace(first, options={"model": "train", "collate": "x"})
    assert records.differing([first, second, other]) == [{"lr": 0.1}, {"lr": 0.2}, {"model": "train"}], "of each job"
    recipe = replace(first, options=flatten(override(RunConfig(), model="mlp", data="digits")))
    script = replace(first, options={"model": "train", "data": ""})
    assert records.differing([recipe, script]) == [{"model": "mlp", "data": "digits"}, {"model": "train"}]
    for part in ("compared/one/seed-0/run", "compared/race-01/one", "proved/ddp-2"):
        shutil.copytree(tmp_path / "a", tmp_path / part)
    (tmp_path / "compared" / "plan.json").touch()
    (tmp_path / "proved" / "proof.md").touch()
    assert {run.name for run in records.below(tmp_path)} == {"a", "b", "c", "compared/one/seed-0/run"}
    assert records.below(tmp_path / "compared")[0].name == "one/seed-0/run", "and no run of a race"
    assert [run.name for run in records.below(tmp_path / "a")] == ["a"], "a run itself"
    (tmp_path / "compared" / "report.html").touch()
    with pytest.raises(RequestError, match=r"compared is a comparison, reported in .*report\.html"):
        records.load(tmp_path / "compared")


def test_replicas_with_batch_statistics_of_their_own_are_another_model(tmp_path: Path) -> None:
    told = dict.fromkeys(["flops_a_step", "matrix_flops_per_s", "bytes_a_step", "busy_processors", "joules_a_step"])
    told |= {"step_s": [1.0], "phase_s": {}, "ranks": 1, "warm_up": 3}
    told |= {"peak_memory_bytes": {"host": 1, "device": None}}
    found = []
    for name, devices, kind, micro in [
        ("a", 1, "sync", 1),
        ("b", 2, "sync", 1),
        ("c", 2, "local", 1),
        ("d", 1, "sync", 2),
    ]:
        chosen = {"devices": devices, "batchnorm": kind}
        start = {"plan": {"global_size": 4, "accumulation": micro}, "steps_per_epoch": 1, "chosen": chosen}
        each = Series(Cell(name=name, flags=(), config=RunConfig()), tmp_path, Trial(results=told, seconds=1.0))
        each.races = [[1.0, 1.1], [1.0, 1.1]]
        each.__dict__["record"] = Record(start=start, losses={1: 2.0 + (1e-5 if name != "a" else 0)})
        found.append(each)
    same = {each.name: each.same_model for each in rows.of_series(found)}
    assert same == {"a": True, "b": True, "c": False, "d": False}
    assert rounds.base_of([found[2], found[1]]) is found[1], "the first that is the model of one device"
    assert rounds.base_of([found[2]]) is found[2]
    exact = RunConfig(precision=PrecisionConfig(name="fp64"))
    for each in found:
        each.cell = replace(each.cell, config=exact)
    assert [each.same_model for each in rows.of_series(found[:2])] == [True, False], "rounding explains less of fp64"


@pytest.mark.parametrize(
    ("told", "plan", "why"),
    [
        ({}, {}, "its losses differ by 9.9e-03"),
        ({"first_draw": "a.py:3 (aten.rand)"}, {}, "its losses differ by 9.9e-03"),
        (
            {"first_draw": "a.py:3 (aten.rand)"},
            {"accumulation": 2},
            "its losses differ by 9.9e-03: each micro-batch draws its own random numbers; the first: a.py:3 "
            "(aten.rand)",
        ),
        (
            {"undrawn": "a.py:3 draws a tensor."},
            {},
            "its losses differ by 9.9e-03: each rank draws its own random numbers, since those of one device failed "
            "(a.py:3 draws a tensor)",
        ),
    ],
)
def test_losses_that_differ_say_which_draws_were_not_those_of_one_device(
    told: dict[str, str], plan: dict[str, int], why: str
) -> None:
    one, two = series("a", [1.0]), series("b", [1.0], trial=Trial(results=told, seconds=1.0))
    for each, loss in ((one, 1.0), (two, 1.01)):
        each.cell, each.record.losses[1] = replace(each.cell, config=RunConfig()), loss
    two.record.start["plan"] = plan
    assert rows._likeness(two, one, None)["another"] == why


def test_an_exchange_of_other_numbers_is_another_model_from_the_first_step_on() -> None:
    one, two = series("a", [1.0]), series("b", [1.0])
    for each, exchange in ((one, "full"), (two, "powersgd")):
        each.cell = replace(each.cell, config=RunConfig(parallel=ParallelConfig(exchange=exchange)))
        each.record.losses[1] = 1.0
    assert rows._likeness(two, one, None)["another"].startswith("--exchange powersgd: other weights")
    assert rows._likeness(two, two, None)["same_model"]


def test_a_variant_whose_compared_steps_fail_is_measured_with_its_own_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def run(name: str, stage: Sequence[Words], *_: Any, **__: Any) -> None:
        words = stage[0][stage[0].index("compare") :]
        made.append(words[1])
        folder = Path(words[-1])
        if words[1] == "measured":
            if losses := int(words[2]):
                folder.mkdir()
                lines = [{"event": "step", "step": step + 1, "loss": 1.0} for step in range(losses)]
                (folder / "steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            raise RequestError(f"The variant {name} failed: a.py:3 draws a tensor.")
        folder.mkdir()
        (folder / "measured.json").write_text('{"step_s": [1.0]}')

    monkeypatch.setattr(commands, "run", run)
    for steps, again in (("0", True), ("4", True), ("5", False)):
        made.clear()
        folder = tmp_path / steps
        trial = trials.measure("a", folder, (steps, str(folder / "run")), limit_s=60.0)
        assert made == ["measured", "measured-as-is"][: 1 + again], "not what fails later"
        assert bool(trial.failed) != again
        assert trial.results == ({"step_s": [1.0], "undrawn": "a.py:3 draws a tensor."} if again else {})


def test_a_race_in_which_one_failed_at_once_leaves_the_others_in(tmp_path: Path) -> None:
    (tmp_path / "race.json").write_text('{"failed": {"b": "out of memory"}, "rates": {}}')
    living = [Series(Cell(name=name, flags=()), tmp_path / name) for name in "abc"]
    rounds._race(living, lambda cell, folder: (), tmp_path, 1, together=True)
    assert [each.failed for each in living] == ["", "out of memory", ""]
    assert [each.races for each in living] == [[], [], []]


@pytest.mark.parametrize(("step_s", "epoch"), [(0.02, 6), (0.025, 6), (0.005, 21), (0.2, 3), (0.05, None)])
def test_turns_time_each_step_of_an_epoch_as_often(step_s: float, epoch: int | None) -> None:
    found = series("a", [], trial=Trial(results={"step_s": [step_s]}, seconds=1))
    found.record.start["steps_per_epoch"] = epoch
    steps, turns = found.turn_steps, range(epoch or 1)
    timed = [(turn * (steps + 1) + step) % (epoch or 1) for turn in turns for step in range(1, steps + 1)]
    assert {timed.count(each) for each in range(epoch or 1)} == {steps}
    assert 0.1 <= steps * step_s + 1e-9 < 0.1 + 4 * step_s


def tried(cell: Cell, folder: Path, seconds: float) -> None:
    """Leave the trial of a variant as an earlier command does."""
    run = _run(folder / cell.name / "trial" / "run")
    (run / "steps.jsonl").write_text('{"event": "start", "plan": {}, "steps_per_epoch": 3}\n')
    told = {"step_s": [0.1] * 4, "peak_memory_bytes": {"host": 1, "device": None}}
    trial = Trial(results=told, seconds=seconds, to_first_step_s=1.0)
    (run.parent / "trial.json").write_text(json.dumps(vars(trial)))


def test_a_budget_that_holds_no_race_is_refused_as_soon_as_that_is_known(tmp_path: Path) -> None:
    cells = [Cell(name=name, flags=()) for name in "abc"]
    for cell in cells[:2]:
        tried(cell, tmp_path, 20.0)

    def refused(cells: Sequence[Cell], budget_s: float) -> str:
        said: list[str] = []
        with pytest.raises(RequestError) as found:
            rounds.run(cells, lambda cell, folder: ("no-such-verb",), tmp_path, Plan(budget_s), said.append)
        assert said == [], "no other variant was tried"
        return str(found.value)

    sentence = refused(cells[:2], 41)
    assert "--budget 41s is too small for 2 variants: trying them takes 40 s, and a race at least 11 s" in sentence
    assert f"--output {tmp_path}, which keeps the trials" in sentence
    assert "too small for 3 variants: trying them takes 60 s, and a race at least 16 s; give 1" in refused(cells, 72)


def test_times_below_a_nanosecond_are_rounding() -> None:
    told = {"step_s": [0.3], "phase_s": {"data": 0.1, "forward": 0.2}}
    assert rows._parts_of(told) == dict(zip(rows.PARTS, (0.1, 0.2, 0.0, 0.0, 0.0), strict=True))
    assert "-" not in f"{rows._parts_of(told)}"

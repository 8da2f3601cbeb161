"""How soon a comparison's report of twelve variants is there to be read, and how large it is."""

from __future__ import annotations

import math
import random
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from lockstep.compare.grid import Cell
from lockstep.compare.numbers import Interval, Spread
from lockstep.compare.records import Record
from lockstep.compare.report import HTML, write
from lockstep.compare.report import Report as Comparison
from lockstep.compare.rounds import Series as Measured
from lockstep.compare.rows import PARTS, Row
from lockstep.compare.trials import Trial

from .harness import Report, Series, Skipped, verdict

GOAL_S, GOAL_BYTES = 1.0, 2_000_000
VARIANTS, STEPS, ROUNDS = 12, 10_000, 10
LOOK = """<script>
const high = document.documentElement.scrollHeight;  // lays all of it out
const asked = performance.getEntriesByType("resource").length;
document.title = `${high} pixels laid out after ${performance.now()} ms, ${asked} requests`;
</script>"""


def measure() -> Report:
    """Return the seconds from a browser's navigation until the whole page is laid out, and its bytes."""
    if (browser := shutil.which("chromium")) is None:
        raise Skipped("there is no chromium")
    with tempfile.TemporaryDirectory() as folder:
        write(_comparison(), Path(folder))
        page = Path(folder) / HTML
        size = page.stat().st_size
        page.write_text(page.read_text().replace("</body>", f"{LOOK}</body>"))
        found = [_shown(browser, page, Path(folder) / f"profile-{number}") for number in range(ROUNDS)]
    seconds, asked = Series(tuple(s for s, _ in found)), max(requests for _, requests in found)
    holds = max(seconds.values) <= GOAL_S and size <= GOAL_BYTES and not asked
    return Report(
        title=f"A report of {VARIANTS} variants",
        finding=f"It has {size / 1000:.0f} kB, is laid out {seconds.text()} s after it is opened, and asks for {asked} "
        f"other files (goals: {GOAL_BYTES / 1e6:.0f} MB, {GOAL_S:.0f} s, none; {verdict(holds)}).",
        columns=("", "measured", "goal"),
        rows=(
            ("seconds until laid out", seconds.text(), f"{GOAL_S:.0f}"),
            ("bytes", f"{size:,}", f"{GOAL_BYTES:,}"),
            ("requests", str(asked), "0"),
        ),
        method=f"Each variant has numbers in all columns, losses of {STEPS:,} steps, utilisation and accuracy. "
        "Debian's Chromium without a screen, a new profile each time; its own time, from navigation until the height "
        "of the whole page is known.",
        n=f"{ROUNDS} times",
    )


def _shown(browser: str, page: Path, profile: Path) -> tuple[float, int]:
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--timeout=5000"]
    done = subprocess.run(
        [*words, f"--user-data-dir={profile}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search(r"laid out after ([\d.]+) ms, (\d+) requests", done.stdout)
    if match is None:
        raise RuntimeError(f"the page has not told when it was laid out: {done.stderr[-500:]}")
    return float(match[1]) / 1000, int(match[2])


def _comparison() -> Comparison:
    draw = random.Random(0)
    names = [f"{strategy}-{devices}" for strategy in ("single", "dp", "ddp", "hybrid") for devices in (1, 2, 4)]
    rows = [_row(name, number, draw) for number, name in enumerate(names[:VARIANTS])]
    answer = ["Take: lockstep train digits --strategy ddp --devices 4"]
    return Comparison(title="Twelve variants", about="a machine", made="now", rows=rows, answer=answer)


def _row(name: str, number: int, draw: random.Random) -> Row:
    rate, devices = 1000 * (1 + number) * draw.uniform(0.9, 1.1), 2 ** (number % 3)
    some = Spread(0.93, 0.002, 3)
    record = Record(
        losses={step: math.exp(-step / 3000) + draw.gauss(0, 0.05) for step in range(STEPS)},
        busy=[(float(second), draw.uniform(90, 200)) for second in range(600)],
    )
    evals = [[epoch, float(epoch), 1 - math.exp(-epoch / 5)] for epoch in range(30)]
    training = Trial(told={"evals": evals}, seconds=1.0)
    return Row(
        name=name,
        flags=("--strategy", name.partition("-")[0], "--devices", str(devices)),
        series=Measured(Cell(name=name, flags=()), trainings={0: training}),
        record=record,
        devices=devices,
        ranks=devices,
        turns=200,
        batch=256,
        samples_per_s=Interval(rate, 0.97 * rate, 1.03 * rate),
        ratio=Interval(1.0 + number, 0.9 + number, 1.1 + number),
        speed_up=Interval(float(devices), 0.9 * devices, 1.1 * devices),
        step_p50_s=256 / rate,
        step_p95_s=300 / rate,
        epoch_s=50000 / rate,
        parts_s={part: 256 / rate / len(PARTS) for part in PARTS},
        teraflops=1.0,
        matrix_share=0.3,
        bytes_a_step=1_000_000,
        host_memory_bytes=1e9,
        device_memory_bytes=2e9,
        busy_processors=1.9,
        joules_a_step=3.0,
        to_first_step_s=4.0,
        accuracy=some,
        seeds=3,
        trained_s=some,
        trained_epoch_s=some,
        reached=3,
        to_accuracy_steps=some,
        to_accuracy_s=some,
        loss_gap=1e-7,
        same_model=True,
    )

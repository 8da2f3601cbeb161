"""`lockstep forecast RECIPE|SCRIPT --devices 1:1024 --network 100GbE`: what more devices would bring."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .. import folders, hardware
from ..compare import charts, forecast, networks, past, records
from ..compare.charts import Line
from ..compare.forecast import Cluster, Forecast
from ..compare.grid import Cell
from ..compare.networks import Links
from ..config import RunConfig
from ..errors import RequestError, RunError, Stopped, counted
from ..files import parse_json, read, shown, understanding, write_json, write_whole
from ..launchers import table as launchers
from ..options import flatten
from ..screen import Screen
from . import output, run, variants, words

_USAGE = """\
usage: lockstep forecast [RECIPE] --network NETWORK [--devices N:M] [flags of lockstep train]
       lockstep forecast --network NETWORK [--devices N:M] [flags of lockstep run] SCRIPT [its own flags], or -m MODULE

Measures here what one rank's share of a job costs for several numbers of devices, and says what so many would come to
when a network connects them: time of a step, speed-up with error bars, cost, memory, and what limits it. On a CPU, a
device is a whole machine like this one.

  --devices N:M       numbers of devices: 1:1024 (powers of two), or 1,2,4,6 (default: 1:64)
  --network NETWORK   what a node has towards others: {presets};
                      or a rate and a latency, such as 10Gbit/s,50us;
                      or FILE.json,FILE.json, which lockstep doctor --json has printed on several hosts;
                      or RUN, the folder of a run of this job on several of the devices
  --within NETWORK    between the GPUs of a node (default: PCIe4)
  --per-node N        GPUs of a node (default: as many as here)
  --scaling weak      the same batch for each device; by default the same global batch (strong)
  --price P           of a device and hour: what the whole run would cost
  --output FOLDER     default: runs/NAME-forecast; what it holds already is not measured again

Exit code: 0 done, 1 the job cannot be measured, 2 it cannot be tried.
"""
_PROG = "lockstep forecast"
OWN: dict[str, type] = {
    "--devices": str,
    "--network": str,
    "--within": str,
    "--per-node": str,
    "--scaling": str,
    "--price": str,
}
_MOST_DEVICES = 100_000
JSON, MARKDOWN, SVG = "forecast.json", "forecast.md", "scaling.svg"


def main(given: list[str]) -> int:
    """Forecast, and return 0."""
    if output.helped(given, _USAGE.format(presets=", ".join(networks.PRESETS))):
        return 0
    has_script = run.names_script(given)
    ours, script = run.split(given) if has_script else (given, [])
    asked, rest = words.take(ours, OWN)
    devices = _devices(asked.get("--devices", "1:64"))
    within = networks.links("--within", asked.get("--within", "PCIe4"))
    price = None if "--price" not in asked else words.tolerance("--price", asked["--price"])
    is_weak = variants.scaling(asked.get("--scaling", "strong"))
    job = variants.Job(rest, script, prog=_PROG, lacks="" if "--network" in asked else "--network")
    if "--network" not in asked:
        raise RequestError(f"{_PROG} lacks --network: what would connect the devices, such as 100GbE or 10Gbit/s,50us.")
    base = job.config(())
    _check(base, is_weak=is_weak, is_script=has_script)
    made = None
    if (of_run := Path(asked["--network"])).is_dir():
        made = _made(of_run, base, is_script=has_script, is_weak=is_weak)
    between = networks.links("--network", asked["--network"]) if made is None else within
    plan = {"job": job.shown(), "scaling": "weak" if is_weak else "strong", "machine": variants.machine()}
    gpus = 0 if base.parallel.accelerator == "cpu" else len(hardware.survey(launchers.visible_gpus()).gpus)
    per_node = _per_node(asked.get("--per-node"), gpus)
    folder = variants.folder_of(base, "forecast", plan)
    screen = Screen(stderr=True)
    how = ("--devices", "1") if has_script else ("--devices", "1", "--strategy", "ddp")

    def cell(ranks: int) -> Cell:
        batch = ("--batch", str(base.batch.size * ranks)) if is_weak and ranks > 1 else ()
        return Cell(name=f"share of {ranks}", flags=(*how, *batch))

    variants.crowded(screen)
    try:
        batch = None if has_script else base.batch.size  # of a script's own loader, nobody knows yet
        ranks = forecast.chosen(devices, batch, is_weak=is_weak)
        ranks = sorted({*ranks, *((made.ranks,) if made else ())})
        with variants.telling(screen) as tell:
            epochs = None if has_script else base.epochs
            shares, measured = forecast.measure(ranks, job.command, cell, folder, epochs, tell)
            if not measured.on_gpu and not asked["--network"].endswith(".json"):
                tell("measuring what gloo itself takes for a message")
                gloo = _gloo(folder)
                between = gloo if made else Links(*(a.behind(b) for a, b in zip(between, gloo, strict=True)))
    except (KeyboardInterrupt, Stopped):
        raise Stopped(
            f"Stopped on request; start the same command with --output {shown(folder)} to go on where it was."
        ) from None
    except OSError as error:
        raise folders.unwritable(folder, error) from error
    cluster = Cluster(between=between, within=within, per_node=per_node, price=price, is_weak=is_weak)
    if made:
        share = next(each for each in shares if each.ranks == made.ranks)
        fitted = forecast.fitted(cluster, share, made.step_s, has_trees=measured.on_gpu)
        cluster = dataclasses.replace(cluster, between=fitted)
    found = forecast.forecast(shares, measured, cluster, devices)
    unit = "GPU" if measured.on_gpu else "machine"
    told = forecast.sentences(found, unit)
    if doubt := forecast.doubt(shares):
        screen.say((f"warning: {doubt}", "yellow"))
        told.insert(0, doubt)
    about = f"{folders.default_name(base)} over {asked['--network']}, as measured on {_here()}"
    with output.written():
        _print(Screen(), found, told)
    _write(folder, found, told, about)
    screen.say((f"{JSON}, {MARKDOWN}, {SVG} in {shown(folder)}", "dim"))
    return 0


@dataclasses.dataclass(frozen=True)
class _Made:
    """A run on several devices, whose steps tell how fast their links are."""

    ranks: int
    step_s: list[float]


def _made(folder: Path, base: RunConfig, *, is_script: bool, is_weak: bool) -> _Made:
    """Return what a run of the same job has recorded. Raises `RequestError` where it tells nothing of its links."""
    run = past.load(folder)
    ranks, step_s = int(records.start(folder)["plan"].get("ranks", 1)), records.step_s(folder)
    if not is_script:
        options = flatten(base) | ({"batch": base.batch.size * ranks} if is_weak else {})
        past.check_one_job([past.Run(name="what is forecast", folder=folder, options=options), run], "batch")
    if ranks < 2 or len(step_s) < 2:
        raise RequestError(
            f"{shown(folder)} tells nothing of links: it had {counted(ranks, 'rank')}, and logged "
            f"{counted(len(step_s), 'interval')} of its steps after the first; give a run of several, with --log-every."
        )
    return _Made(ranks, step_s)


def _devices(text: str) -> list[int]:
    """Return the numbers of devices, one device among them."""
    found: set[int] = set()
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        low, high = map(int, match.groups())
        if 0 < low <= high <= _MOST_DEVICES:
            found = {low, high, *(2**power for power in range(high.bit_length()) if low <= 2**power <= high)}
    elif all(word.strip().isdecimal() for word in text.split(",")):
        found = {int(word) for word in text.split(",")}
    if not found or min(found) < 1 or max(found) > _MOST_DEVICES:
        raise RequestError(f"--devices {text}: give a range such as 1:1024, or numbers such as 1,2,4,6.")
    return sorted({1, *found})


def _per_node(text: str | None, gpus: int) -> int:
    if text is None:
        return max(1, gpus)
    if not text.isdecimal() or not int(text):
        raise RequestError(f"--per-node {text}: give a whole number of 1 or more.")
    if not gpus and int(text) > 1:
        raise RequestError(f"--per-node {text}: there is no GPU here, and a device is a whole machine; leave it out.")
    return int(text)


def _check(base: RunConfig, *, is_weak: bool, is_script: bool) -> None:
    if base.precision.compile:
        raise RequestError("lockstep forecast sees nothing in a compiled model; leave out --compile.")
    if not is_script and base.parallel.strategy not in ("auto", "ddp"):
        raise RequestError(f"--strategy {base.parallel.strategy}: forecasts are of ddp (and of dp beside it).")
    if is_weak and is_script:
        raise RequestError("--scaling weak: a script's loader says how large the global batch is; enlarge it there.")


def _gloo(folder: Path) -> Links:
    """Return the link that gloo has between two ranks of this machine, where no network slows it."""
    told = []
    for path in (folder / f"gloo-{number}.json" for number in (1, 2)):
        if not path.exists():
            flags = ("--devices", "2", "--accelerator", "cpu", "--collectives", "gloo")
            done = subprocess.run(
                [sys.executable, "-P", "-m", "lockstep", "doctor", "--json", *flags],
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            if not done.stdout:
                raise RunError(f"lockstep doctor --devices 2 has failed: {done.stderr.strip()}")
            write_whole(path, done.stdout.encode())
        with understanding(path):
            told.append(networks.exchanges(parse_json(read(path))))
    return networks.measured(told)


def _here() -> str:
    facts = hardware.survey(launchers.visible_gpus())
    return f"{len(facts.gpus)} × {facts.gpus[0].name}" if facts.gpus else f"{facts.cpus} × {facts.cpu_name}"


_HEADS = (
    "devices",
    "share",
    "step, ms",
    "90 %",
    "samples/s",
    "speed-up",
    "90 %",
    "efficiency",
    "epoch, s",
    "memory",
    "cost",
    "dp",
    "limited by",
)


def _cells(row: Forecast) -> list[str]:
    step, times = row.step_s, row.speed_up
    return [
        f"{row.devices:,}",
        f"{row.share:,}",
        charts.short(1000 * step.middle),
        f"{charts.short(1000 * step.low)}–{charts.short(1000 * step.high)}",
        f"{row.samples_per_s:,.0f}",
        charts.short(times.middle),
        f"{charts.short(times.low)}–{charts.short(times.high)}",
        f"{row.efficiency:.0%}",
        "" if row.epoch_s is None else charts.short(row.epoch_s),
        f"{row.memory_bytes / 2**30:.2f} GiB",
        "" if row.cost is None else f"{row.cost:,.2f}",
        "" if row.dp_speed_up is None else f"{row.dp_speed_up:.3g}",
        row.limit,
    ]


def _filled(found: Sequence[Forecast]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of the columns in which there is anything."""
    table = [_cells(row) for row in found]
    kept = [number for number in range(len(_HEADS)) if any(cells[number] for cells in table)]
    return [_HEADS[number] for number in kept], [[cells[number] for number in kept] for cells in table]


def _print(screen: Screen, found: Sequence[Forecast], told: Sequence[str]) -> None:
    screen.table(*_filled(found), texts=0)
    screen.print()
    for sentence in told[-1:]:
        screen.say(sentence)


def _write(folder: Path, found: Sequence[Forecast], told: Sequence[str], about: str) -> None:
    made = f"Made {time.strftime('%Y-%m-%d %H:%M')} by: {shlex.join(['lockstep', *sys.argv[1:]])}"
    rows = [
        {
            **dataclasses.asdict(row),
            "step_s": row.step_s._asdict(),
            "speed_up": row.speed_up._asdict(),
            "efficiency": row.efficiency,
            "limit": row.limit,
        }
        for row in found
    ]
    heads, cells = _filled(found)
    text = [f"# Forecast: {about}", "", *(f"- {each}" for each in told), "", f"| {' | '.join(heads)} |"]
    text += [f"|{' ---: |' * len(heads)}", *(f"| {' | '.join(row)} |" for row in cells), "", made]
    drawn = [
        Line(name, [(float(row.devices), getattr(row.speed_up, part)) for row in found])
        for name, part in (("forecast", "middle"), ("at worst", "low"), ("at best", "high"))
    ]
    try:
        write_json(folder / JSON, {"about": about, "made": made, "answer": list(told), "rows": rows})
        write_whole(folder / MARKDOWN, ("\n".join(text) + "\n").encode())
        write_whole(folder / SVG, charts.lines("Speed-up", drawn, "devices", "×", ideal=True).encode())
    except OSError as error:
        raise folders.unwritable(folder, error) from error

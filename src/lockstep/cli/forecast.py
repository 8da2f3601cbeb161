"""`lockstep forecast`: speed-up and cost of more devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..compare import forecast, networks, records, tables
from ..compare.forecast import Cluster
from ..compare.grid import Cell, Words
from ..compare.networks import Links
from ..config import registry
from ..config.options import flatten
from ..errors import RequestError, counted
from ..files import shown, understanding
from ..record.console import duration
from ..runs import folders
from ..screen import Screen
from . import output
from .variants import Job, advice_on_failure, gpus, machine, notifier, provenance, warn_of_load, whole_number

FLAGS: dict[str, type] = {
    **dict.fromkeys(("--devices", "--network", "--within", "--per-node"), str),
    "--price": float,
}
_MOST_DEVICES = 100_000


def main(words: list[str]) -> int:
    """Forecast, and return 0."""
    job = Job(words, FLAGS, prog="lockstep forecast")
    options, base = job.options, job.config()
    devices, network = _devices(options.get("--devices", "1:64")), options.get("--network")
    if network is None:
        raise RequestError(
            "lockstep forecast needs --network, the network between the devices, such as 100GbE or 10Gbit/s,50us."
        )
    if base.precision.compile or base.precision.cuda_graphs != "off":
        raise RequestError(
            "lockstep forecast cannot measure the parts of a compiled or recorded pass; leave out --compile and "
            "--cuda-graphs."
        )
    strategy, size = registry.resolved(base.parallel.strategy, distributed=True), base.parallel.shard_size or 1
    if not registry.KINDS[strategy].process_per_device:
        raise RequestError(
            f"--strategy {strategy}: forecasts are of {registry.per_device()}; on the GPUs of one node, of dp as well."
        )
    if undivided := [count for count in devices if count > 1 and count % size]:
        raise RequestError(
            f"--shard-size {size} does not divide {undivided[0]} ranks into equal groups; give multiples of it, as in "
            f"--devices {size},{2 * size}."
        )
    within = networks.links("--within", options.get("--within", "PCIe4"))
    # If --network is a run: its ranks and step times.
    ranks, step_s = _recorded(Path(network), job) if Path(network).is_dir() else (0, [])
    between = within if ranks else networks.links("--network", network)
    per_node = _per_node(options.get("--per-node"), gpus(base))
    folder = job.folder("forecast", {})
    screen = Screen(stderr=True)
    warn_of_load(screen)
    batch = None if job.is_script else base.batch.size

    def command(ranks: int, path: Path) -> Words:
        chosen = () if job.is_script else ("--strategy", strategy)
        return job.command(Cell(name="", flags=("--devices", "1", *chosen)), path)

    with notifier(screen) as notify, advice_on_failure(folder):
        measured = {ranks, *forecast.chosen(devices, batch)} - {0}
        if count := len(forecast.missing(sorted(measured), folder)):
            screen.say(_length(count))
        shares, facts = forecast.measure(sorted(measured), command, folder, notify)
        facts = facts if job.is_script else facts._replace(epochs=base.epochs)  # the measured job has no end
        if not facts.on_gpu and not network.endswith(".json"):
            notify(f"measuring gloo's time per message, about {duration(forecast.USUAL_S)}")
            gloo = forecast.gloo(folder)
            between = gloo if ranks else Links(*(a.behind(b) for a, b in zip(between, gloo, strict=True)))
    cluster = Cluster(between, within, per_node, options.get("--price"))
    if ranks:
        share = next(share for share in shares if share.ranks == ranks)
        cluster = cluster._replace(between=forecast.fitted(cluster, share, step_s, has_trees=facts.on_gpu))
    rows = forecast.forecast(shares, facts, cluster, devices)
    doubts = forecast.doubts(shares, rows)
    for doubt in doubts:
        screen.say((f"warning: {doubt}", "yellow"))
    sentences = [*doubts, *forecast.sentences(rows, "GPU" if facts.on_gpu else "machine")]
    about = f"{folders.default_name(base)} over {network}, as measured on {machine()}"
    with advice_on_failure(folder):
        names = forecast.write(folder, rows, sentences, about, provenance())
    with output.written():
        columns = tables.filled(forecast.COLUMNS, rows)
        printed = Screen()
        printed.table([column.head for column in columns], tables.cells(columns, rows), texts=0)
        printed.print()
        for sentence in sentences[-1:]:
            printed.say(sentence)
    screen.say((f"{', '.join(names)} in {shown(folder)}", "dim"))
    return 0


def _recorded(folder: Path, job: Job) -> tuple[int, list[float]]:
    """Return a run's ranks and logged step times. Raises `RequestError` for another job."""
    run, options = records.load(folder), flatten(job.config())
    with understanding(folder):
        ranks, step_s = int(run.record.plan.get("ranks", 1)), run.record.step_s[1:]
        is_alike = _method(run.options) == _method(options)
    if not is_alike:
        raise RequestError(
            f"{shown(folder)} exchanged by another method than this job: give both the same --strategy and --exchange, "
            "with the same options."
        )
    if not job.is_script:
        records.check_one_job([records.Run(name="this job", folder=folder, options=options), run], "batch")
    if ranks < 2 or len(step_s) < 2:
        raise RequestError(
            f"{shown(folder)} does not describe links: it had {counted(ranks, 'rank')}, and logged "
            f"{counted(len(step_s), 'interval')} of its steps after the first; give a run of several, with --log-every."
        )
    return ranks, step_s


def _method(options: Mapping[str, Any]) -> list[Any]:
    """Return the options that decide what ranks exchange."""
    strategy = registry.resolved(options.get("strategy") or "auto", distributed=True)
    keys = ("exchange-every", "powersgd-rank", "powersgd-start", "shard-size", "shard-modules", "shard-reshard")
    return [strategy, options.get("exchange") or "full", *(options.get(key) or None for key in keys)]


def _length(count: int) -> str:
    """Return in words the time of `count` measurements."""
    usual_s, limit_s = forecast.USUAL_S, forecast.LIMIT_S
    return (
        f"{counted(count, 'measurement')}, about {duration(count * usual_s)} in all ({usual_s:.0f} s each where steps "
        f"are short and the machine is idle, and {limit_s / 60:.0f} min at most)"
    )


def _devices(text: str) -> list[int]:
    """Return the numbers of devices, always with one device."""
    counts: set[int] = set()
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        low, high = map(int, match.groups())
        if 0 < low <= high <= _MOST_DEVICES:
            counts = {low, high, *(2**power for power in range(high.bit_length()) if low <= 2**power <= high)}
    elif all(word.strip().isdecimal() for word in text.split(",")):
        counts = {int(word) for word in text.split(",")}
    if not counts or min(counts) < 1 or max(counts) > _MOST_DEVICES:
        raise RequestError(f"--devices {text}: give a range such as 1:1024, or numbers such as 1,2,4,6.")
    return sorted({1, *counts})


def _per_node(text: str | None, gpus: int) -> int:
    count = whole_number("--per-node", text) or max(1, gpus)
    if count > 1 and not gpus:
        raise RequestError(f"--per-node {text}: there is no GPU here, and a device is a whole machine; leave it out.")
    return count

"""What more devices would bring: the timeline's laws, links in words, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.compare import forecast, networks, records, timeline, traffic, trials
from lockstep.compare.clock import Clock, mark_exchanges
from lockstep.compare.forecast import Cluster, Forecast, Job, Share
from lockstep.compare.networks import Links
from lockstep.compare.records import Record
from lockstep.compare.timeline import FREE, Link, Network
from lockstep.compare.traffic import BACKWARD, FORWARD, GATHER, GRADIENT, REDUCE, Parameter, Point, Profile
from lockstep.compare.trials import Trial
from lockstep.config.options import flatten, override, recipe
from lockstep.errors import RequestError, RunError

from ..command import refusal

MB = 10**6
ENDLESS = Link.of(1e15, 0.0)


def profile(points: list[Point], *steps: list[float]) -> Profile:
    return Profile(batch=8, points=tuple(points), seconds=np.array(steps))


def network(bytes_per_s: float, latency_s: float = 0.0, **more: Any) -> Network:
    link = Link.of(bytes_per_s, latency_s)
    return Network(between=link, within=link, **more)


def cluster(link: Link, **more: Any) -> Cluster:
    return Cluster(**{"between": Links(link, link, link), "within": Links(link, link, link), "per_node": 1, **more})


def test_an_exchange_takes_what_a_ring_or_a_tree_takes() -> None:
    ring = network(100 * MB, 1e-3)
    assert ring.all_reduce_s(10 * MB, 4) == pytest.approx(6 * 1e-3 + 2 * 3 / 4 * 10 / 100)
    assert ring.all_gather_s(1 * MB, 4) == pytest.approx(3 * (1e-3 + 1 / 100))
    assert ring.all_reduce_s(10 * MB, 1) == ring.all_gather_s(10 * MB, 1) == 0
    trees = network(100 * MB, 1e-3, has_trees=True)
    assert trees.all_reduce_s(0, 1024) == pytest.approx(2 * 10 * 1e-3), "the depth of a tree, up and down"
    assert trees.all_reduce_s(10 * MB, 4) == pytest.approx(ring.all_reduce_s(10 * MB, 4)), "a ring where it is faster"
    mixed = Network(between=Link.of(10 * MB, 1e-3), within=Link.of(1000 * MB, 1e-6), per_node=4)
    assert mixed.all_reduce_s(10 * MB, 4) == pytest.approx(network(1000 * MB, 1e-6).all_reduce_s(10 * MB, 4))
    assert mixed.all_reduce_s(10 * MB, 8) == pytest.approx(2 * 7 / 8 * 10 / 10 + 2 * (1e-3 + 6e-6)), "the slower link"


def test_a_bucket_that_is_sent_in_time_costs_nothing_and_the_last_one_all() -> None:
    # Two buckets of 2 MB: one is ready after 1 s of 3, the other at the end; each takes 0.2 s over two ranks.
    points = [Point(GRADIENT, 2 * MB), Point(GRADIENT, 26 * MB)]
    step = [1.0, 2.0, 0.5]
    slow = network(10 * MB)
    assert timeline.step_s(profile(points, step), 2, FREE) == pytest.approx(3.5)
    assert timeline.step_s(profile(points, step), 2, slow) == pytest.approx(3.5 + 2.6)
    assert traffic.bytes_a_step(profile(points, step), 2) == 28 * MB
    # An exchange of statistics is waited for wherever it stands.
    points = [Point(GATHER, 100), Point(GATHER, 100), Point(GRADIENT, 1)]
    latency = network(math.inf, 0.1)
    assert timeline.step_s(profile(points, [1, 1, 1, 1]), 3, latency) == pytest.approx(4 + 2 * 2 * 0.1 + 4 * 0.1)


def test_what_computation_and_an_exchange_cost_one_another_counts_while_both_are_under_way() -> None:
    # A bucket of 1 s is sent after 1 s of 3; another one of 0.5 s at the end.
    first, last = Point(GRADIENT, 10 * MB), Point(GRADIENT, 5 * MB)
    alone = profile([first, last], [1.0, 2.0, 0.5])
    waited_for = profile([first, Point(REDUCE, 0), last], [1.0, 0.5, 1.5, 0.5])
    for beside in (0.0, 0.5, 1.0):
        between = Network(between=Link(((0.0, 0.0), (10 * MB, 1.0)), beside=beside), within=FREE.within)
        assert timeline.step_s(alone, 2, between) == pytest.approx(4 + beside)
        assert timeline.step_s(waited_for, 2, between) == pytest.approx(4.5 + beside / 2)
    wire = Link.of(10 * MB, 0.0)
    assert wire.behind(Link(wire.points, beside=0.5)).beside == pytest.approx(0.25), "a wire needs no processor"


def sharded(**more: Any) -> Profile:
    """Return a step of 2 + 3 + 1 s: two blocks of 4 MB, forward and backward, and the optimizer's step."""
    points = [Point(FORWARD, 0, 0), Point(FORWARD, 0, 1), Point(BACKWARD, 0, 1), Point(GRADIENT, 4 * MB, 1)]
    points += [Point(BACKWARD, 0, 0), Point(GRADIENT, 4 * MB, 0)]
    weights = tuple(Parameter((4, 1), 4 * MB, True, 8 * MB, block) for block in (0, 1))
    seconds = np.array([[0.0, 1.0, 1.0, 1.5, 0.0, 1.5, 1.0]])
    return Profile(batch=8, points=tuple(points), seconds=seconds, parameters=weights, strategy="fsdp", **more)


def test_blocks_are_gathered_while_the_last_one_computes_on_gpus_alone() -> None:
    # Over two ranks, 0.2 s for a gather, as much for a reduce-scatter, and 0.4 s for gloo's, which is an all-reduce.
    link = network(10 * MB)
    assert timeline.step_s(sharded(), 2, link) == pytest.approx(6 + 4 * 0.2 + 2 * 0.4)
    # The first gather and the last sum are waited for; block 1 goes back to back, so that nothing hides its second one.
    assert timeline.step_s(sharded(on_gpu=True), 2, link) == pytest.approx(6 + 0.2 + 0.2)
    assert traffic.bytes_a_step(sharded(on_gpu=True), 2) == pytest.approx(1.5 * 8 * MB)
    pairs = sharded(on_gpu=True, shard_size=2)
    assert traffic.bytes_a_step(pairs, 4) == pytest.approx(1.5 * 8 * MB + 4 * MB), "and shards among two pairs"
    nodes = Network(between=Link.of(10 * MB, 0.0), within=ENDLESS, per_node=2)
    assert timeline.step_s(pairs, 4, nodes) == pytest.approx(6 + 0.4), "both shards cross one link"


def test_weights_are_sent_after_the_optimizers_step() -> None:
    zero1 = replace(sharded(), strategy="zero1")
    trees = network(10 * MB, has_trees=True)
    for link, seconds in ((network(10 * MB), 2 * 0.4 + 2 * 0.4 + 0.0), (trees, 2 * 0.4 + 2 * 0.4)):
        sums_s = timeline.step_s(replace(zero1, strategy="ddp"), 2, link)
        assert timeline.step_s(zero1, 2, link) - sums_s == pytest.approx(seconds / 2)
    assert traffic.bytes_a_step(zero1, 4) == pytest.approx((2 + 1) * 3 / 4 * 8 * MB)


def test_memory_is_what_a_method_leaves_to_a_rank() -> None:
    def memory(ranks: int = 2, **more: Any) -> float:
        return traffic.memory_bytes(replace(sharded(), **more), ranks, 100 * MB) / MB

    assert memory(1) == memory(strategy="ddp") == 100
    assert memory(strategy="zero1") == memory(4, strategy="zero1") == 100 - 8, "two parameters have two owners"
    assert memory(4) == 100 - 3 / 4 * (8 + 8 + 16) + (4 + 4)
    assert memory(8) == memory(4), "each shard has a row"
    assert memory(4, shard_size=2) == 100 - 1 / 2 * 32 + 8
    assert memory(4, reshards=False) == 100 - 3 / 4 * (8 + 16) + 8 / 4 + 4, "whole weights, and a shard of them"
    # Two parameters of four numbers, as they are here: sent and received in 16 bits, and twice in 32 in turn.
    assert memory(strategy="ddp", exchange="bf16") == pytest.approx(100 + (8 * (2 + 2) + 4 * (4 + 4)) / MB, abs=1e-9)
    assert memory(4, exchange="bf16") == pytest.approx(memory(4) + 4 * (2 + 2 + 4 + 4) / MB, abs=1e-9)
    assert memory(strategy="ddp", exchange="local-sgd") == 100 + 8
    assert memory(strategy="ddp", exchange="diloco") == 100 + 16
    low_rank = tuple(parameter._replace(low_rank=1) for parameter in sharded().parameters)
    assert memory(strategy="ddp", exchange="powersgd", parameters=low_rank) == 100 + 16


def test_ranks_wait_for_the_slowest_between_any_two_exchanges() -> None:
    # Of two draws from {1, 3}, the larger is 1 once in four times.
    steps = ([1.0, 0.0], [3.0, 0.0])
    assert timeline.step_s(profile([Point(GRADIENT, 1)], *steps), 2, FREE) == pytest.approx(2.5)
    # What one step loses in its first half and wins in its second costs only those who wait in between.
    halves = ([1.0, 3.0, 0.0], [3.0, 1.0, 0.0])
    assert timeline.step_s(profile([Point(GRADIENT, 1), Point(GRADIENT, 1)], *halves), 2, FREE) == pytest.approx(4)
    assert timeline.step_s(profile([Point(GATHER, 0), Point(GRADIENT, 1)], *halves), 2, FREE) == pytest.approx(5)


def told(mean_s: float, *, points: list[Any] | None = None) -> dict[str, Any]:
    points = points or [[GRADIENT, 4 * MB, 0]]
    return {
        "step_s": [mean_s] * 4,
        "peak_memory_bytes": {"host": 100.0, "device": None},
        "profile": {"points": points, "seconds": [[2 * mean_s / (len(points) + 1)] * (len(points) + 1)] * 4},
    }


def shares(*by_ranks: tuple[int, float, float]) -> list[Share]:
    return [forecast.share(ranks, 64, [told(a), told(b)]) for ranks, a, b in by_ranks]


def rows(found: list[Share], devices: list[int], link: Link, **more: Any) -> list[Forecast]:
    job = Job(batch=64, steps_per_epoch=100, epochs=3, on_gpu=False)
    return forecast.forecast(found, job, cluster(link, **more), devices)


def test_the_time_of_a_step_is_that_before_its_points_were_noted() -> None:
    assert forecast.share(1, 64, [told(0.5)]).profile.step_s == pytest.approx(0.5)
    with pytest.raises(RunError, match="not the same"):
        forecast.share(1, 64, [told(0.5), told(0.5, points=[[GRADIENT, 8 * MB, 0]])])


def test_a_measurement_that_was_disturbed_is_named_and_shows_no_impossible_efficiency() -> None:
    def doubts(*by_ranks: tuple[int, float, float]) -> tuple[list[str], list[float | None]]:
        found = shares(*by_ranks)
        table = rows(found, [share.ranks for share in found], ENDLESS)
        return forecast.doubts(found, table), [row.efficiency for row in table]

    assert doubts((1, 0.016, 0.017), (2, 0.008, 0.009)) == ([], [1.0, pytest.approx(0.94, abs=0.01)])
    (sentence,), _ = doubts((1, 0.016, 0.017), (2, 0.016, 1.353))
    assert sentence.startswith("The same steps took 84.6 times as long in one process as in another: other programs")
    (sentence,), efficiencies = doubts((1, 0.8, 0.8), (8, 0.0342, 0.0342))
    assert "up to 2.9 times as fast per sample" in sentence
    assert efficiencies == [1.0, None], "292 % is no efficiency"


def test_the_time_that_measurements_take_is_told_before_and_while_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = {"plan": {"global_size": 64}, "steps_per_epoch": None, "epochs": None}
    monkeypatch.setattr(records, "record", lambda _: Record(start=start))
    monkeypatch.setattr(trials, "once", lambda *_, **__: Trial(results=told(0.5), seconds=50.0))
    said: list[str] = []
    assert len(forecast.missing([1, 2], tmp_path)) == 4
    forecast.measure([1, 2], lambda ranks, folder: (), tmp_path, said.append)
    assert said == [
        "measuring a rank's share of 1 (1 of 2), about 1 min 20 s left",
        "measuring a rank's share of 2 (1 of 2), about 2 min 30 s left",
        "measuring a rank's share of 1 (2 of 2), about 1 min 40 s left",
        "measuring a rank's share of 2 (2 of 2), about 50 s left",
    ]


def test_what_is_lost_sums_to_the_step_and_names_the_limit() -> None:
    found = shares((1, 0.80, 0.80), (2, 0.45, 0.45), (8, 0.15, 0.15))
    fast, slow = Link.of(1000 * MB, 1e-6), Link.of(4 * MB, 1e-6)
    for link, limit in (
        (fast, "smaller shares"),
        (slow, "the network's rate"),
        (Link.of(1e12, 0.1), "the network's latency"),
    ):
        one, *several = rows(found, [1, 2, 4, 8], link)
        assert one.speed_up.middle == pytest.approx(1)
        for row in several:
            assert 0.80 / row.devices + sum(row.losses_s.values()) == pytest.approx(row.step_s.middle)
            assert row.speed_up.middle == pytest.approx(0.80 / row.step_s.middle)
        assert several[-1].limit == limit
    # Between two shares that were measured, one on a line: 16 samples lie at a third of the way from 8 to 32.
    assert rows(found, [1, 4], ENDLESS)[1].step_s.middle == pytest.approx(0.15 + (0.45 - 0.15) / 3)
    alike = rows(shares((1, 0.8, 0.8), (64, 0.1, 0.1), (128, 0.1, 0.1)), [64, 128], ENDLESS)
    assert [row.step_s.middle for row in alike] == pytest.approx([0.1, 0.1]), "of a sample each"


def test_the_error_bar_widens_with_what_differs_between_processes_and_with_the_link() -> None:
    link = Link.of(100 * MB, 1e-6)
    exact = rows(shares((1, 0.8, 0.8), (2, 0.4, 0.4)), [1, 2], link)[1]
    noisy = rows(shares((1, 0.8, 0.9), (2, 0.4, 0.45)), [1, 2], link)[1]
    assert exact.step_s.low == pytest.approx(exact.step_s.high)
    assert noisy.step_s.low < noisy.step_s.middle < noisy.step_s.high
    vague = Links(Link.of(10 * MB, 1e-6), link, Link.of(1000 * MB, 1e-6))
    wide = rows(shares((1, 0.8, 0.8), (2, 0.4, 0.4)), [1, 2], link, between=vague)[1]
    assert wide.step_s.low < exact.step_s.low <= exact.step_s.high < wide.step_s.high


def test_the_cost_is_of_all_devices() -> None:
    row = rows(shares((1, 0.8, 0.8), (2, 0.4, 0.4)), [2], ENDLESS, price=3.6)[0]
    assert row.epoch_s == pytest.approx(40)
    assert row.cost == pytest.approx(2 * 3.6 * 3 * 40 / 3600)


def test_at_most_five_shares_are_measured_the_ends_among_them() -> None:
    devices = [2**power for power in range(11)]
    assert forecast.chosen(devices, 1024) == [1, 2, 16, 128, 1024]
    assert forecast.chosen([1, 2, 4], 1024) == [1, 2, 4]
    assert forecast.chosen([1, 64, 128], 64) == [1, 64], "one sample each"
    assert forecast.chosen(devices, None) == [1, 2, 16, 128, 1024], "of a loader that nobody has seen"


def test_a_link_is_a_preset_or_described_in_words() -> None:
    described = {"10Gbit/s,50us": (1.25e9, 50e-6), "100 mbit, 1ms": (12.5e6, 1e-3), "2GB/s,3µs": (2e9, 3e-6)}
    for text, (bytes_per_s, latency_s) in described.items():
        found = networks.links("--network", text)
        assert found.worst == found.middle == found.best
        assert found.middle.latency_s == pytest.approx(latency_s)
        assert found.middle.message_s(bytes_per_s) == pytest.approx(1 + latency_s)
    for name in (*networks.PRESETS, "100gbe"):
        seconds = [link.message_s(MB) for link in networks.links("--network", name)]
        assert seconds == sorted(seconds, reverse=True), name


def test_what_doctor_has_found_is_a_link(tmp_path: Path) -> None:
    def finding(size: str, seconds: float) -> dict[str, Any]:
        return {"name": f"all-reduce {size}", "value": seconds}

    files = []
    for number, factor in enumerate((1.0, 1.2)):
        rows = [finding("512 B", 4e-3 * factor), finding("1 MiB", 20e-3 * factor), {"name": "memory", "value": 1}]
        rows.append({"name": "all-gather 170 B", "value": 3e-3 * factor})
        rows.append({"name": "computation beside all-reduce", "value": 0.5})
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"ranks": 3, "findings": rows}))
    alone = networks.links("--network", str(files[0]))
    assert np.array(alone.middle.points) == pytest.approx(np.array([[512 / 3, 1e-3], [2**20 / 3, 5e-3]]))
    assert alone.worst == alone.best, "of one time nothing is known of the next"
    assert alone.middle.gather_s == pytest.approx(0.5e-3), "a message of two takes half as long again"
    assert alone.middle.beside == alone.worst.beside == 0.5
    exchanges = Network(between=alone.middle, within=alone.middle)
    assert exchanges.all_gather_s(170, 3) == pytest.approx(3e-3)
    assert exchanges.all_reduce_s(512, 3) == pytest.approx(4e-3)
    both = networks.links("--network", ",".join(map(str, files)))
    assert both.middle.latency_s == pytest.approx(1.1e-3)
    assert both.worst.latency_s > 1.2e-3
    (tmp_path / "lone.json").write_text(json.dumps({"ranks": 1, "findings": []}))
    with pytest.raises(RequestError, match="no all-reduce"):
        networks.links("--network", str(tmp_path / "lone.json"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("digits", "needs --network"),
        ("digits --network 100GbF", "did you mean 100GbE"),
        ("digits --network 10Gbit/s", "Or give a rate and a latency, such as 10Gbit/s,50us"),
        ("digits --network runs/absent", "or the folder of a run"),
        ("digits --network gone.json", "gone.json"),
        ("digits --network 1GbE --devices 4:2", "--devices 4:2: give a range such as 1:1024"),
        ("digits --network 1GbE --price -1", "--price -1.0: give 0 or more"),
        ("digits --network 1GbE --compile", "leave out --compile"),
        ("digits --network 1GbE --strategy dp", "forecasts are of ddp or zero1 or fsdp"),
        ("digits --network 1GbE --strategy fsdp --shard-size 4 --devices 8,10", "--devices 4,8"),
        ("digits --network 1GbE --accelerator cpu --per-node 8", "--per-node 8: there is no GPU"),
    ],
)
def test_what_cannot_be_forecast_is_refused(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert sentence in refusal(capsys, "forecast", *words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--exchange powersgd --powersgd-start 9",
        "--strategy fsdp --shard-modules Block",
        "--strategy fsdp --no-shard-reshard",
    ],
)
def test_a_run_with_other_options_of_its_method_tells_no_link(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, name, *_ = words.split()
    options = flatten(override(recipe("digits"), **{flag.removeprefix("--"): name}))
    (tmp_path / records.FILE).touch()
    monkeypatch.setattr(records, "load", lambda folder: records.Run(name="", folder=folder, options=options))
    sentence = refusal(capsys, "forecast", "digits", "--network", str(tmp_path), *words.split())
    assert "exchanged by another method" in sentence


def test_a_run_of_several_tells_how_fast_the_link_was() -> None:
    found = shares((1, 1.0, 1.0), (2, 0.5, 0.5))
    true, base = cluster(Link.of(1e3, 0.0)), cluster(Link.of(7e5, 0.0))
    lasted = timeline.step_s(found[1].profile, 2, true.network(1, has_trees=False))
    fitted = forecast.fitted(base, found[1], [0.9 * lasted, lasted, 1.1 * lasted], has_trees=False)
    for link, seconds in zip(fitted, (1.09 * lasted, lasted, 0.91 * lasted), strict=True):
        network = cluster(link).network(1, has_trees=False)
        assert timeline.step_s(found[1].profile, 2, network) == pytest.approx(seconds, rel=2e-3)
    with pytest.raises(RequestError, match="it ran on faster devices"):
        forecast.fitted(base, found[1], [0.4, 0.4], has_trees=False)


def test_of_two_models_that_are_alike_both_exchange_their_gradients() -> None:
    models, clock = [nn.Linear(10, 10), nn.Linear(10, 10)], Clock()
    mark_exchanges(models, clock, on_gpu=False)
    for _ in range(2):
        x = torch.randn(4, 10)
        for model in models:
            model(x).sum().backward()
        clock.end_step()
    seen = {**told(0.5), "profile": clock.profile()}
    assert traffic.bytes_a_step(forecast.share(2, 8, [seen]).profile, 2) == 2 * 110 * 4

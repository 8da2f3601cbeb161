"""What our training loops cost a step over a bare one, metrics recorded, where the model costs next to nothing.

Ours are `lockstep.train`, whole, and a user's own loop over a session: each step's loss and rate go to steps.jsonl. The
bare loop is what a tutorial shows: a DataLoader's batches, or shuffled indices of tensors, forward, cross-entropy,
backward, step; it records nothing. Each is compared with the bare loop that has its optimizer and its kind of data.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep import RunConfig, World, override
from lockstep.jobs.job import assemble
from lockstep.runs.opened import OpenRun
from lockstep.sessions.session import Session

from .harness import Report, interleave, verdict
from .loops import Marks, configured, engine_step_s

GOAL_US = 15.0
BATCH = 64
STEPS = 500
ROUNDS = 30


def images() -> tuple[TensorDataset, TensorDataset]:
    """Return digits-like tensors (1, 8, 8): enough for all steps of a block without the end of an epoch."""
    generator = torch.Generator().manual_seed(0)

    def some(samples: int) -> TensorDataset:
        x = torch.randn(samples, 1, 8, 8, generator=generator)
        return TensorDataset(x, torch.randint(10, (samples,), generator=generator))

    return some(BATCH * (STEPS + 1)), some(BATCH)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The same samples, read one by one by code of one's own."""

    def __init__(self) -> None:
        self._x, self._y = images()[0].tensors

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]


def measure() -> Report:
    """Return microseconds a step of the loops, and their differences."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.jsonl"
            loops = {
                "bare": bare(),
                "train": ours(path),
                "loader": with_loader(images()[0]),
                "session": in_session(Path(folder), images()[0]),
                "rows": with_loader(Rows()),
                "session over rows": in_session(Path(folder), Rows()),
            }
            found = interleave(loops, rounds=ROUNDS, warm_up=3)
    finally:
        torch.set_num_threads(threads)
    over, over_loader = found["train"].minus(found["bare"]), found["session"].minus(found["loader"])
    over_rows = found["session over rows"].minus(found["rows"])
    holds = max(over.median, over_loader.median) <= GOAL_US
    return Report(
        title="What the loop costs a step",
        finding=f"`lockstep.train`, metrics recorded, costs {over.median:+.1f} µs a step over a bare loop, and a "
        f"session {over_loader.median:+.1f} over the same loop without it, both with fused SGD (goal: at most "
        f"+{GOAL_US:.0f}, {verdict(holds)}).",
        columns=("loop", "µs a step", "over the bare one, µs"),
        rows=(
            ("bare, from tensors", found["bare"].text(".1f"), ""),
            ("lockstep.train", found["train"].text(".1f"), over.text("+.1f")),
            ("bare, from a DataLoader", found["loader"].text(".1f"), ""),
            ("the same over a session", found["session"].text(".1f"), over_loader.text("+.1f")),
            ("bare, from a data set of one's own", found["rows"].text(".1f"), ""),
            ("the same over a session", found["session over rows"].text(".1f"), over_rows.text("+.1f")),
        ),
        method=f"Model `mlp` (64–128–10), batch {BATCH}, float32, SGD(fused=True) with momentum and weight decay, one "
        f"thread, one process. A block is {STEPS} steps without evaluation or checkpoint; ours are timed from the "
        "record of their first step to the record of their last, so that recording is in it. The "
        "DataLoader is torch's over a TensorDataset, or over a class whose samples are its rows, without workers: "
        "whether it has drawn is looked at after each batch.",
        n=f"{ROUNDS} rounds of {STEPS} steps of each loop",
    )


def ours(path: Path) -> Callable[[], float]:
    """Return a function that measures our loop: µs a step."""
    config = configured(
        model="mlp", data="benchmarks.overhead:images", batch=BATCH, precision="fp32", max_steps=STEPS + 1
    )
    return lambda: engine_step_s(config, path) * 1e6


def bare() -> Callable[[], float]:
    """Return a function that measures the bare loop over tensors: µs a step."""
    x, y = images()[0].tensors
    model, optimizer = _model()

    def run() -> float:
        order = torch.randperm(len(x))
        batches = ((x[index], y[index]) for index in order[: STEPS * BATCH].split(BATCH))
        return _seconds(model, optimizer, batches) / STEPS * 1e6

    return run


def _loader(dataset: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=BATCH, shuffle=True)


def with_loader(dataset: Dataset[Any]) -> Callable[[], float]:
    """Return a function that measures the bare loop over a DataLoader: µs a step."""
    model, optimizer = _model()
    loader = _loader(dataset)

    def run() -> float:
        batches = iter(loader)
        next(batches)
        return _seconds(model, optimizer, islice(batches, STEPS)) / STEPS * 1e6

    return run


def in_session(folder: Path, dataset: Dataset[Any]) -> Callable[[], float]:
    """Return a function that measures the same loop over a session: µs a step."""
    config = override(RunConfig(), channels_last="off", max_steps=STEPS + 1)

    def run() -> float:
        marks = Marks(folder / "session.jsonl")
        try:
            with Session(config, World.alone(), nullcontext(OpenRun(config, marks, None))) as session:
                model, optimizer, loader = session.prepare(*_model(), _loader(dataset))
                for _ in session.epochs(1):
                    for x, y in loader:
                        loss = nn.functional.cross_entropy(model(x), y)
                        session.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
        finally:
            marks.close()
        return marks.step_s * 1e6

    return run


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = assemble(configured(model="mlp", data="benchmarks.overhead:images", batch=BATCH), World.alone()).model
    model.train()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)


def _seconds(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Train on the batches and return the seconds."""
    begin_s = time.perf_counter()
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - begin_s

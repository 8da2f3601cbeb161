"""What a device does besides training steps: digests, snapshots for checkpoints, the step of Muon."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import World
from lockstep.checkpoint import Checkpoints
from lockstep.checkpoint.state import State
from lockstep.checks.replicas import facts
from lockstep.training.muon import Muon

from .harness import Report, Series, interleave
from .steps import NETWORKS, REHEARSED, Measured, Network, Step, name_of

_OPTIONS: dict[str, Any] = {"lr": 1e-3, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1}


def measure_costs(device: torch.device, *, only: str, is_rehearsal: bool) -> Iterator[Report]:
    """Yield the report on the state of a GPT-2 small: its weights, and AdamW's two moments of each."""
    network = (REHEARSED if is_rehearsal else NETWORKS)[0]
    rounds = 2 if is_rehearsal else 10
    rows: list[tuple[str, str, str]] = []
    tensors = _state(network, device)
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    size = f"{size_bytes / 2**20:,.0f} MiB"
    words = torch.zeros(size_bytes // 8, dtype=torch.int64, device=device)
    passes: dict[str, Callable[[], object]] = {"digest": partial(facts, tensors, device), "read": words.sum}
    found = interleave({name: partial(_milliseconds, device, work) for name, work in passes.items()}, rounds=rounds)
    del passes, words
    rows += [(f"digest of {size}", found["digest"].text(), f"{found['digest'].per(found['read']).text()} × one read")]
    waits, writes = _saved(tensors, 2 if is_rehearsal else 4)
    rows += [(f"save of {size}: the loop waits, first", f"{waits[0]:.1f}", "")]
    rows += [(f"save of {size}: the loop waits, later", Series(tuple(waits[1:])).text(".1f"), "")]
    rows += [(f"save of {size}: on disk after", Series(tuple(writes)).text(".0f"), "")]
    rows += _muon(network, device, rounds)
    yield Report(
        title=f"Digests, snapshots and Muon on one {name_of(device)}",
        finding=f"A digest takes {found['digest'].per(found['read']).median:.2f} times one read of the same bytes, the "
        f"first save {waits[0]:.0f} ms of the loop, later ones {Series(tuple(waits[1:])).median:.0f} ms.",
        columns=("what", "ms", "compared"),
        rows=rows,
        method=f"State of {network.name.split(',')[0]} with AdamW. A read is the sum of as many 64-bit integers in one "
        "piece. Muon steps the same matrices by torch.optim.Muon and by lockstep's, in turns.",
        n=f"{rounds} rounds; {len(waits)} saves",
    )


def _state(network: Network, device: torch.device) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in network.model(device).named_parameters():
        moments = (torch.zeros_like(parameter) for _ in range(2))
        tensors |= dict(
            zip(
                (f"model/{name}", f"optimizer/{name}.1", f"optimizer/{name}.2"),
                (parameter.detach(), *moments),
                strict=True,
            )
        )
    return tensors


def _milliseconds(device: torch.device, work: Callable[[], object]) -> float:
    _wait(device)
    begin_s = time.perf_counter()
    work()
    _wait(device)
    return 1e3 * (time.perf_counter() - begin_s)


def _saved(tensors: dict[str, Tensor], times: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds that each save holds the loop up, and those until it is on disk."""
    waits, writes = [], []
    with tempfile.TemporaryDirectory() as folder:
        saver = Checkpoints(Path(folder), warn=print)
        for step in range(times):
            begin_s = time.perf_counter()
            saver.save(State(tensors, {"step": step}), step=step, best=False)
            waits.append(1e3 * (time.perf_counter() - begin_s))
            saver.wait()
            writes.append(1e3 * (time.perf_counter() - begin_s))
    return waits, writes


@contextlib.contextmanager
def _stepping(kind: Callable[..., torch.optim.Optimizer], network: Network, world: World) -> Iterator[Step]:
    parameters = [nn.Parameter(each.detach()) for each in network.model(world.device).parameters() if each.ndim == 2]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    yield kind(parameters, **_OPTIONS).step


def _muon(network: Network, device: torch.device, rounds: int) -> list[tuple[str, str, str]]:
    torchs = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {"torch.optim.Muon": torchs, "Muon of lockstep": Muon}
    with contextlib.ExitStack() as stack:
        subjects = {
            name: Measured(partial(_stepping, kind), network, World.alone(device), stack)
            for name, kind in kinds.items()
        }
        found = interleave({name: partial(subject.round, 2) for name, subject in subjects.items()}, rounds=rounds)
        costs = {name: subject.cost(found[name], 2) for name, subject in subjects.items()}
    reference = found["torch.optim.Muon"]
    return [
        (
            f"step of {name}",
            cost.step_ms.text(),
            f"{cost.step_ms.per(reference).median:.3f} × torch's; host {cost.host_ms:.2f} ms, "
            f"{cost.operations} operations, {cost.launches} launches",
        )
        for name, cost in costs.items()
    ]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""The bytes that a step is forecast to send are those that ranks' sockets send, under each method."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.compare import forecast, traffic
from lockstep.compare.clock import Clock, mark_exchanges
from lockstep.compare.measured import blocks_of, facts_of
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.world.world import World

from .. import loops
from ..pool import RankPool

STEPS = 5  # of an epoch
_BYTES_SENT = 200  # the offset of tcpi_bytes_sent in Linux's struct tcp_info


class Block(nn.Module):
    """A residual block of two layers; the rows of neither divide into four ranks' shards."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(90, 201), nn.Linear(201, 90)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.narrow(self.wide(x).relu())
        return output


def net() -> nn.Sequential:
    """Return blocks between a layer that is frozen and one with BatchNorm; 1.3 MB in all."""
    layers = [
        nn.Linear(32, 90).requires_grad_(False),
        Block(),
        Block(),
        Block(),
        nn.BatchNorm1d(90),
        nn.Linear(90, 1100),
    ]
    return nn.Sequential(*layers, nn.Linear(1100, 4))


def _sent_bytes() -> dict[int, int]:
    """Return the bytes that each of this process's TCP sockets has sent so far, by inode."""
    sent_bytes = {}
    for path in Path("/proc/self/fd").iterdir():
        if path.is_socket():
            with socket.socket(fileno=os.dup(int(path.name))) as handle:
                if handle.family in (socket.AF_INET, socket.AF_INET6) and handle.type == socket.SOCK_STREAM:
                    info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent_bytes[path.stat().st_ino] = struct.unpack_from("Q", info, _BYTES_SENT)[0]
    return sent_bytes


def _train(world: World, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the bytes that this rank sends per step, and the profile if it is the only one."""
    torch.set_num_threads(1)
    method = override(RunConfig(), accelerator="cpu", **options).parallel
    mine = {key: value for key, value in options.items() if world.size > 1 or key == "accumulate"}
    session = loops.session(world, precision="fp32", verify_every=0, **mine)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(24 * STEPS, 32), torch.arange(24 * STEPS) % 4)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, 24))
    clock, sent_bytes = Clock(), []
    blocks = blocks_of([model], method) if world.size == 1 else []
    if world.size == 1:
        mark_exchanges([model], clock, on_gpu=False, blocks=blocks, is_last=lambda: session.is_last)
    with session:
        for _ in session.epochs(2):
            sent_bytes.append(_sent_bytes())
            for x, y in loader:
                session.backward(nn.functional.cross_entropy(model(x), y))
                if session.is_last:
                    optimizer.step()
                    optimizer.zero_grad()
                    clock.end_step()
        sent_bytes.append(_sent_bytes())
        facts = facts_of(session.prepared, method) if world.size == 1 else {}
    # Not of sockets that an earlier test has left, and that close in between.
    sent = [count - sent_bytes[1].get(inode, 0) for inode, count in sent_bytes[2].items()]
    return sum(sent) / STEPS, clock.profile() | facts


METHODS: dict[str, dict[str, Any]] = {
    "ddp": {"accumulate": 3},
    "bf16": {"exchange": "bf16"},
    "powersgd": {"exchange": "powersgd", "powersgd_rank": 2},
    "local-sgd": {"exchange": "local-sgd", "exchange_every": 4},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp in pairs": {"strategy": "fsdp", "shard_size": 2},
    "fsdp that gathers once": {"strategy": "fsdp", "shard_reshard": False, "accumulate": 3},
    "fsdp in 16 bits": {"strategy": "fsdp", "exchange": "bf16"},
}
_FAST = [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "fsdp")) for name in METHODS
]  # which its variants cover
_MORE, _MORE_BYTES = 0.02, 5200  # of TCP beyond the tensors: headers of ranks and gloo, by size and by peer


@pytest.mark.parametrize("method", _FAST)
def test_sockets_send_the_bytes_of_the_forecast(method: str, pool: RankPool) -> None:
    _check(method, 4, pool)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_sockets_of_two_ranks_send_the_bytes_of_the_forecast(method: str, pool: RankPool) -> None:
    _check(method, 2, pool)


def _check(method: str, ranks: int, pool: RankPool) -> None:
    options = {"strategy": "ddp", **METHODS[method]}
    _, measured = pool.run(1, _train, options)[0]
    told = {"step_s": [1.0], "peak_memory_bytes": {"host": 1.0, "device": None}, "profile": measured}
    profile = forecast.share(ranks, 24, [told]).profile
    sent = [each_bytes for each_bytes, _ in pool.run(ranks, _train, options, collectives="gloo")]
    forecast_bytes, sent_bytes = traffic.bytes_a_step(profile, ranks), sum(sent) / ranks
    assert 0 <= sent_bytes - forecast_bytes < _MORE * forecast_bytes + _MORE_BYTES * (ranks - 1)

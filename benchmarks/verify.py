"""What it costs to compare replicas while they train: one digest, and the checks of a whole run at the default K.

A digest has to read every byte once, so that it is measured against the least that reads them: the sum of as many
64-bit integers in one piece of memory. torch.hash_tensor over each tensor where it lies is beside it.

The share of a run's time is what its own proof says, divided by the seconds that it trained; a run with
`--verify-every 0` takes turns with it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep import RunConfig, World, launch, override, train
from lockstep.checks.digest import digest
from lockstep.jobs.job import assemble
from lockstep.record.base import Recorder

from .harness import Report, Series, interleave, verdict
from .loops import configured

GOAL = 2.0
GOAL_SHARE = 0.005
GOAL_S = 30.0
ROUNDS = 30
REPEATS = 5
RANKS = 2
RUNS = 6
PROOFS = 3
STEPS = 300  # an epoch, so that one evaluation, before which replicas are compared, falls to so many
RUN: dict[str, Any] = {
    "model": "resnet8",
    "data": "fake",
    "samples": 64 * STEPS,
    "image_size": 16,
    "batch": 64,
    "precision": "fp32",
    "strategy": "ddp",
    "devices": RANKS,
}


def measure() -> Report:
    """Return the time of a digest by that of reading, the share of a run that its checks take, and a proof's time."""
    digests, size_bytes = digested()
    ratio = digests["digest"].per(digests["read"])
    found = launch(on_rank, configured(**RUN, max_steps=STEPS))
    assert found is not None
    runs = {name: Series(tuple(values)) for name, values in found.items()}
    share, slower = runs["share"], runs["checked"].per(runs["unchecked"])
    proved = interleave({"gradients": gradients_s}, rounds=PROOFS)["gradients"]
    return Report(
        title="What it costs to compare replicas while they train",
        finding=f"A digest of ResNet-50's parameters and momentum takes {ratio.median:.2f} times as long as to read "
        f"them once (goal: at most {GOAL:.0f}, {verdict(ratio.median <= GOAL)}). The checks of a run on {RANKS} ranks "
        f"take {share.median:.2%} of the time of training, as often as they come by default (goal: at most "
        f"{GOAL_SHARE:.1%}, {verdict(share.median <= GOAL_SHARE)}). `lockstep verify gradients digits --devices 2` "
        f"takes {proved.median:.1f} s (goal: at most {GOAL_S:.0f}, {verdict(proved.median <= GOAL_S)}).",
        columns=("what", "measured", "÷ the one below it"),
        rows=(
            ("digest, ms", digests["digest"].text(), ratio.text()),
            ("read: the sum as 64-bit integers, ms", digests["read"].text(), ""),
            ("torch.hash_tensor, ms", digests["hash"].text(), digests["hash"].per(digests["read"]).text()),
            ("checks by the run's own account, share of training", share.text(".3%"), ""),
            ("checks in a run", runs["checks"].text(".0f"), ""),
            ("run with its checks, ms a step", runs["checked"].text(), slower.text(".3f")),
            ("run with --verify-every 0, ms a step", runs["unchecked"].text(), ""),
            ("lockstep verify gradients digits --devices 2, s", proved.text(".1f"), ""),
        ),
        method=f"ResNet-50 for 1,000 classes, channels_last, and momentum as large: {size_bytes / 1e6:.0f} MB in all, "
        f"float32, one thread, {REPEATS} passes a turn. hash_tensor is held against reading as well. The runs train "
        f"resnet8 on made-up images of 16 × 16, global batch 64, one epoch of {STEPS} steps, gloo, one thread a rank; "
        "the evaluation is left out of the time.",
        n=f"{ROUNDS} rounds of each pass over memory, {RUNS} of each run, {PROOFS} of the command",
    )


def gradients_s() -> float:
    """Return the seconds of the whole command, the import of torch by each process included."""
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        words = ("verify", "gradients", "digits", "--devices", str(RANKS), "--accelerator", "cpu", "--output", folder)
        subprocess.run([sys.executable, "-m", "lockstep", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin_s


def digested() -> tuple[dict[str, Series], int]:
    """Return milliseconds of a digest, of reading and of torch's hash, in turns; and the bytes that each of them reads.

    One thread: a rank has a core of its own.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        passes, size_bytes = passes_over(torch.device("cpu"))
        subjects = {name: _timed(work) for name, work in passes.items()}
        return interleave(subjects, rounds=ROUNDS, warm_up=2), size_bytes
    finally:
        torch.set_num_threads(threads)


def passes_over(device: torch.device) -> tuple[dict[str, Callable[[], object]], int]:
    """Return what reads ResNet-50's parameters and momentum on `device` once, by name, and how many bytes those are."""
    config = configured(model="torchvision.resnet50", classes=1000, data="fake", image_size=64, batch=8)
    job = assemble(config, World.alone(device))
    held = list(job.replicated().values())
    words = [each for each in map(_words, held) if len(each)]  # of one number alone nothing is left
    whole = torch.cat(words)  # in one piece: on a GPU a call on each would take longer than the reading
    passes: dict[str, Callable[[], object]] = {
        "digest": lambda: digest(held),
        "read": whole.sum,
        "hash": lambda: [torch.hash_tensor(each) for each in words],
    }
    return passes, sum(each.nbytes for each in held)


def _words(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as 64-bit integers (n,), the last odd element left out."""
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
    return flat[: len(flat) // 2 * 2].view(torch.int64)


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def milliseconds() -> float:
        begin_s = time.perf_counter()
        for _ in range(REPEATS):
            work()
        return (time.perf_counter() - begin_s) / REPEATS * 1e3

    return milliseconds


def on_rank(config: RunConfig, world: World) -> dict[str, list[float]]:
    """Return by run: milliseconds a step with the default checks and without, their share and number (*collective*)."""
    torch.set_num_threads(1)
    accounts: list[dict[str, float]] = []
    subjects = {
        "checked": lambda: _step_ms(config, world, accounts),
        "unchecked": lambda: _step_ms(override(config, verify_every=0), world, []),
    }
    found = {name: list(series.values) for name, series in interleave(subjects, rounds=RUNS).items()}
    return found | {name: [each[name] for each in accounts[1:]] for name in ("share", "checks")}  # less the warm-up's


class Account(Recorder):
    """A recorder that adds up the seconds of training, evaluations left out, and keeps how the run ended."""

    def __init__(self) -> None:
        self.train_s = 0.0
        self.ended: dict[str, Any] = {}
        self._done = 0

    def record(self, event: str, **fields: Any) -> None:
        """Note an interval's steps, or the end."""
        if event == "log":
            self.train_s += fields["step_s"] * (fields["step"] - self._done)
            self._done = fields["step"]
        elif event == "finish":
            self.ended = fields


def _step_ms(config: RunConfig, world: World, accounts: list[dict[str, float]]) -> float:
    """Train and return the mean milliseconds of a step; what the checks were is added to `accounts` (*collective*)."""
    account = Account()
    steps = train(config, world, account).steps
    told = account.ended["proof"]["replicas"]
    accounts.append({"share": (told["cost_s"] or 0.0) / account.train_s, "checks": told["times"]})
    return account.train_s / steps * 1e3

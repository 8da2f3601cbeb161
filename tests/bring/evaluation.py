"""Evaluation within training, collectives on some ranks, early ends."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from .catalogue import REFUSED, RIGHT, SKIPPED, TOLD, Numbers, loop
from .common import checksum, descend, error, regression, trio


def evaluate(session: Any, model: Any, test: Any) -> tuple[float, int]:
    """Return the sum of squares over the test set, and its samples."""
    total, samples = 0.0, 0
    for x, y in session.evaluating(test):
        total += session.sum(functional.mse_loss(model(x), y, reduction="sum").item())
        samples += session.sum(len(y))
    return total, samples


@loop("schedule", quick=True)
@loop("swapped", "score")
def code_after_an_evaluation(session: Any, how: str) -> Numbers:
    """Evaluate within a step, before its schedule, a swap of weights, or an object's update."""
    model, optimizer, loader = trio(session)
    schedule = session.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    stopper = session.prepare(Tally())
    for _ in session.epochs(4):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            if session.is_last:
                kept = [parameter.detach().clone() for parameter in model.parameters()]
                if how == "swapped":
                    copy_into(model, [value * 0.5 for value in kept])
                total, _ = evaluate(session, model, DataLoader(regression(7), batch_size=4))
                copy_into(model, kept)
                schedule.step()
                stopper.count += 1
                if how == "score":
                    session.score(-total)
    return [checksum(model), optimizer.param_groups[0]["lr"], stopper.count]


@loop(outcome=TOLD, alone=RIGHT, accumulated=SKIPPED, has_plain=False, quick=True)
def state_by_rank(session: Any, how: str) -> Numbers:
    """Prepare an object whose state differs between ranks, as an environment's does."""
    model, optimizer, loader = trio(session)
    tally = session.prepare(Tally())
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            tally.count += session.rank
    return [checksum(model) + session.sum(tally.count)]


class Tally:
    """An object that counts."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def copy_into(model: Any, values: list[Any]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


@loop("list", quick=True)
@loop("list-small", outcome=RIGHT | TOLD)
def evaluate_by_list(session: Any, how: str) -> Numbers:
    """Read the whole evaluation before computing."""
    model, optimizer, loader = trio(session)
    test = DataLoader(regression(2 if how == "list-small" else 12), batch_size=4)
    numbers: Numbers = []
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
        batches = list(session.evaluating(test))
        total = sum(functional.mse_loss(model(x), y, reduction="sum").item() for x, y in batches)
        numbers.extend((session.sum(total), session.sum(sum(len(y) for _, y in batches))))
    return [checksum(model), *numbers]


@loop("all", outcome=RIGHT | REFUSED)
@loop("one", outcome=REFUSED, alone=RIGHT | REFUSED, quick=True)
def break_within_evaluation(session: Any, how: str) -> Numbers:
    """Leave an evaluation before its end, on all ranks or on one."""
    model, optimizer, loader = trio(session)
    test = DataLoader(regression(24), batch_size=6)
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
        # No name holds the iterator, which ends with the loop.
        for at, (x, _) in enumerate(session.evaluating(test)):
            model(x)
            if at == 1 and (how == "all" or session.is_main):
                break
    return [checksum(model)]


@loop("evaluating", "sum", "mean", "gather", "max", outcome=REFUSED, alone=RIGHT, quick=True)
@loop("log", outcome=REFUSED | RIGHT, alone=RIGHT)
@loop("backward", "break", outcome=REFUSED, alone=RIGHT, accumulated=SKIPPED)
@loop("loader", outcome=RIGHT | REFUSED, alone=RIGHT)
@loop("print")
@loop("score", "stop", "sum-last", outcome=REFUSED, alone=RIGHT)
def main_rank_only(session: Any, how: str) -> Numbers:
    """Call something on rank 0 alone."""
    model, optimizer, loader = trio(session, data=regression(24))
    test = DataLoader(regression(12), batch_size=4)
    for _ in session.epochs(2):
        for at, (x, y) in enumerate(loader):
            loss = error(model, x, y)
            if how == "backward" and at == 1 and not session.is_main:
                continue
            descend(session, optimizer, loss)
            if how == "break" and at == 1 and session.is_main:
                break
            if session.is_main:
                value = loss.detach()
                if how == "log":
                    session.log(mse=value)
                elif how in ("sum", "max", "gather"):
                    getattr(session, how)(value[None])
                elif how == "mean":
                    session.mean(value)
        if not session.is_main:
            continue
        if how == "evaluating":
            for x, _ in session.evaluating(test):
                model(x)
        elif how == "loader":
            with torch.no_grad():
                for x, _ in loader:
                    model(x)
        elif how == "stop":
            session.stop_if_asked()
        elif how == "print":
            session.print("epoch")
        elif how == "score":
            session.score(1.0)
    if how == "sum-last" and session.is_main:
        session.sum(1.0)
    return [checksum(model)]


@loop("crossed", outcome=REFUSED, alone=RIGHT)
def other_collectives(session: Any, how: str) -> Numbers:
    """Call another collective on each rank."""
    model, optimizer, loader = trio(session, data=regression(24))
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
        session.sum(1.0) if session.is_main else session.gather(torch.ones(3))
    return [checksum(model)]


@loop("agreed", "agreed-best", resumed=SKIPPED, quick=True)
@loop("apart", outcome=REFUSED, alone=RIGHT, accumulated=SKIPPED)
@loop("epochs-apart", outcome=REFUSED, alone=RIGHT)
def early_stopping(session: Any, how: str) -> Numbers:
    """End training by a number: of all ranks, or of each rank alone."""
    model, optimizer, loader = trio(session, data=regression(24), lr=0.05)
    test = DataLoader(regression(12), batch_size=4)
    best, epochs = float("inf"), 0
    for epoch in session.epochs(6):
        for x, y in loader:
            loss = error(model, x, y)
            if how == "apart" and epoch == 1 and x[0, 0] > 0.5:
                break
            descend(session, optimizer, loss)
        epochs += 1
        total = 0.0 if how == "apart" else evaluate(session, model, test)[0]
        if how == "agreed-best":
            session.score(-total)
        if how == "epochs-apart" and session.rank == 0 and epoch == 1:
            break
        if not how.endswith("apart") and total > 0.98 * best:
            break
        best = min(best, total)
    return [checksum(model), epochs]


@loop("predictions", "ragged", quick=True)
def gather_predictions(session: Any, how: str) -> Numbers:
    """Gather predictions for a metric that is no mean."""
    model, optimizer, loader = trio(session)
    test = DataLoader(regression(11), batch_size=4)
    numbers: Numbers = []
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
        outputs = []
        for x, _ in session.evaluating(test):
            output = model(x)[:, 0]
            outputs.append(session.gather(output[output > 0] if how == "ragged" else output))
        joined = torch.cat(outputs)
        numbers.extend((len(joined), float(joined.sort().values.median()), float(joined.square().sum())))
    return [checksum(model), *numbers]


@loop("mean", resumed=SKIPPED)
@loop("nan", "apart", outcome=RIGHT | REFUSED | TOLD, resumed=SKIPPED)
def scores(session: Any, how: str) -> Numbers:
    """Score the weights of each epoch."""
    model, optimizer, loader = trio(session)
    for epoch in session.epochs(3):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
        values = {"mean": -evaluate(session, model, DataLoader(regression(11), batch_size=4))[0], "nan": float("nan")}
        values["apart"] = float(session.rank * (epoch + 1))
        session.score(values.get(how, 1.0))
    return [checksum(model)]


UNEVEN = {
    "evaluation": ("rank 0 begins an evaluation", "rank 1 ends an epoch"),
    "evaluation-break": ("rank 0 ends an epoch", "rank 1 ends an evaluation"),
    "value": ("rank 0 records its steps with error of step", "rank 1 records its steps without"),
    "names": ("rank 0 records its steps with error_0 of step", "rank 1 records its steps with error_1 of step"),
    "sum": ("with sum torch.float64 (2,)", "with sum torch.float64 (1,)"),
    "reinitialised": ("drawn anew on each rank",),
    "frozen": ("rank 0 trains micro-batch 1 of epoch 0", "with the trainable parameters"),
}
"""What the sentence says of calls that the ranks do not make alike."""


@loop(*UNEVEN, outcome=REFUSED, alone=RIGHT)
def uneven_calls(session: Any, how: str) -> Numbers:
    """Make other calls on one rank."""
    model, optimizer, loader = trio(session, data=regression(24))
    test = DataLoader(regression(12), batch_size=4)
    for epoch in session.epochs(2):
        for x, y in loader:
            if how == "frozen" and session.step == 1 and not session.is_main:
                model[0].weight.requires_grad_(False)
            loss = error(model, x, y)
            descend(session, optimizer, loss)
            if how == "value" and session.is_main:
                session.log(error=loss)
            if how == "names":
                session.log(**{f"error_{session.rank}": loss})
        if (how == "evaluation" and session.is_main) or how == "evaluation-break":
            for at, (x, _) in enumerate(session.evaluating(test)):
                model(x)
                if how == "evaluation-break" and session.is_main and at == 1:
                    break
        if how == "sum":
            session.sum(torch.zeros(2 if session.is_main else 1, dtype=torch.float64))
        if how == "reinitialised" and epoch == 0 and session.world.size > 1:
            model[0].reset_parameters()
    return [checksum(model)]

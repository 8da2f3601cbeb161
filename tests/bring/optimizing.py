"""Ways to step: accumulation by hand, clipping, schedules, averages, optimizers around optimizers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from .catalogue import REFUSED, RIGHT, SKIPPED, TOLD, Numbers, loop
from .common import checksum, descend, error, mlp, regression, seeded, trio


@loop("2", quick=True, accumulated=SKIPPED)
@loop("7", "3-end-of-epoch", accumulated=SKIPPED)
def accumulate_by_hand(session: Any, how: str) -> Numbers:
    """Step in each k-th batch; gradients of an epoch's last batches wait for the next epoch, or are stepped there."""
    every, _, variant = how.partition("-")
    count = int(every)
    data = regression(30 if count < 5 else 48)
    model, optimizer, loader = trio(session, data=data, momentum=0.0)
    for _ in session.epochs(4):
        for at, (x, y) in enumerate(loader):
            session.backward(error(model, x, y) / count)
            is_end = variant == "end-of-epoch" and at + 1 == len(loader)
            if (at + 1) % count == 0 or is_end:
                optimizer.step()
                optimizer.zero_grad()
    return [checksum(model)]


@loop("first", "keep", "model", quick=True)
@loop("by-hand", "never")
def zero_gradients(session: Any, how: str) -> Numbers:
    """Zero gradients at other places, in other ways, or never."""
    model, optimizer, loader = trio(session, momentum=0.0, lr=0.02)
    for _ in session.epochs(2):
        for x, y in loader:
            if how == "first":
                optimizer.zero_grad()
            session.backward(error(model, x, y))
            optimizer.step()
            if how == "keep":
                optimizer.zero_grad(set_to_none=False)
            elif how == "model":
                model.zero_grad()
            elif how == "by-hand":
                for weight in model.parameters():
                    weight.grad = None
    return [checksum(model)]


@loop("added", saves_by_epoch=True)
@loop("clipped", quick=True)
def left_gradients(session: Any, how: str) -> Numbers:
    """Leave gradients of one pass for the next one, which adds to them; or never zero them, and clip."""
    model, optimizer, loader = trio(session, momentum=0.0, lr=0.02)
    for _ in session.epochs(3):
        for x, y in loader:
            session.backward(error(model, x, y))
            if how == "clipped":
                nn.utils.clip_grad_norm_([weight for weight in model.parameters() if weight.grad is not None], 0.2)
            optimizer.step()
            if how == "added":
                optimizer.zero_grad()
        for x, y in loader if how == "added" else ():
            optimizer.zero_grad()
            session.backward(error(model, x, y))
            optimizer.step()
    return [checksum(model)]


@loop("lbfgs", "sgd", outcome=REFUSED, quick=True)
def closure(session: Any, how: str) -> Numbers:
    """Give `step` a closure."""
    model = seeded(mlp)
    optimizer: Any = (torch.optim.LBFGS if how == "lbfgs" else torch.optim.SGD)(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(regression(), batch_size=6))
    for _ in session.epochs(2):
        for x, y in loader:

            def again(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = error(model, x, y)
                session.backward(loss)
                return loss

            optimizer.step(again)
    return [checksum(model)]


class Sharpness(Optimizer):
    """SAM: climb to the worst weights nearby, take the gradient there, and step from where it was."""

    def __init__(self, parameters: Any, base: type[Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb."""
        norm = torch.stack([weight.grad.norm() for weight in self._weights() if weight.grad is not None]).norm()
        for weight in self._weights():
            assert weight.grad is not None
            self.state[weight]["before"] = weight.clone()
            weight.add_(weight.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Go back, and step."""
        for weight in self._weights():
            weight.copy_(self.state[weight]["before"])
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        """Step from where the weights were."""
        self.second_step()


@loop("second-step", "step", outcome=RIGHT | REFUSED, accumulated=SKIPPED, resumed=RIGHT | REFUSED, quick=True)
def sharpness_aware(session: Any, how: str) -> Numbers:
    """Run two forward and backward passes for each step."""
    model = seeded(mlp)
    optimizer: Any = Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(regression(), batch_size=6))
    for _ in session.epochs(2):
        for x, y in loader:
            session.backward(error(model, x, y))
            optimizer.first_step()
            session.backward(error(model, x, y))
            optimizer.step() if how == "step" else optimizer.second_step()
    return [checksum(model)]


@loop(quick=True)
def schedule_by_step(session: Any, how: str) -> Numbers:
    model, optimizer, loader = trio(session)
    schedules = session.prepare(CosineAnnealingLR(optimizer, T_max=3 * len(loader)))
    rates = []
    for _ in session.epochs(3):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            schedules.step()
            if session.is_last:
                rates.append(float(optimizer.param_groups[0]["lr"]))
    return [checksum(model), *rates]


@loop("cosine", accumulated=RIGHT | TOLD | REFUSED, resumed=RIGHT | TOLD | REFUSED)
@loop("is-last", resumed=RIGHT | TOLD | REFUSED)
def schedule_unprepared(session: Any, how: str) -> Numbers:
    """Step a schedule that was not prepared."""
    model, optimizer, loader = trio(session)
    unprepared = CosineAnnealingLR(optimizer, T_max=3 * len(loader))
    for _ in session.epochs(3):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            if how != "is-last" or session.is_last:
                unprepared.step()
    return [checksum(model)]


@loop()
def plateau(session: Any, how: str) -> Numbers:
    """Lower the rate where the evaluation does not improve."""
    model, optimizer, loader = trio(session)
    test = DataLoader(regression(11), batch_size=4)
    rule = session.prepare(ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5))
    for _ in session.epochs(4):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
        total = 0.0
        for x, y in session.evaluating(test):
            total += session.sum(nn.functional.mse_loss(model(x), y, reduction="sum").item())
        rule.step(total / 11)
    return [checksum(model), optimizer.param_groups[0]["lr"]]


@loop("prepared", quick=True)
@loop("unprepared", accumulated=SKIPPED, resumed=SKIPPED)
@loop("per-epoch")
def average_of_weights(session: Any, how: str) -> Numbers:
    """Average the weights by torch's AveragedModel."""
    model, optimizer, loader = trio(session)
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if how != "unprepared":
        average = session.prepare(average)
    for _ in session.epochs(3):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            if how != "per-epoch":
                average.update_parameters(model)
        if how == "per-epoch":
            average.update_parameters(model)
    return [checksum(model, average), int(average.n_averaged)]


@loop(accumulated=TOLD, resumed=SKIPPED, quick=True)
def average_in_each_micro_batch(session: Any, how: str) -> Numbers:
    """Update an average beside optimizer.step(), which acts once in a batch."""
    model, optimizer, loader = trio(session)
    average = session.prepare(copy.deepcopy(model).requires_grad_(False))
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            for own, weight in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(weight.detach(), 0.1)
    return [checksum(model), checksum(average)]


@loop(quick=True)
def target_net(session: Any, how: str) -> Numbers:
    """Train against a slow copy of the net, as momentum encoders and value nets do."""
    model, optimizer, loader = trio(session)
    target = seeded(mlp)
    target.load_state_dict(model.state_dict())
    target.requires_grad_(False)
    target = session.prepare(target)
    for _ in session.epochs(2):
        for x, y in loader:
            with torch.no_grad():
                wanted = 0.5 * y + 0.5 * target(x.flip(1))
            descend(session, optimizer, error(model, x, wanted))
            if session.is_last:
                with torch.no_grad():
                    for slow, weight in zip(target.parameters(), model.parameters(), strict=True):
                        slow.lerp_(weight, 0.1)
    return [checksum(model), checksum(target)]


@loop("unprepared", outcome=RIGHT | REFUSED, resumed=RIGHT | REFUSED | TOLD)
@loop("prepared", outcome=RIGHT | REFUSED, resumed=RIGHT | REFUSED)
def own_scaler(session: Any, how: str) -> Numbers:
    """Scale the loss by torch's GradScaler."""
    model, optimizer, loader = trio(session)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    if how == "prepared":
        scaler = session.prepare(scaler)
    for _ in session.epochs(2):
        for x, y in loader:
            session.backward(scaler.scale(error(model, x, y)))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [checksum(model)]


@loop()
def by_hand(session: Any, how: str) -> Numbers:
    """Set the learning rate and decay the weights by hand."""
    model, optimizer, loader = trio(session)
    for epoch in session.epochs(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5**epoch
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            if session.is_last:
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.mul_(0.99)
    return [checksum(model)]

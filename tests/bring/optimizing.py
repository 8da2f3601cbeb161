"""Ways to step: accumulation by hand, clipping, schedules, averages, optimizers around optimizers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

from .catalogue import REFUSED, RIGHT, SKIPPED, TOLD, Numbers, loop
from .common import checksum, descend, error, mlp, regression, seeded, trio


@loop("2", quick=True, accumulated=SKIPPED)
@loop("7", "2-zero-first", "3-end-of-epoch", "2-momentum", accumulated=SKIPPED)
def accumulate_by_hand(session: Any, how: str) -> Numbers:
    """Step in each k-th batch; gradients of an epoch's last batches wait for the next epoch, or are stepped there."""
    every, _, variant = how.partition("-")
    count = int(every)
    data = regression(30 if count < 5 else 48)
    model, optimizer, loader = trio(session, data=data, momentum=0.9 if variant == "momentum" else 0.0)
    for _ in session.epochs(4):
        for at, (x, y) in enumerate(loader):
            if variant == "zero-first" and at % count == 0:
                optimizer.zero_grad()
            session.backward(error(model, x, y) / count)
            is_end = variant == "end-of-epoch" and at + 1 == len(loader)
            if (at + 1) % count == 0 or is_end:
                optimizer.step()
                if variant != "zero-first":
                    optimizer.zero_grad()
    return [checksum(model)]


@loop("2", accumulated=SKIPPED)
def accumulate_over_epochs(session: Any, how: str) -> Numbers:
    """Step in each second batch, counted over all epochs, with five batches an epoch."""
    model, optimizer, loader = trio(session, data=regression(30))
    count = 0
    for _ in session.epochs(4):
        for x, y in loader:
            session.backward(error(model, x, y) / 2)
            count += 1
            if count % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return [checksum(model)]


# torch's clip_grad_value_ takes no model without gradients, as before a global batch's last micro-batch.
@loop("value", accumulated=SKIPPED, quick=True)
@loop("norm", quick=True)
@loop("inf", "no-foreach", "apart", "returned")
def clip(session: Any, how: str) -> Numbers:
    model, optimizer, loader = trio(session)
    norms: Numbers = []
    for _ in session.epochs(2):
        for x, y in loader:
            session.backward(error(model, x, y))
            weights = list(model.parameters())
            if how == "value":
                nn.utils.clip_grad_value_(weights, 0.05)
            elif how == "apart":
                for weight in weights:
                    nn.utils.clip_grad_norm_(weight, 0.1)
            else:
                kind = float("inf") if how == "inf" else 2.0
                norm = nn.utils.clip_grad_norm_(weights, 0.2, norm_type=kind, foreach=how != "no-foreach" or None)
                if session.is_last:
                    norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
    return [checksum(model), *norms]


@loop("first", "keep", "model", quick=True)
@loop("model-first", "none", "by-hand", "never")
def zero_gradients(session: Any, how: str) -> Numbers:
    """Zero gradients at other places, in other ways, or never."""
    model, optimizer, loader = trio(session, momentum=0.0, lr=0.02)
    for _ in session.epochs(2):
        for x, y in loader:
            if how == "first":
                optimizer.zero_grad()
            elif how == "model-first":
                model.zero_grad()
            session.backward(error(model, x, y))
            optimizer.step()
            if how == "keep":
                optimizer.zero_grad(set_to_none=False)
            elif how == "model":
                model.zero_grad()
            elif how == "none":
                optimizer.zero_grad(set_to_none=True)
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


class Lookahead(Optimizer):
    """An optimizer around another one: each third step goes half of the way."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.count = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [weight.detach().clone() for group in self.param_groups for weight in group["params"]]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the base's gradients."""
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"base": self.base.state_dict(), "count": self.count, "slow": self.slow}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load both states."""
        self.base.load_state_dict(state_dict["base"])
        self.count, self.slow = state_dict["count"], state_dict["slow"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the base; in each third step, move halfway from the slow weights."""
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            weights = [weight for group in self.param_groups for weight in group["params"]]
            for weight, slow in zip(weights, self.slow, strict=True):
                slow.lerp_(weight, 0.5)
                weight.copy_(slow)


class Grafted(Optimizer):
    """An optimizer whose state has text keys and numbers beside the parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        state: Any = self.state
        state["all"] = {"count": 0, "sizes": [0.0]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step with a rate that falls with the count."""
        state: Any = self.state
        shared = state["all"]
        shared["count"] += 1
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.add_(weight.grad, alpha=-group["lr"] / shared["count"] ** 0.5)
        shared["sizes"].append(float(shared["count"]))


@loop("lookahead", "text-key", outcome=RIGHT | REFUSED, resumed=RIGHT | REFUSED)
@loop("lookahead-base", accumulated=SKIPPED, resumed=SKIPPED)
def own_optimizer(session: Any, how: str) -> Numbers:
    """Step an optimizer of one's own, or one around another."""
    model = seeded(mlp)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if how == "lookahead-base":
        model, base, loader = session.prepare(model, base, DataLoader(regression(), batch_size=6))
        optimizer: Any = Lookahead(base)
    else:
        optimizer = Grafted(model.parameters(), 0.1) if how == "text-key" else Lookahead(base)
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(regression(), batch_size=6))
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


def schedule(how: str, optimizer: Any, steps: int, epochs: int) -> Any:
    """Return a schedule by name."""
    makers: dict[str, Any] = {
        "cosine": lambda: CosineAnnealingLR(optimizer, T_max=steps * epochs),
        "one-cycle": lambda: OneCycleLR(optimizer, max_lr=0.2, total_steps=steps * epochs + 1),
        "warmup": lambda: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
    }
    return makers[how]()


@loop("cosine", "one-cycle", "warmup", quick=True)
def schedule_by_step(session: Any, how: str) -> Numbers:
    model, optimizer, loader = trio(session)
    schedules = session.prepare(schedule(how, optimizer, len(loader), 3))
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
    unprepared = schedule("cosine", optimizer, len(loader), 3)
    for _ in session.epochs(3):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            if how != "is-last" or session.is_last:
                unprepared.step()
    return [checksum(model)]


@loop("step", "step-zero", "chained", quick=True)
def schedule_by_epoch(session: Any, how: str) -> Numbers:
    model, optimizer, loader = trio(session)
    schedules: Any = StepLR(optimizer, step_size=1, gamma=0.5)
    if how == "chained":
        schedules = torch.optim.lr_scheduler.SequentialLR(
            optimizer, [LambdaLR(optimizer, lambda epoch: 0.5), schedules], milestones=[1]
        )
    schedules = session.prepare(schedules)
    for _ in session.epochs(3):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
        schedules.step()
    return [checksum(model), optimizer.param_groups[0]["lr"]]


@loop("prepared")
@loop("unprepared", resumed=SKIPPED)
def plateau(session: Any, how: str) -> Numbers:
    """Lower the rate where the evaluation does not improve."""
    model, optimizer, loader = trio(session)
    test = DataLoader(regression(11), batch_size=4)
    rule: Any = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    if how == "prepared":
        rule = session.prepare(rule)
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
@loop("is-last", resumed=SKIPPED)
@loop("by-hand", resumed=SKIPPED)
@loop("per-epoch")
def average_of_weights(session: Any, how: str) -> Numbers:
    """Average the weights: an EMA by torch's AveragedModel, or by hand."""
    model, optimizer, loader = trio(session)
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if how in ("prepared", "per-epoch"):
        average = session.prepare(average)
    by_hand = [weight.detach().clone() for weight in model.parameters()]
    for _ in session.epochs(3):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
            if how in ("prepared", "unprepared") or (how == "is-last" and session.is_last):
                average.update_parameters(model)
            elif how == "by-hand" and session.is_last:
                for own, weight in zip(by_hand, model.parameters(), strict=True):
                    own.lerp_(weight.detach(), 0.1)
        if how == "per-epoch":
            average.update_parameters(model)
    if how == "by-hand":
        return [checksum(model), *(float(own.sum()) for own in by_hand)]
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


@loop("prepared", quick=True)
@loop("copied", resumed=SKIPPED)
def target_net(session: Any, how: str) -> Numbers:
    """Train against a slow copy of the net, as momentum encoders and value nets do."""
    model, optimizer, loader = trio(session)
    target = seeded(mlp)
    target.load_state_dict(model.state_dict())
    target.requires_grad_(False)
    target = session.prepare(target) if how == "prepared" else copy.deepcopy(model)
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


@loop("prepared", has_accumulated_plain=False)
@loop("buffers", has_accumulated_plain=False)
def stochastic_weight_average(session: Any, how: str) -> Numbers:
    """Average the last epochs' weights on a schedule of its own, and compute BatchNorm's statistics anew."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    model, optimizer, loader = trio(session, make)
    average = AveragedModel(model, use_buffers=how == "buffers")
    rates = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    average, rates = session.prepare(average, rates)
    for epoch in session.epochs(3):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
        if epoch >= 1:
            average.update_parameters(model)
            rates.step()
    if how == "prepared":
        update_bn(loader, average)
    return [checksum(model, average)]


@loop("unscaled", "plain", outcome=RIGHT | REFUSED, resumed=RIGHT | REFUSED | TOLD)
@loop("disabled", "prepared", outcome=RIGHT | REFUSED, resumed=RIGHT | REFUSED)
def own_scaler(session: Any, how: str) -> Numbers:
    """Scale the loss by torch's GradScaler."""
    model, optimizer, loader = trio(session)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=how != "disabled")
    if how == "prepared":
        scaler = session.prepare(scaler)
    for _ in session.epochs(2):
        for x, y in loader:
            session.backward(scaler.scale(error(model, x, y)))
            if how != "plain":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [checksum(model)]


@loop("adamw", "adagrad", "rmsprop", "nadam", "asgd", "adafactor", "rprop", "adadelta", "adamax", "radam")
def optimizers(session: Any, how: str) -> Numbers:
    """Step other optimizers, with parameter groups."""
    model = seeded(mlp)
    makers: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "nadam": torch.optim.NAdam,
        "asgd": torch.optim.ASGD,
        "adafactor": torch.optim.Adafactor,
        "rprop": torch.optim.Rprop,
        "adadelta": torch.optim.Adadelta,
        "adamax": torch.optim.Adamax,
        "radam": torch.optim.RAdam,
    }
    groups = [{"params": list(model[0].parameters()), "lr": 0.01}, {"params": list(model[2].parameters()), "lr": 0.05}]
    optimizer = makers[how](groups)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(regression(), batch_size=6))
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop("centred", "amsgrad", "nesterov", "maximize", "foreach")
def optimizers_with_options(session: Any, how: str) -> Numbers:
    """Step optimizers whose options keep further state."""
    model = seeded(mlp)
    weights = list(model.parameters())
    makers: dict[str, Any] = {
        "centred": lambda: torch.optim.RMSprop(weights, lr=0.01, centered=True, momentum=0.5),
        "amsgrad": lambda: torch.optim.AdamW(weights, lr=0.02, amsgrad=True),
        "nesterov": lambda: torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        "maximize": lambda: torch.optim.Adam(weights, lr=0.001, maximize=True),
        "foreach": lambda: torch.optim.NAdam(weights, lr=0.02, foreach=True, decoupled_weight_decay=True),
    }
    model, optimizer, loader = session.prepare(model, makers[how](), DataLoader(regression(), batch_size=6))
    for _ in session.epochs(2):
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop()
def muon(session: Any, how: str) -> Numbers:
    """Step matrices by Muon, and the rest by AdamW."""
    model = seeded(mlp)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    first, second = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)
    model, first, second, loader = session.prepare(model, first, second, DataLoader(regression(), batch_size=6))
    for _ in session.epochs(2):
        for x, y in loader:
            session.backward(error(model, x, y))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
    return [checksum(model)]


@loop("swapped", outcome=RIGHT | REFUSED, resumed=RIGHT | REFUSED | TOLD)
def new_optimizer_later(session: Any, how: str) -> Numbers:
    """Make a new optimizer in the second epoch."""
    model, optimizer, loader = trio(session)
    for epoch in session.epochs(3):
        if epoch == 1:
            optimizer = session.prepare(torch.optim.Adam(model.parameters(), lr=0.01))
        for x, y in loader:
            descend(session, optimizer, error(model, x, y))
    return [checksum(model)]


@loop("step-hook", "global-hook")
def step_hooks(session: Any, how: str) -> Numbers:
    """Clip weights in a hook after each step."""
    model, optimizer, loader = trio(session)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.clamp_(-0.4, 0.4)

    register: Any = optimizer.register_step_post_hook
    if how == "global-hook":
        register = register_optimizer_step_post_hook
    handle = register(clamp)
    try:
        for _ in session.epochs(2):
            for x, y in loader:
                descend(session, optimizer, error(model, x, y))
    finally:
        handle.remove()
    return [checksum(model)]


@loop("rate", "weight-decay")
@loop("rewind", resumed=SKIPPED)
def by_hand(session: Any, how: str) -> Numbers:
    """Set the rate by hand each epoch, decay the weights, or go back to the best ones."""
    model, optimizer, loader = trio(session)
    best, kept = float("inf"), copy.deepcopy(model.state_dict())
    for epoch in session.epochs(4):
        if how == "rate":
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * 0.5**epoch
        total = 0.0
        for x, y in loader:
            loss = error(model, x, y)
            descend(session, optimizer, loss)
            total += session.sum(loss.item() * len(y))
            if how == "weight-decay" and session.is_last:
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.mul_(0.99)
        if total < best:
            best, kept = total, copy.deepcopy(model.state_dict())
    if how == "rewind":
        model.load_state_dict(kept)
    return [checksum(model)]

"""Precision: dtypes of weights and products, and loss scaling.

Weights and data are float32, under fp64 float64. Products are so too, but under tf32 on TF32 tensor cores, under bf16
and fp16 by autocast; under fp16 gradients are scaled, and unscaled before clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _torch, hardware
from ..config.schema import PrecisionConfig
from ..errors import RequestError


@dataclass(frozen=True)
class Precision:
    """Precision of a run. `autocast` is entered around forward and loss; `backward` and `step` do the rest."""

    name: str
    dtype: torch.dtype  # of weights and images
    channels_last: bool
    context: AbstractContextManager[Any]  # made once: constructing an autocast costs more than entering one
    scaler: Scaler | None = None

    @classmethod
    def of(cls, config: PrecisionConfig, device: torch.device) -> Precision:
        """Return the precision asked for on `device`. Raises `RequestError` where the device lacks it."""
        name = resolve(config.name, device)
        if name == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
            raise RequestError(f"--precision tf32 needs an NVIDIA GPU of Ampere or newer, found {device}; use fp32.")
        if config.deterministic:  # what the caller's process has switched on itself stays on
            torch.use_deterministic_algorithms(True)
        if device.type == "cuda":
            # Trying algorithms for the fastest is worth it for fixed shapes, and gives other bits each time.
            torch.backends.cudnn.benchmark = not config.deterministic
            # Through torch's older switches: its compiler and cudnn.flags ask these, and raise where only the newer
            # ones (fp32_precision) were set, for one kind of product.
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            torch.backends.cudnn.allow_tf32 = name == "tf32"
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        return cls(
            name=name,
            dtype=torch.float64 if name == "fp64" else torch.float32,
            channels_last=config.channels_last == "on" or (config.channels_last == "auto" and name != "fp64"),
            context=nullcontext() if half is None else torch.autocast(device.type, dtype=half),
            scaler=Scaler(device) if name == "fp16" else None,
        )

    @property
    def cast(self) -> torch.dtype | None:
        """Dtype for a user's model and data: float64, or None (unchanged)."""
        return self.dtype if self.name == "fp64" else None

    def cautions(self, model: nn.Module) -> list[str]:
        """Return a line if `place` would convert weights or buffers that are not of torch's default dtype."""
        dtypes = {tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
        names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes - {torch.float32, self.dtype})
        hint = "; --precision fp64 keeps them" if names == ["float64"] else ""
        target = str(self.dtype).removeprefix("torch.")
        return [
            f"the model's {' and '.join(names)} tensors become {target} under --precision {self.name}{hint}"
        ] * bool(names)

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model on `device`, in this dtype and memory order."""
        model = model.to(device=device, dtype=self.dtype)
        # Module.to would convert tensors of five dimensions (Conv3d) too, for which this order is not defined.
        for held in (*model.parameters(), *model.buffers()) if self.channels_last else ():
            if held.dim() == 4:
                # `to`, not `contiguous`, which leaves a 1 × 1 kernel strides that its gradient will not have.
                held.data = held.data.to(memory_format=torch.channels_last)
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward and loss."""
        return self.context

    def backward(self, loss: Tensor, weight: float | Tensor = 1.0) -> None:
        """Add the gradients of `weight` · `loss` (both 0-dim). They are scaled where float16 needs it."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        # Not as the gradient that the pass begins with: for its shape torch would ask, and import, its symbolic ones.
        if isinstance(weight, Tensor) or weight != 1:
            scaled = scaled * (weight.to(scaled) if isinstance(weight, Tensor) else weight)
        scaled.backward()  # type: ignore[no-untyped-call]

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Unscale the gradients of `parameters` in place. Call once they are summed over the ranks."""
        if self.scaler is not None:
            self.scaler.unscale([each.grad for each in parameters if each.grad is not None])

    def step(self, optimizers: Sequence[Optimizer], *, clip: float | None, measure: bool = False) -> Tensor | None:
        """Clip and apply unscaled gradients. Returns the norm before, with `clip` or `measure`; else None."""
        norm = None
        if clip is not None or measure:
            parameters = [item for each in optimizers for group in each.param_groups for item in group["params"]]
            if clip is not None:
                norm = nn.utils.clip_grad_norm_(parameters, clip)
            else:
                norm = nn.utils.get_total_norm([item.grad for item in parameters if item.grad is not None])
        for each in optimizers:
            if self.scaler is None:
                _torch.step(each)
            else:
                self.scaler.step(each, each.step)
        if self.scaler is not None:
            self.scaler.update()
        return norm

    def state(self) -> dict[str, Any]:
        """Return the scaler's state for a checkpoint."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the scaler from the result of `state`."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


_ASKING = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Fused, these check on the device for gradients that are not finite."""


class Scaler:
    """Loss scaling as in torch's GradScaler, for all optimizers as one.

    The host waits for nothing. Gradients are unscaled once summed. Where any is not finite, no optimizer steps.
    """

    _GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.full((), 65536.0, device=device)
        self._clean = torch.zeros((), dtype=torch.int32, device=device)  # steps without an overflow since it changed
        self._overflow: Tensor | None = None

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss (0-dim) times the scale."""
        return loss * self._scale

    @torch.no_grad()
    def unscale(self, gradients: list[Tensor]) -> None:
        """Unscale the gradients in place; note any overflow on the device."""
        if gradients:
            _torch.foreach_div_(gradients, self._scale)
            found = (~nn.utils.get_total_norm(gradients, math.inf).isfinite()).float()
            self._overflow = found if self._overflow is None else torch.maximum(self._overflow, found)

    def step(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        """Call the optimizer's `step`, without effect where a gradient is not finite."""
        if self._overflow is None:
            step()
        elif isinstance(optimizer, _ASKING) and optimizer.defaults["fused"]:
            vars(optimizer).update(grad_scale=None, found_inf=self._overflow)
            step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[union-attr]
        else:
            _step_unless(optimizer, step, self._overflow > 0)

    @torch.no_grad()
    def update(self) -> None:
        """Adapt the scale to the overflows since the last update."""
        if self._overflow is not None:
            bad, self._overflow = self._overflow > 0, None
            grown = self._clean + 1 >= self._INTERVAL
            factor = torch.where(bad, self._BACKOFF, torch.where(grown, self._GROWTH, 1.0))
            self._clean = torch.where(bad | grown, 0, self._clean + 1).int()
            self._scale = self._scale * factor

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of GradScaler's `state_dict`."""
        return {
            "scale": self._scale.item(),
            "growth_factor": self._GROWTH,
            "backoff_factor": self._BACKOFF,
            "growth_interval": self._INTERVAL,
            "_growth_tracker": int(self._clean.item()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from the result of `state_dict`."""
        self._scale = torch.full_like(self._scale, state["scale"])
        self._clean = torch.full_like(self._clean, state["_growth_tracker"])


@torch.no_grad()
def _step_unless(optimizer: Optimizer, step: Callable[[], Any], overflow: Tensor) -> None:
    """Step; undo the step where `overflow` (0-dim, bool) holds. State made in this step becomes 0 (as Muon's is)."""

    def held() -> list[Tensor]:
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        states = [value for item in parameters for value in optimizer.state[item].values() if isinstance(value, Tensor)]
        return [*parameters, *states]

    before = {each: each.clone() for each in held()}
    step()
    for each in held():
        each.copy_(torch.where(overflow, before.get(each, 0), each))


def resolve(name: str, device: torch.device) -> str:
    """Return the precision that `name` stands for on `device`. auto is bf16 where the hardware multiplies it."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if hardware.bf16_units() else "fp32"

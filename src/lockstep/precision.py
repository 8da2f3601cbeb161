"""The arithmetic: which dtype the weights have, which one the products run in, and how gradients stay finite.

| name | weights and data | products          | gradients          |
| fp32 | float32          | float32           | as they are        |
| tf32 | float32          | TF32 tensor cores | as they are        |
| bf16 | float32          | bfloat16 autocast | as they are        |
| fp16 | float32          | float16 autocast  | scaled, unscaled before clipping |
| fp64 | float64          | float64           | as they are        |
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import hardware
from .config import PrecisionConfig
from .errors import RequestError


@dataclass(frozen=True)
class Precision:
    """One way to compute. `autocast` is entered around forward and loss, `backward` and `step` do the rest."""

    name: str
    dtype: torch.dtype
    """dtype of weights and images."""
    channels_last: bool
    context: AbstractContextManager[Any]
    """Made once and entered at each micro-batch: constructing an autocast costs more than entering one."""
    scaler: torch.amp.GradScaler | None = None

    @classmethod
    def of(cls, config: PrecisionConfig, device: torch.device) -> Precision:
        """Return the precision asked for on `device`.

        Raises `RequestError` where the device does not have it.
        """
        name = resolve(config.name, device)
        if name == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
            raise RequestError(f"--precision tf32 needs an NVIDIA GPU of Ampere or newer, found {device}; use fp32.")
        torch.use_deterministic_algorithms(config.deterministic)
        if device.type == "cuda":
            # Trying algorithms for the fastest is worth it for fixed shapes, and gives other bits each time.
            torch.backends.cudnn.benchmark = not config.deterministic
            products = "tf32" if name == "tf32" else "ieee"
            torch.backends.cuda.matmul.fp32_precision = products
            torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        return cls(
            name=name,
            dtype=torch.float64 if name == "fp64" else torch.float32,
            channels_last=config.channels_last == "on" or (config.channels_last == "auto" and name != "fp64"),
            context=nullcontext() if half is None else torch.autocast(device.type, dtype=half),
            scaler=torch.amp.GradScaler(device.type) if name == "fp16" else None,
        )

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model on `device`, in this precision's dtype and, for what has four dimensions, memory order."""
        model = model.to(device=device, dtype=self.dtype)
        if self.channels_last:
            # Module.to would convert tensors of five dimensions (Conv3d) too, for which this order is not defined.
            for held in (*model.parameters(), *model.buffers()):
                if held.dim() == 4:
                    # `to`, not `contiguous`, which leaves a 1 × 1 kernel strides that its gradient will not have.
                    held.data = held.data.to(memory_format=torch.channels_last)
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward and loss."""
        return self.context

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the parameters', scaled where float16 needs it."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizers: Sequence[Optimizer], *, clip: float | None) -> Tensor | None:
        """Clip and apply the gradients; return the norm before clipping if `clip` is set.

        Under fp16 the gradients are unscaled first, and a step with non-finite gradients changes nothing but the
        scale. SGD and AdamW find that out on the device; for Muon, which has no fused kernel, the host waits for it.
        """
        if self.scaler is not None:
            for each in optimizers:
                self.scaler.unscale_(each)
        norm = None
        if clip is not None:
            parameters = [item for each in optimizers for group in each.param_groups for item in group["params"]]
            norm = nn.utils.clip_grad_norm_(parameters, clip)
        for each in optimizers:
            if self.scaler is None:
                each.step()
            else:
                self.scaler.step(each)
        if self.scaler is not None:
            self.scaler.update()
        return norm

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold of this: the scaler's scale."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def resolve(name: str, device: torch.device) -> str:
    """Return the precision that `name` stands for on `device`: auto is bf16 where the hardware multiplies it."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if hardware.has_bf16_units() else "fp32"

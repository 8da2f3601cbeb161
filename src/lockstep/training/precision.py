"""Precision: dtypes of weights and products, and loss scaling.

Weights and data are float32, under fp64 float64. Products are so too, but under tf32 on TF32 tensor cores, under bf16
and fp16 by autocast; under fp16 gradients are scaled, and unscaled before clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import hardware
from ..config.schema import PrecisionConfig
from ..errors import RequestError


@dataclass(frozen=True)
class Precision:
    """Precision of a run. `autocast` is entered around forward and loss; `backward` and `step` do the rest."""

    name: str
    dtype: torch.dtype  # of weights and images
    channels_last: bool
    device_type: str
    half: torch.dtype | None
    """Dtype of products under autocast."""
    scaler: torch.amp.GradScaler | None = None
    _unscaled: set[Optimizer] = field(default_factory=set, compare=False)
    """Optimizers whose gradients are unscaled, until they step."""
    _stepped: set[Optimizer] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, config: PrecisionConfig, device: torch.device) -> Precision:
        """Return the precision asked for on `device`. Raises `RequestError` where the device lacks it.

        Changes torch's settings only where a flag asks for it: TF32 and determinism.
        """
        name = resolve(config.name, device)
        if name == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
            raise RequestError(f"--precision tf32 needs an NVIDIA GPU of Ampere or newer, found {device}; use fp32.")
        if config.deterministic:  # what the caller's process has switched on itself stays on
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        if name == "tf32":
            # Through torch's older switches: its compiler and cudnn.flags ask these, and raise where only the newer
            # ones (fp32_precision) were set, for one kind of product.
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        return cls(
            name=name,
            dtype=torch.float64 if name == "fp64" else torch.float32,
            channels_last=config.channels_last == "on" or (config.channels_last == "auto" and name != "fp64"),
            device_type=device.type,
            half={"bf16": torch.bfloat16, "fp16": torch.float16}.get(name),
            scaler=torch.amp.GradScaler(device.type) if name == "fp16" else None,
        )

    def set_up_recipe(self, *, deterministic: bool) -> None:
        """Set torch up for `lockstep train`, whose process is its own: fp32 is exact, convolutions are tried out."""
        if self.device_type == "cuda":
            # Trying algorithms for the fastest is worth it for fixed shapes, and gives other bits each time.
            torch.backends.cudnn.benchmark = not deterministic
            if self.name != "tf32":
                torch.set_float32_matmul_precision("highest")
                torch.backends.cudnn.allow_tf32 = False

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
        model = model.to(device=device)
        cast(model, self.dtype)
        # Module.to would convert tensors of five dimensions (Conv3d) too, for which this order is not defined.
        for tensor in (*model.parameters(), *model.buffers()) if self.channels_last else ():
            if tensor.dim() == 4:
                # `to`, not `contiguous`, which leaves a 1 × 1 kernel strides that its gradient will not have.
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a new context for forward and loss: one that is entered twice would not be left."""
        return nullcontext() if self.half is None else torch.autocast(self.device_type, dtype=self.half)

    def backward(self, loss: Tensor, weight: float | Tensor = 1.0, *, retain_graph: bool = False) -> None:
        """Add the gradients of `weight` · `loss` (both 0-dim). They are scaled where float16 needs it."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        # Not as the gradient that the pass begins with: for its shape torch would ask, and import, its symbolic ones.
        if isinstance(weight, Tensor) or weight != 1:
            scaled = scaled * (weight.to(scaled) if isinstance(weight, Tensor) else weight)
        scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Unscale the gradients of `optimizers` in place. Call once they are summed over the ranks.

        Raises `RequestError` where an optimizer has unscaled gradients already.
        """
        if self.scaler is None:
            return
        for optimizer in optimizers:
            parameters = (each for group in optimizer.param_groups for each in group["params"])
            if optimizer in self._stepped or all(each.grad is None for each in parameters):
                continue
            if optimizer in self._unscaled:
                raise RequestError(
                    "--precision fp16 takes one session.backward per optimizer and step, since gradients are scaled; "
                    "add the losses up, give accumulate= for several batches a step, or take bf16."
                )
            self.scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)

    def step_one(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Call the optimizer's `step`, unless a float16 gradient has overflowed.

        `optimizer.step` has to come to the same `step`.
        """
        if self.scaler is None or optimizer not in self._unscaled or optimizer in self._stepped:
            return step()
        self._stepped.add(optimizer)
        return self.scaler.step(optimizer)

    def update(self) -> None:
        """Adapt the scale at the end of a step."""
        if self.scaler is not None and self._unscaled:
            self.scaler.update()
        self._unscaled.clear()
        self._stepped.clear()

    def state(self) -> dict[str, Any]:
        """Return the scaler's state for a checkpoint."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the scaler from the result of `state`."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters and buffers to `dtype`, and complex ones to its complex kind, in place."""

    def wanted(tensor: Tensor) -> torch.dtype:
        if tensor.is_complex():
            return dtype.to_complex()
        return dtype if tensor.is_floating_point() else tensor.dtype

    for module in model.modules():
        for _, parameter in module.named_parameters(recurse=False):
            parameter.data = parameter.data.to(wanted(parameter))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(wanted(buffer)))


def resolve(name: str, device: torch.device) -> str:
    """Return the precision that `name` stands for on `device`. auto is bf16 where the hardware multiplies it."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if hardware.bf16_units() else "fp32"

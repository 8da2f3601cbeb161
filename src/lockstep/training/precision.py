"""Precision: dtypes of weights and products, and loss scaling.

Weights and data are float32; float64 under fp64. Products have the same dtype, except under tf32 (TF32 tensor cores),
bf16 and fp16 (autocast). Under fp16, gradients are scaled, and unscaled before clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import cuda, hardware
from ..config.schema import PrecisionConfig
from ..errors import RequestError


@dataclass(frozen=True)
class Precision:
    """Precision of a run. Use `autocast` around forward pass and loss, then `backward` and `step_one`."""

    name: str
    dtype: torch.dtype  # of weights and images
    channels_last: bool
    device_type: str
    half: torch.dtype | None
    """Dtype of products under autocast."""
    scaler: torch.amp.GradScaler | None = None
    _unscaled: set[Optimizer] = field(default_factory=set, compare=False)
    """Optimizers whose gradients are unscaled, until `update`."""
    _stepped: set[Optimizer] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, config: PrecisionConfig, device: torch.device) -> Precision:
        """Return the requested precision on `device`. Raises `RequestError` if the device lacks it.

        Changes torch's settings only if a flag requests it: TF32 and determinism.
        """
        name = resolve(config.name, device)
        if name == "tf32" and not cuda.has_tf32(device):
            raise RequestError(f"--precision tf32 needs an NVIDIA GPU of Ampere or newer, found {device}; use fp32.")
        if config.deterministic:  # otherwise the caller's own setting stays
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        if name == "tf32":
            # By torch's older switches: its compiler and cudnn.flags read these, and raise if only the newer ones
            # (fp32_precision) were set for one kind of product.
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
        """Set up torch for `lockstep train`, in its own process: exact fp32, the fastest convolutions."""
        if self.device_type == "cuda":
            # Benchmarking algorithms pays off for fixed shapes; the bits differ from run to run.
            torch.backends.cudnn.benchmark = not deterministic
            if self.name != "tf32":
                torch.set_float32_matmul_precision("highest")
                torch.backends.cudnn.allow_tf32 = False

    @property
    def cast(self) -> torch.dtype | None:
        """Dtype for a user's model and data: float64, or None to leave them unchanged."""
        return self.dtype if self.name == "fp64" else None

    def cautions(self, model: nn.Module) -> list[str]:
        """Return a warning if `place` would convert weights or buffers of a dtype other than torch's default."""
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
        # Module.to would also convert five-dimensional tensors (Conv3d), for which this format is not defined.
        for tensor in (*model.parameters(), *model.buffers()) if self.channels_last else ():
            if tensor.dim() == 4:
                # `to`, not `contiguous`, which gives a 1 × 1 kernel strides that differ from its gradient's.
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a new context for forward pass and loss; a context entered twice would stay active."""
        return nullcontext() if self.half is None else torch.autocast(self.device_type, dtype=self.half)

    def backward(self, loss: Tensor, weight: float | Tensor = 1.0, *, retain_graph: bool = False) -> None:
        """Add the gradients of `weight` · `loss` (both 0-dim), scaled under fp16."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        # Not as the initial gradient: to check its shape, torch would import its symbolic shapes.
        if isinstance(weight, Tensor) or weight != 1:
            scaled = scaled * (weight.to(scaled) if isinstance(weight, Tensor) else weight)
        scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Unscale the gradients of `optimizers` in place, after their sum over the ranks.

        Raises `RequestError` if an optimizer's gradients are already unscaled.
        """
        if self.scaler is None:
            return
        for optimizer in optimizers:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            if optimizer in self._stepped or all(parameter.grad is None for parameter in parameters):
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

        `optimizer.step` must call the same `step`.
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
    """Cast floating-point parameters and buffers to `dtype`, and complex ones to the matching dtype, in place."""

    def target_dtype(tensor: Tensor) -> torch.dtype:
        if tensor.is_complex():
            return dtype.to_complex()
        return dtype if tensor.is_floating_point() else tensor.dtype

    for module in model.modules():
        for _, parameter in module.named_parameters(recurse=False):
            parameter.data = parameter.data.to(target_dtype(parameter))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(target_dtype(buffer)))


def resolve(name: str, device: torch.device) -> str:
    """Return the precision for `name` on `device`. auto is bf16 if the hardware has bf16 units, else fp32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if cuda.has_bf16(device) else "fp32"
    if device.type != "cpu":
        supports = getattr(torch.get_device_module(device), "is_bf16_supported", lambda: False)
        return "bf16" if supports() else "fp32"
    return "bf16" if hardware.bf16_units() else "fp32"

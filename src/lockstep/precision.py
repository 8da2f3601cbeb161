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
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import _torch, hardware
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
            scaler=torch.amp.GradScaler(device.type) if name == "fp16" else None,
        )

    def place(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model on `device`, in this precision's dtype and, for what has four dimensions, memory order.

        Every buffer then has memory of its own for each element.
        """
        model = model.to(device=device, dtype=self.dtype)
        for buffer in model.buffers():
            if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
                buffer.data = buffer.data.clone()  # of an expanded one, rank 0's could not be written into it
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

    def backward(self, loss: Tensor, weight: float | Tensor = 1.0) -> None:
        """Add the gradients of `weight` · `loss` (both 0-dim) to the parameters', scaled where float16 needs it."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        # Not as the gradient that the pass begins with: for its shape torch would ask, and import, its symbolic ones.
        (scaled * (weight.to(scaled) if isinstance(weight, Tensor) else weight)).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizers: Sequence[Optimizer], *, clip: float | None, measure: bool = False) -> Tensor | None:
        """Clip and apply the gradients; return the norm before clipping if `clip` is set, or it is to be measured.

        Under fp16 the gradients are unscaled first, and where one of them is not finite, nothing changes but the scale.
        """
        if self.scaler is None:
            norm = _clipped(optimizers, clip, measure)
            for each in optimizers:
                _torch.step(each)
            return norm
        together = cast(Optimizer, _Together(optimizers))
        self.scaler.unscale_(together)
        norm = _clipped(optimizers, clip, measure)
        self.scaler.step(together)
        self.scaler.update()
        return norm

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold of this: the scaler's scale."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


class Scaled:
    """Loss scaling where gradients are unscaled as soon as they are summed, several times to a step if need be.

    A step is left out where any gradient since the last `update` was not finite.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._unscaled: list[_Unscaled] = []

    def unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Unscale the gradients of `parameters`, in place, and note on the device whether all are finite."""
        once = _Unscaled([each for each in parameters if each.grad is not None])
        if once.param_groups[0]["params"]:
            self._scaler.unscale_(cast(Optimizer, once))
            self._scaler.step(cast(Optimizer, once))
            self._unscaled.append(once)

    def step(self, optimizer: Optimizer) -> None:
        """Step, unless a gradient was not finite."""
        together = _Together([optimizer])
        together.found_inf = torch.stack([each.found for each in self._unscaled]).amax(0)
        together.step()

    def update(self) -> None:
        """Adapt the scale to what was found since the last time."""
        if self._unscaled:
            self._scaler.update()
            self._unscaled.clear()


class _Unscaled:
    """Parameters that GradScaler takes for an optimizer (see `_Together`); its step only keeps what was found."""

    _step_supports_amp_scaling = True
    found_inf: Tensor

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def step(self) -> None:
        """Keep whether all gradients were finite."""
        self.found = self.found_inf


class _Together:
    """Several optimizers that GradScaler takes for one: if a gradient of any is not finite, none steps.

    To an optimizer with the attribute below GradScaler gives `found_inf`, a number on the device that is not 0 after an
    overflow, and leaves the rest to its `step`; for any other the host waits for that number. torch's fused optimizers
    take it as it is. For others, such as Muon, the step is made and then, on the device, taken back.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self) -> None:
        """Step all of them, or none."""
        for each in self.optimizers:
            if getattr(each, "_step_supports_amp_scaling", False):
                vars(each).update(grad_scale=None, found_inf=self.found_inf)
                each.step()
                del each.grad_scale, each.found_inf  # type: ignore[attr-defined]
            else:
                _step_unless(each, self.found_inf > 0)


@torch.no_grad()
def _step_unless(optimizer: Optimizer, overflow: Tensor) -> None:
    """Step, and put everything back as it was where `overflow` (0-dim, bool) holds, without asking the host.

    That takes a copy of parameters and state for the time of the step. State made in this step becomes zeros, which is
    what Muon's momentum begins with.
    """
    before = {held: held.clone() for held in _held(optimizer)}
    optimizer.step()
    for held in _held(optimizer):
        held.copy_(torch.where(overflow, before.get(held, 0), held))


def _held(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that a step changes: parameters and state."""
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    states = [value for item in parameters for value in optimizer.state[item].values() if isinstance(value, Tensor)]
    return [*parameters, *states]


def _clipped(optimizers: Sequence[Optimizer], clip: float | None, measure: bool) -> Tensor | None:
    """Scale the gradients to a norm of at most `clip`, if it is set; return the norm before, if either is asked."""
    if clip is None and not measure:
        return None
    parameters = [item for each in optimizers for group in each.param_groups for item in group["params"]]
    if clip is not None:
        return nn.utils.clip_grad_norm_(parameters, clip)
    return nn.utils.get_total_norm([item.grad for item in parameters if item.grad is not None])


def resolve(name: str, device: torch.device) -> str:
    """Return the precision that `name` stands for on `device`: auto is bf16 where the hardware multiplies it."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if hardware.has_bf16_units() else "fp32"

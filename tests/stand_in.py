"""A device in Python, `npu`, that computes on the CPU: `python -m tests.stand_in` trains on it as on an accelerator.

Its tensors have the device type that torch keeps for others' devices (PrivateUse1). Code that mixes tensors of two
devices, or takes whatever is no CPU for CUDA, fails here.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

NAME = "npu"


class DeviceModule:
    """In place of torch.npu."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.generator.set_state(state)


class Event:
    """In place of torch.Event: the device has always done all its work."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False) -> None: ...

    def record(self, stream: Any = None) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at_s - self.at_s)


class Stored(torch.Tensor):
    """A tensor of the device. `held` is its memory, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Stored:
        made: Stored = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = Stored(self.held.clone())
        memo[id(self)] = made = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU; refuse tensors of two devices, but copies and numbers."""
    devices, stored = set(), {}

    def lower(value: Any) -> Any:
        if isinstance(value, Stored):
            devices.add(NAME)
            stored[id(value.held)] = value
            return value.held
        if isinstance(value, Tensor):
            devices.update({"cpu"} if value.dim() else ())
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    to = kwargs.get("device")
    makes_stored = to is not None and torch.device(to).type == NAME
    lowered, options = tree_map(lower, args), tree_map(lower, kwargs)
    options.pop("pin_memory", None)
    if "cpu" in devices and NAME in devices and "copy" not in func.name() and "index" not in func.name():
        raise RuntimeError(f"{func.name()} has tensors of two devices")
    result = func(*lowered, **options)
    is_stored = makes_stored or (to is None and NAME in devices)

    def lift(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, Stored):
            return value
        if id(value) in stored:
            return stored[id(value)]
        return Stored(value) if is_stored and not any(value is arg for arg in args) else value

    return tree_map(lift, result)


class Factories(TorchDispatchMode):
    """Makes tensors on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Literals(TorchFunctionMode):
    """Makes tensors of numbers on the device, which no operator does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        device = options.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == NAME:
            return func(*args, **options | {"device": "cpu"}).to(device)
        return func(*args, **options)


def install() -> None:
    """Register the device in this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, DeviceModule())
    # What a device in Python cannot have.
    accelerator: Any = torch.accelerator
    torch.Event = Event  # type: ignore[assignment, misc]
    accelerator.current_stream = lambda device=None: SimpleNamespace(synchronize=lambda: None)
    accelerator.memory_allocated = accelerator.max_memory_allocated = lambda device=None: 0
    accelerator.synchronize = lambda device=None: None


def main() -> list[float]:
    import lockstep

    session = lockstep.session()
    torch.manual_seed(0)
    with session.device:  # torch cannot move a plain parameter into the memory of a Python device
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    net, optimizer, loader = session.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), DataLoader(data, 4)
    )
    losses = []
    for _ in session.epochs(2):
        for x, y in loader:
            assert (x.device.type, next(net.parameters()).device.type) == (session.device.type,) * 2
            loss = nn.functional.cross_entropy(net(x), y)
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    import lockstep

    install()
    with Factories(), Literals():
        runs = lockstep.launch(main, accelerator="cpu", devices=1), lockstep.launch(main, accelerator="npu", devices=1)
    print(json.dumps(runs))

"""A device in Python, `npu`, that computes on the CPU: `python -m tests.stand_in` trains on it as on an accelerator.

Its tensors have the device type that torch keeps for others' devices (PrivateUse1). Code that mixes tensors of two
devices, or takes whatever is no CPU for CUDA, fails here. So does code that uses what another stream has made without
waiting for it, or lets a stream take memory that the computation may still use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.data import order, sets, users
from lockstep.data.images import Transform
from lockstep.data.share import SharedLoader
from lockstep.data.source import Request, Source
from lockstep.data.transfer import copy_stream
from lockstep.world.world import World

NAME = "npu"


class Stream:
    """In place of torch.Stream. Its work is done at once; `made` is the number of operations so far.

    `seen` has that number, of each other stream, when this one last waited for it.
    """

    def __init__(self, device: Any = None) -> None:
        self.made, self.seen = 0, dict[Stream, int]()
        self.events = list[Any]()
        """Those that nobody has waited for."""

    def __enter__(self) -> None:
        current.append(self)

    def __exit__(self, *error: object) -> None:
        current.pop()

    def synchronize(self) -> None: ...

    def record_event(self) -> Any:
        self.events.append(SimpleNamespace(stream=self, made=self.made))
        return self.events[-1]

    def wait_event(self, event: Any) -> None:
        event.stream.events.remove(event)
        self.seen[event.stream] = event.made

    def wait_stream(self, stream: Stream) -> None:
        self.seen[stream] = stream.made

    def check(self, tensor: Stored) -> None:
        """Refuse a tensor of another stream that this one has not waited for."""
        stream, made = tensor.made
        if stream is not self and self.seen.get(stream, 0) < made:
            raise RuntimeError("a tensor is used before it is there")

    def allocate(self) -> tuple[Stream, int]:
        """Return when and where a tensor was made; refuse memory that the computation may use."""
        if self is not current[0] and self.seen.get(current[0], 0) < current[0].made:
            raise RuntimeError("a stream has not waited for the computation whose memory it takes")
        self.made += 1
        return self, self.made


current = [Stream()]
"""Streams of the enclosing `with` blocks, after the one that computes."""


class DeviceModule:
    """In place of torch.npu."""

    Stream = Stream

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
    """A tensor of the device. `held` is its memory, on the CPU; `made` is (stream, number of its operation)."""

    held: Tensor
    made: tuple[Stream, int]

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
        made.held, made.made = held, current[-1].allocate()
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
            current[-1].check(value)
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
    if makes_stored and args and isinstance(args[0], Tensor) and args[0].numel():
        uploads.append(tuple(args[0].shape))
    is_stored = makes_stored or (to is None and NAME in devices)

    def lift(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, Stored):
            return value
        if id(value) in stored:
            return stored[id(value)]
        return Stored(value) if is_stored and not any(value is arg for arg in args) else value

    return tree_map(lift, result)


uploads: list[tuple[int, ...]] = []
"""Shapes of the tensors that were copied from the host to the device."""


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
    torch.Event, torch.Stream = Event, Stream  # type: ignore[assignment, misc]
    methods: Any = torch.Tensor
    methods.pin_memory = lambda tensor, device=None: tensor
    accelerator.current_stream = lambda device=None: current[-1]
    accelerator.memory_allocated = accelerator.max_memory_allocated = lambda device=None: 0
    accelerator.synchronize = lambda device=None: None
    accelerator.get_memory_info = lambda device=None: (1 << 30, 1 << 30)


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


def read(batches: Iterable[Any], device: torch.device) -> dict[str, list[Any]]:
    """Return hashes of the batches (x, y, …); at each, the number of copies so far, and of those under way."""
    uploads.clear()
    result: dict[str, list[Any]] = {"batches": [], "copies": [], "under way": []}
    stream: Any = copy_stream(device)
    for x, y, *_ in batches:
        result["copies"].append(len(uploads))
        result["under way"].append(0 if stream is None else len(stream.events))
        result["batches"].append([digest(x * 1), digest(y)])  # computes
    return result


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()


def data_sets() -> dict[str, Any]:
    """Return what `read` returns for an epoch of each data set, on the CPU and on the device."""
    order.CHUNK = 600  # of 1437 images

    def read_source(source: Source, device: torch.device) -> Any:
        shares = np.array_split(np.random.default_rng(0).permutation(len(source)), 6)
        with contextlib.closing(source):
            return read(source.stream(shares, epoch=3), device)

    def built(device: torch.device, **options: Any) -> Source:
        config = override(RunConfig(), augment=["crop", "flip", "cutout"], image_size=8, samples=1437, **options).data
        return sets.build(config, seed=1, world=World.alone(device), dtype=torch.float64, channels_last=True).train

    def own(device: torch.device, workers: int) -> Source:
        config = override(RunConfig(), workers=workers).data
        request = Request(config=config, seed=1, world=World.alone(device), dtype=torch.float64, channels_last=True)
        transform = Transform(request, (3, 8, 8), ("crop", "flip"), (0.0,) * 3, (255.0,) * 3, turns=True)
        return users.Streamed(request, Photos(), "train", 10, transform)

    def read_loader(device: torch.device, workers: int) -> Any:
        loader = SharedLoader(DataLoader(Photos(), 8, num_workers=workers), World.alone(device), seed=1)
        with contextlib.closing(loader.micros(0)) as micros:
            return read((micro.batch for micro in micros), device)

    def read_all(device: torch.device) -> dict[str, Any]:
        result = {
            "digits": read_source(built(device, data="digits"), device),
            "digits in host memory": read_source(built(device, data="digits", on_device="off"), device),
            "fake": read_source(built(device, data="fake"), device),
        }
        for workers, words in enumerate(("no worker", "1 worker")):
            result[f"own data, {words}"] = read_source(own(device, workers), device)
            result[f"loader, {words}"] = read_loader(device, workers)
        return result

    on_cpu, on_device = read_all(torch.device("cpu")), read_all(torch.device(NAME, 0))
    return {name: (on_cpu[name], on_device[name]) for name in on_cpu}


class Photos(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(256, (3, 8, 8), dtype=torch.uint8, generator=generator), index % 10


if __name__ == "__main__":
    import lockstep

    install()
    with Factories(), Literals():
        runs = lockstep.launch(main, accelerator="cpu", devices=1), lockstep.launch(main, accelerator="npu", devices=1)
        print(json.dumps({"losses": runs, "data": data_sets()}))

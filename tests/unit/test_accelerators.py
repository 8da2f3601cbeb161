"""Which accelerator is taken, and what is CUDA's alone. A fake stands for those that are not here."""

from __future__ import annotations

import contextlib
import json
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration

import lockstep
from lockstep import _torch, cuda, hardware
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.data import transfer
from lockstep.errors import RequestError
from lockstep.launchers import devices, rank
from lockstep.launchers.plan import plan
from lockstep.record.telemetry import StepClock, Telemetry
from lockstep.training.precision import resolve
from lockstep.world.random_state import Generators, seed_all
from lockstep.world.topology import Topology
from lockstep.world.world import World

from ..command import end, start
from ..stand_in import Stream

SOURCE = Path(lockstep.__file__).parent
CUDAS_OWN = {
    "cuda.py": "what torch says of CUDA alone",
    "eject/plain.py": "plain programs for GPUs of CUDA or a CPU, to read",
    "eject/program.py": "the same",
}


def test_one_file_asks_for_what_is_cudas_alone() -> None:
    found = {path for path in SOURCE.rglob("*.py") if "torch.cuda." in path.read_text(encoding="utf-8")}
    assert {str(path.relative_to(SOURCE)) for path in found} == set(CUDAS_OWN)


def test_a_device_is_cpu_or_not() -> None:
    """Branches for CUDA alone, each with its reason, are in these files."""
    named = re.compile(r'(\.type [!=]= "cuda"|device_type == "cuda"|\.is_cuda\b)')
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if named.search(path.read_text())}
    assert found - set(CUDAS_OWN) == {
        "exchange/replicas.py",  # nn.DataParallel, which `plan` refuses to other accelerators
        "nn/sync_batchnorm.py",  # kernels
        "record/telemetry.py",  # NVML
        "training/precision.py",  # cuDNN, TF32, bf16
    }


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have torch be built for an accelerator, of which so many devices are here."""

    def show(name: str | None, count: int) -> None:
        def current(*, check_available: bool = False) -> torch.device | None:
            return None if name is None or (check_available and not count) else torch.device(name)

        monkeypatch.setattr(hardware, "gpus", lambda visible: ())
        monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)

    return show


@pytest.mark.parametrize(
    ("asked", "built", "count", "files", "expected"),
    [
        ("auto", "xpu", 2, True, ("xpu", "spawn", 2)),
        ("auto", "cuda", 2, True, ("cuda", "spawn", 2)),  # ROCm's
        ("auto", "xpu", 2, False, ("cpu", "inline", 1)),  # torch is not imported to learn that there is nothing
        ("auto", "xpu", 0, True, ("cpu", "inline", 1)),
        ("auto", None, 0, True, ("cpu", "inline", 1)),
        ("mps", "mps", 1, True, "--accelerator mps: Apple's GPUs have no float64"),
        ("xpu", "xpu", 1, False, ("xpu", "inline", 1)),
        ("cpu", "xpu", 2, True, ("cpu", "inline", 1)),
        ("xpu", "xpu", 0, True, "--accelerator xpu: this machine shows no GPU; take --accelerator cpu."),
        ("npu", "cuda", 0, True, f"--accelerator npu: torch {torch.__version__} was built for cuda; install"),
        ("xpu", None, 0, True, f"--accelerator xpu: torch {torch.__version__} was built for the CPU alone; install"),
        ("cuda", "xpu", 2, True, "--accelerator cuda: this machine shows no GPU; see nvidia-smi"),
    ],
)
def test_the_accelerator_is_torchs_and_one_that_is_not_there_is_refused(
    has: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    *,
    asked: str,
    built: str | None,
    count: int,
    files: bool,
    expected: tuple[str, str, int] | str,
) -> None:
    has(built, count)
    monkeypatch.setattr(devices, "_FILES", ("/",) if files else ())
    if isinstance(expected, str):
        with pytest.raises(RequestError, match=re.escape(expected)):
            plan(override(RunConfig(), accelerator=asked), {})
        return
    made = plan(override(RunConfig(), accelerator=asked), {})
    assert (made.config.parallel.accelerator, made.launcher, made.processes) == expected


def test_a_rank_takes_its_own_device_and_one_process_drives_no_others_than_cudas(has: Callable[..., None]) -> None:
    has("xpu", 2)
    asked = plan(override(RunConfig(), accelerator="xpu"), {}).config
    assert devices.gpu_ids(asked.parallel, {}) == ("xpu:0", "xpu:1")
    taken = [rank.take_device(asked, {}, Topology(rank=local, local_rank=local)) for local in range(2)]
    assert taken == [torch.device("xpu", 0), torch.device("xpu", 1)]
    with pytest.raises(RequestError, match=r"^--strategy dp drives several GPUs of CUDA, .* accelerator is xpu; take"):
        plan(override(RunConfig(), accelerator="xpu", strategy="dp"), {})


def test_a_gpu_that_the_build_has_no_code_for_is_refused(
    has: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    has("cuda", 1)
    monkeypatch.setattr(hardware, "gpus", lambda visible: (hardware.Gpu("GTX 1080", "GPU-0", 1),))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    with pytest.raises(RequestError, match=r"^cuda:0 has the architecture sm_61, for which torch .* has no code"):
        rank.take_device(override(RunConfig(), accelerator="cuda"), {}, Topology())
    for capability, built, missing in (
        ((8, 6), ["sm_80"], ""),
        ((8, 0), ["sm_86"], "sm_80"),
        ((9, 0), ["sm_80"], "sm_90"),
        ((12, 0), ["sm_80", "compute_80"], ""),
        ((9, 0), ["sm_90a"], ""),
        ((9, 0), [], ""),  # of a build without CUDA
    ):
        assert cuda.missing_architecture(capability, built) == missing, (capability, built)


class Module:
    """In place of torch.xpu: a generator for each device."""

    def __init__(self) -> None:
        self.states = {torch.device("xpu", index): torch.zeros(2, dtype=torch.uint8) for index in range(2)}
        self.current = 0

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.states[device].clone()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.states[device] = state.clone()

    def manual_seed(self, seed: int) -> None:
        self.states[torch.device("xpu", self.current)] = torch.tensor([seed % 251, 1], dtype=torch.uint8)

    def is_bf16_supported(self) -> bool:
        return True

    @contextlib.contextmanager
    def device_index(self, index: int) -> Any:
        former, self.current = self.current, index
        yield
        self.current = former


def test_each_devices_generator_is_seeded_saved_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "device_index", module.device_index)
    driven = [torch.device("xpu", index) for index in range(2)]
    before = Generators.now([])
    seed_all(7, devices=driven)
    first, second = (module.states[device] for device in driven)
    assert not torch.equal(first, second)
    states = Generators.from_json(Generators.now(driven).as_json())
    seed_all(8, devices=driven)
    assert not torch.equal(module.states[driven[0]], first)
    states.put_back(driven)
    assert torch.equal(module.states[driven[0]], first)
    assert torch.equal(module.states[driven[1]], second)
    before.put_back([])
    assert resolve("auto", driven[0]) == "bf16"


def test_steps_and_memory_are_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = iter((10.0, 30.0, 60.0))

    class Event:
        def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
            assert (device.type, enable_timing) == ("xpu", True)

        def record(self, stream: str) -> None:
            self.at_ms = next(now_ms)

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "its own")
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 7)
    clock = StepClock(torch.device("xpu", 0))
    clock.tick()
    clock.tick()
    assert clock.flush() == [0.02, 0.03]
    measured = Telemetry([torch.device("xpu", index) for index in range(2)])
    assert measured.sample()["device_memory_bytes"] == 10
    assert measured.peak_memory_bytes()["device"] == 14


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return what a run on the stand-in has printed: JSON, and lockstep's messages."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices in Python")
    done = end(start(tmp_path_factory.mktemp("stand-in"), module="tests.stand_in"))
    assert done.code == 0, done.err
    return json.loads(done.out), done.err


@pytest.mark.xdist_group("stand-in")
def test_a_session_trains_on_a_device_that_is_no_cpu(stand_in: tuple[dict[str, Any], str]) -> None:
    """One process, with checkpoints and all: its tensors mix with no others. Groups of ranks need a real backend."""
    printed, messages = stand_in
    on_cpu, on_device = printed["losses"]
    assert on_cpu == on_device
    assert len(on_cpu) == 8
    assert "1 × npu" in messages
    assert "lockstep: warning" not in messages
    assert "No resumed run" not in messages


@pytest.mark.xdist_group("stand-in")
def test_a_devices_batches_are_a_cpus_and_copied_once_an_epoch_or_before_they_are_needed(
    stand_in: tuple[dict[str, Any], str],
) -> None:
    copies, under_way = dict[str, list[int]](), dict[str, list[int]]()
    for name, (on_cpu, on_device) in stand_in[0]["data"].items():
        assert on_device["batches"] == on_cpu["batches"], name
        assert sum(on_cpu["copies"]) == 0
        copies[name], under_way[name] = on_device["copies"], on_device["under way"]
    chunks = [1, 1, 1, 2, 2, 2]  # of 3 batches: the samples' places and draws
    assert copies == {
        "digits": chunks,
        "digits in host memory": [2, 3, 4, 6, 7, 8],  # and each batch's images
        "fake": chunks,
        "own data, no worker": [3, 6, 9, 12, 15, 18],  # images, labels, draws
        "own data, 1 worker": [6, 9, 12, 15, 18, 18],
        "loader, no worker": [2, 4, 6, 8, 10],
        "loader, 1 worker": [4, 6, 8, 10, 10],
    }
    assert {name: counts for name, counts in under_way.items() if any(counts)} == {
        "own data, 1 worker": [1, 1, 1, 1, 1, 0],  # the next batch
        "loader, 1 worker": [1, 1, 1, 1, 0],
    }


def test_reading_ahead_keeps_the_order_the_errors_and_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = Stream()
    monkeypatch.setattr(transfer, "copy_stream", lambda device: stream if device.type == "cuda" else None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    items = [torch.tensor(number) for number in range(3)]
    alive, read = [*map(weakref.ref, items)], list[int]()

    def source() -> Iterator[Any]:
        while items:
            read.append(int(items[0]))
            yield items.pop(0)
        raise OSError("the end of the disk")

    ahead = transfer.map_ahead(lambda item: item, source(), torch.device("cuda"))
    for number in range(3):
        item = next(ahead)
        assert (int(item), len(read)) == (number, min(number + 2, 3))
        del item
        assert alive[number]() is None
    with pytest.raises(OSError, match="the end of the disk"):
        next(ahead)
    assert list(transfer.map_ahead(str, iter([1]), torch.device("cpu"))) == ["1"]


def test_a_group_has_the_devices_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make(backend: str, **options: Any) -> None:
        made.append((backend, options["device_id"]))
        raise ConnectionError

    monkeypatch.setattr("torch.distributed.init_process_group", make)
    monkeypatch.setattr(torch, "Event", lambda device: SimpleNamespace())
    for device in (torch.device("cuda", 1), torch.device("xpu", 0), torch.device("cpu")):
        with pytest.raises(ConnectionError):
            World.join(Topology(), device, _torch.HashStore(), timeout_s=1.0)
    assert made == [
        ("cpu:gloo,cuda:nccl", torch.device("cuda", 1)),
        ("cpu:gloo,xpu:xccl", torch.device("xpu", 0)),
        ("gloo", None),
    ]

"""Findings on GPUs: whether torch can use them, partitions and links, the driver's age, NCCL.

The driver answers through NVML, which needs no CUDA context: the command that starts the ranks asks, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pynvml
import torch

from .. import cuda, hardware
from ..errors import counted
from .finding import RED, UNCHECKED, Finding, conclude

_FAULTY_NCCL = (
    ((2, 29, 2), (2, 29, 2), "hangs in some exchanges"),  # https://github.com/pytorch/pytorch/pull/174338
    (
        (0,),
        (2, 26, 1),
        "may hang when a group is left after a failure",
    ),  # https://github.com/pytorch/pytorch/pull/149546
)
"""First and last version, and their fault."""
_MOST_PAIRS = 4


def usable(gpus: Sequence[hardware.Gpu], *, chosen_cpu: bool) -> Iterator[Finding]:
    """Yield whether torch can use the GPUs, unless the CPU was chosen."""
    if trouble := hardware.driver_trouble():
        words = f"the NVIDIA driver does not answer: {trouble}"
        yield conclude("devices", "driver", words, "run nvidia-smi; load the driver, or reboot")
    if not gpus or chosen_cpu:
        words = (
            f"{len(gpus)} here, not used, because of --accelerator cpu" if gpus else "none: ranks compute on the CPU"
        )
        yield Finding("devices", "GPUs", UNCHECKED, words)
    elif obstacle := find_obstacle(gpus):
        fix = "install a torch that fits the driver (pytorch.org), or a newer driver; or take --accelerator cpu"
        yield conclude("devices", "GPUs", obstacle, fix, bad=RED)
    if gpus and not chosen_cpu:
        yield from partitions(hardware.partitions())
        yield from driver_age(hardware.query_nvml("nvmlSystemGetCudaDriverVersion"), torch.version.cuda)
        yield from links(gpus)
        yield from nccl(cuda.nccl_version())


def find_obstacle(gpus: Sequence[hardware.Gpu]) -> str:
    """Return why torch cannot use the GPUs that the driver shows, or ""."""
    if torch.accelerator.current_accelerator(check_available=True) is None:
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        return f"the driver shows {len(gpus)}, but torch {torch.__version__}, {build}, cannot use them"
    for gpu in gpus:
        capability = hardware.query_nvml("nvmlDeviceGetCudaComputeCapability", hardware.nvml_handle(gpu.uuid))
        if capability and (missing := cuda.missing_architecture(capability, cuda.architectures())):
            return f"{gpu.name} has the architecture {missing}, for which torch {torch.__version__} has no code"
    return ""


def partitions(count: int) -> Iterator[Finding]:
    """Yield a finding on GPUs that are divided into `count` partitions (MIG)."""
    if count:
        words = f"{counted(count, 'partition')} (MIG); CUDA shows a process one of them, and no other GPU beside it"
        fix = "nvidia-smi -mig 0 makes whole GPUs; or name one partition in CUDA_VISIBLE_DEVICES"
        yield conclude("devices", "partitions", words, fix if count > 1 else "", value=count)


def links(gpus: Sequence[hardware.Gpu]) -> Iterator[Finding]:
    """Yield how each pair of GPUs is connected, as far as the driver reports it."""
    kinds: dict[str, list[str]] = {}
    for (first, a), (second, b) in itertools.combinations(enumerate(gpus), 2):
        handles = hardware.nvml_handle(a.uuid), hardware.nvml_handle(b.uuid)
        over_nvlink, direct = (
            hardware.query_nvml("nvmlDeviceGetP2PStatus", *handles, index)
            for index in (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_CAPS_INDEX_READ)
        )
        if over_nvlink is None and direct is None:
            return
        kind = "PCIe through host memory, without peer-to-peer access"
        if pynvml.NVML_P2P_STATUS_OK in (over_nvlink, direct):
            kind = "NVLink" if over_nvlink == pynvml.NVML_P2P_STATUS_OK else "PCIe"
        kinds.setdefault(kind, []).append(f"{first}–{second}")
    if len(kinds) == 1:
        yield conclude("devices", "links", f"{next(iter(kinds))} between each pair of {len(gpus)} GPUs")
    elif kinds:
        texts = [
            f"{kind} between {', '.join(pairs[:_MOST_PAIRS])}{', …' * (len(pairs) > _MOST_PAIRS)}"
            for kind, pairs in kinds.items()
        ]
        yield conclude("devices", "links", f"{'; '.join(texts)}: the slowest link sets the pace of exchanges")


def driver_age(cuda_of_driver: int | None, cuda_of_torch: str | None) -> Iterator[Finding]:
    """Yield whether the driver runs torch's CUDA. NVML has 12040 for CUDA 12.4.

    A driver runs programs of the same major version (https://docs.nvidia.com/deploy/cuda-compatibility/).
    """
    if not cuda_of_driver or not cuda_of_torch:
        return
    major, minor = cuda_of_driver // 1000, cuda_of_driver % 1000 // 10
    built = tuple(map(int, cuda_of_torch.split(".")[:2]))
    words, fix = f"runs CUDA up to {major}.{minor}, torch was built for {cuda_of_torch}", ""
    if built[0] > major:
        fix = f"install a newer driver, or a torch for CUDA {major}"
    elif built > (major, minor):
        words += ": it runs compiled code, and compiles none (compute_…) for newer GPUs"
    yield conclude("devices", "CUDA", words, fix, bad=RED)


def nccl(version: tuple[int, ...]) -> Iterator[Finding]:
    """Yield a finding on a version of NCCL with a known fault."""
    for first, last, fault in _FAULTY_NCCL:
        if version and first <= version <= last:
            text = ".".join(map(str, version))
            fix = "install a torch with a newer one, or pip install --upgrade nvidia-nccl-cu12 (or -cu13)"
            yield conclude("devices", "NCCL", f"{text} {fault}", fix)

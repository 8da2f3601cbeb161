"""The GPUs of a host, and what lies between them: what the driver and torch say, judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..errors import counted
from .finding import RED, YELLOW, Finding, Subject
from .nvml import Driver, GpuState, Link
from .units import size

_TAKEN = 0.5
"""Of a GPU's memory: with more in other hands, a batch that fits elsewhere does not fit here."""
_KINDS = {
    "nvlink": "NVLink",
    "board": "one board",
    "switch": "one PCIe switch",
    "switches": "several PCIe switches",
    "bridge": "a PCIe host bridge",
    "cpu": "the processor",
    "system": "the link between processors",
}


def usable(driver: Driver, *, on_cpu: bool, chosen_cpu: bool) -> Iterator[Finding]:
    """Yield whether torch can use the GPUs that the driver shows.

    `on_cpu` says that the ranks compute on the CPU, `chosen_cpu` that somebody asked for that.
    """
    import torch

    built = torch.version.cuda or ""
    about = Subject("devices", "torch and GPUs")
    if driver.trouble:
        words, fix = (
            f"the NVIDIA driver does not answer: {driver.trouble}",
            "run nvidia-smi; load the driver, or reboot",
        )
        yield about.found(YELLOW if on_cpu else RED, words, fix)
    if not driver.gpus:
        words = "no GPU: ranks compute on the processors"
        yield Subject("devices", "GPUs").unchecked(words)
    elif not (built and torch.cuda.is_available()):
        yield judge_unusable(len(driver.gpus), str(torch.__version__), built, driver.version, chosen_cpu=chosen_cpu)
    elif on_cpu:
        words = f"{counted(len(driver.gpus), 'GPU')} here, left alone as --accelerator cpu asks"
        yield Subject("devices", "GPUs").unchecked(words)


def judge_unusable(gpus: int, torch_version: str, built: str, driver: str, *, chosen_cpu: bool) -> Finding:
    """Return what it means that torch cannot use the GPUs there are; `built` is its CUDA version, "" for none."""
    shown = "shows 1 GPU" if gpus == 1 else f"shows {gpus} GPUs"
    if built:
        why = f"torch {torch_version}, built for CUDA {built}, cannot use them: the driver is too old, or a GPU is lost"
        fix = "install a newer driver, or a torch built for an older CUDA (pytorch.org); nvidia-smi tells what it takes"
    else:
        why = f"torch {torch_version} is a build without CUDA"
        fix = "pip install --force-reinstall torch torchvision (the index's own builds have CUDA)"
    return Subject("devices", "torch and GPUs").found(
        YELLOW if chosen_cpu else RED,
        f"the driver ({driver}) {shown}, but {why}",
        fix if chosen_cpu else f"{fix}, or take --accelerator cpu",
    )


def gpus(states: Sequence[GpuState]) -> Iterator[Finding]:
    """Yield what each GPU is, and what is wrong with it."""
    for gpu in states:
        name = f"GPU {gpu.index}"
        wrong = list(_wrong(gpu))
        for state, words, fix in wrong:
            yield Subject("devices", name).found(state, f"{gpu.name}: {words}", fix)
        if not wrong:
            free = f", {size(gpu.free_bytes)} free" if gpu.free_bytes is not None else ""
            slot = f", PCIe {gpu.pcie_generation} ×{gpu.pcie_width}" if gpu.pcie_bytes_per_s else ""
            words = f"{gpu.name}, {size(gpu.memory_bytes)}{free}{slot}"
            free_bytes = float(gpu.free_bytes) if gpu.free_bytes is not None else None
            yield Subject("devices", name, value=free_bytes, unit="bytes" if free_bytes is not None else "").green(
                words
            )


def _wrong(gpu: GpuState) -> Iterator[tuple[str, str, str]]:
    """Yield (state, what is wrong, what to do) of a GPU."""
    if gpu.prohibited:
        yield RED, "its compute mode keeps every program away", f"nvidia-smi -i {gpu.uuid} -c DEFAULT"
    if gpu.remapping_failed:
        fix = "reset it (nvidia-smi --gpu-reset), and have it replaced if that does not help"
        yield RED, "broken rows of its memory could not be replaced", fix
    if gpu.remapping_pending:
        yield (
            YELLOW,
            "a broken row of its memory waits to be replaced",
            "reset it once it is idle (nvidia-smi --gpu-reset)",
        )
    if gpu.uncorrected:
        words = f"{gpu.uncorrected} memory errors that ECC could not correct since the driver was loaded"
        yield (
            YELLOW,
            words,
            "reset it (nvidia-smi --gpu-reset), and watch nvidia-smi -q -d ECC; replace it if they recur",
        )
    if gpu.slowed:
        yield (
            YELLOW,
            "held back by heat or its power supply",
            "see to its cooling and power: nvidia-smi -q -d PERFORMANCE",
        )
    if gpu.free_bytes is not None and gpu.free_bytes < _TAKEN * gpu.memory_bytes:
        words = f"{size(gpu.free_bytes)} of {size(gpu.memory_bytes)} free: another program holds the rest"
        yield YELLOW, words, "end it (nvidia-smi lists programs), or take other GPUs with --gpus"
    if gpu.exclusive:
        words = "its compute mode lets in one program at a time"
        yield YELLOW, words, f"nvidia-smi -i {gpu.uuid} -c DEFAULT, if a job is refused as busy"
    if gpu.pcie_width and gpu.pcie_most_width and gpu.pcie_width < gpu.pcie_most_width:
        words = f"its slot has {gpu.pcie_width} of {gpu.pcie_most_width} PCIe lanes"
        yield YELLOW, words, "put it into another slot, or seat it anew, if the board has more lanes for it"
    if gpu.persistence is False:
        words = "persistence mode is off: the driver starts anew, for seconds, with each program"
        yield YELLOW, words, f"nvidia-smi -i {gpu.uuid} -pm 1"


def links(found: Sequence[Link], on_cuda: bool) -> Iterator[Finding]:
    """Yield what lies between the GPUs of this host."""
    if not found:
        if on_cuda:
            yield Subject("devices", "links").unchecked("one GPU here: no link to another")
        return
    kinds = Counter((link.kind, link.peer) for link in found)
    words = "; ".join(
        f"{counted(count, 'pair')} over {_KINDS[kind]}{'' if peer else ', not directly but through host memory'}"
        for (kind, peer), count in sorted(kinds.items())
    )
    far = [link for link in found if not link.peer]
    if not far:
        yield Subject("devices", "links").green(words)
        return
    named = ", ".join(f"{link.a}–{link.b}" for link in far[:4]) + (" …" if len(far) > 4 else "")
    fix = "if the GPUs can do better: switch PCIe ACS and the IOMMU off in the BIOS, or move them under one PCIe switch"
    yield Subject("devices", "links").yellow(f"{words} (GPUs {named})", fix)


def link(driver: Driver, gpu: GpuState) -> tuple[str, float] | None:
    """Return what joins a GPU to the others of its host, NVLink or PCIe, and its rate one way; None where unknown."""
    mine = [each for each in driver.links if gpu.index in (each.a, each.b)]
    if gpu.nvlink_bytes_per_s and all(each.kind == "nvlink" for each in mine):
        return "NVLink", gpu.nvlink_bytes_per_s
    return ("PCIe", gpu.pcie_bytes_per_s) if gpu.pcie_bytes_per_s else None

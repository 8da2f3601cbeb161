"""The versions of what computes: the same on every rank, and new enough."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires

from ..errors import ranks_named
from ..failures import one_line
from ..versions import version_of
from .finding import GREEN, RED, YELLOW, Finding, Subject

_PACKAGE = "lockstep-torch"
_MUST_AGREE = ("lockstep", "torch", "CUDA", "NCCL")
"""Ranks with different ones speak different protocols, or compute other bits."""
_MAY_DIFFER = ("python", "torchvision", "driver")


def versions(driver: str) -> dict[str, str]:
    """Return the version of each part on this rank; empty where there is none. `driver` is NVIDIA's."""
    import torch

    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return {
        "lockstep": version_of(_PACKAGE) or "",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "",
        "NCCL": ".".join(map(str, nccl)),
        "torchvision": version_of("torchvision") or "",
        "driver": driver,
    }


def least_torch(package: str = _PACKAGE) -> str:
    """Return the least version of torch that this package asks for; empty where it is not installed as a package."""
    try:
        wanted = requires(package) or []
    except PackageNotFoundError:
        return ""
    found = (re.match(r"torch\s*\(?>=\s*([\d.]+)", line) for line in wanted)
    return next((match[1] for match in found if match), "")


def judge(told: Mapping[int, Mapping[str, str]], least: str) -> Iterator[Finding]:
    """Yield what the versions that each rank told amount to: {rank: {part: version}}."""
    worst = GREEN
    for part in (*_MUST_AGREE, *_MAY_DIFFER):
        who: dict[str, list[int]] = {}
        for rank, found in told.items():
            who.setdefault(found[part], []).append(rank)
        if len(who) > 1:
            state = RED if part in _MUST_AGREE else YELLOW
            words = "; ".join(f"{version or 'none'} on {ranks_named(ranks)}" for version, ranks in who.items())
            fix = f"install the same {part} on every node"
            yield Subject("host", f"{part} versions").found(state, words, fix)
            worst = RED if RED in (worst, state) else YELLOW
    first = next(iter(told.values()))
    if least and _numbers(first["torch"]) < _numbers(least):
        fix = f"pip install 'torch>={least}'"
        words = f"torch {first['torch']}, the least that is supported is {least}"
        yield Subject("host", "versions").red(words, fix)
    elif worst == GREEN:
        words = ", ".join(f"{part} {version}" for part, version in first.items() if version)
        yield Subject("host", "versions").green(words)


def torchvision() -> Iterator[Finding]:
    """Yield a finding where torchvision, which models and data sets come from, cannot be imported."""
    import torch

    try:
        import torchvision  # noqa: F401
    except ImportError as error:
        why = one_line(error)
    except RuntimeError as error:  # built for another torch: "operator torchvision::nms does not exist"
        why = f"it does not fit torch {torch.__version__} ({one_line(error)})"
    else:
        return
    build = str(torch.__version__).partition("+")[2]
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    words = f"torchvision cannot be imported: {why}; cifar10, imagefolder and its models need it"
    yield Subject("host", "torchvision").yellow(
        words, f"pip install --force-reinstall torch torchvision{index}, both from one index"
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]

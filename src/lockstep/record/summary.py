"""`summary.json`: how the run ended, in numbers that tools outside read. The names are a contract."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from .files import write_json


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run's result. What was not measured is None."""

    top1: float | None = None
    """Share of the held-out samples that the last evaluation got right, 0 to 1."""
    top5: float | None = None
    """Share whose class was among the five likeliest; None with five classes or fewer."""
    best_top1: float | None = None
    """The largest top1 of all evaluations."""
    steps: int = 0
    """Optimizer steps, those before a resume included."""
    epoch_s: list[float] = field(default_factory=list)
    """Seconds of training in each epoch, without evaluation."""
    images_per_s: float | None = None
    """Training images a second over all ranks."""
    step_p50_s: float | None = None
    """Median seconds of an optimizer step."""
    step_p95_s: float | None = None
    """Seconds that 95% of the optimizer steps stay within."""
    data_wait_s: float | None = None
    """Seconds in all that the training waited for data."""
    peak_memory_bytes: dict[str, int | None] = field(default_factory=lambda: {"host": None, "device": None})
    """The most memory held by a rank, in `host` memory and by tensors on its `device`."""
    exit: int = 0
    """The exit code: 0 done, 1 failed, 3 a proof failed, 75 stopped on request."""

    def write(self, folder: Path) -> None:
        """Write `summary.json` into the run's `folder`, atomically. Raises OSError."""
        write_json(folder / "summary.json", asdict(self))

"""What the processes of an audited command leave in its folder, and how the ranks' batches become one."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOGETHER, REVERSED = "together", "in reverse order"
TURNS, BY_SHARE, FIRST = "in turns", "statistics by share", "first micro-batch"
"""Passes of a replay: all ranks' samples in one batch; the same with the last rank's samples first; each rank's batch
by itself; all in one with BatchNorm's statistics of each rank's share; each micro-batch replaced by a copy of the
first. The others, `rank 0` and so on, have one rank's samples."""
UNMATCHED, UNMATCHED_ROWS = "unmatched", "unmatched rows"
"""Files that say: draws were of other shapes than the ranks' together; BatchNorm was given other rows than samples."""
REFUSED = "refused.txt"
"""File that says why the ranks' batches cannot be joined."""
_IGNORED = -100  # target that the field's losses leave out


class Read(NamedTuple):
    """A rank's next batch of a loader, or the end of the loader's iteration."""

    loader: int
    """Number in the order of creation."""
    iteration: int
    batch: Any
    generators: tuple[Any, Any] | None
    """States of `random` and of NumPy's generator after it was read. None for an end."""

    @property
    def is_end(self) -> bool:
        """Whether the loader had no batch left."""
        return self.generators is None


class Window(NamedTuple):
    """One rank's part of an optimizer step, from the step before it."""

    reads: list[Read]
    draws: list[Tensor]
    """Results of random operators, in call order."""
    augmentation: list[bytes]
    """Digests of what loaders drew for samples."""
    is_drawn_outside: bool
    """Whether the script drew from `random` or NumPy."""
    weights: list[list[Tensor]]
    """Parameters and buffers of each outermost module, before its first call."""
    gradients: list[list[Tensor | None]]
    """By module and parameter; None for one of another optimizer."""
    unclipped: list[list[Tensor | None]]
    """The same before they were clipped."""
    names: list[list[str]]
    buffers: dict[str, Tensor]
    """As the first call of the modules that hold them found them."""
    has_batchnorm: bool
    is_coarse: bool
    """Whether a part is computed in less than float32."""
    optimizer: int
    """Number in the order of the first steps."""
    learning_rates: list[float]
    schedule_steps: int
    """Since the begin."""
    inputs: list[bytes]
    """Digests of the samples given to the model."""
    micro_batches: int
    """Calls of outermost modules whose gradients are computed."""
    exchanges: list[bool]
    """By call of a DistributedDataParallel: whether its backward pass exchanges gradients."""
    place: str
    """FILE:LINE of the optimizer's step in the user's code."""

    def samples(self) -> int:
        """Return how many samples it has read."""
        return sum(size_of(read.batch) for read in self.reads if not read.is_end)


class Replayed(NamedTuple):
    """What one process computed of a window."""

    gradients: list[list[Tensor | None]]
    unclipped: list[list[Tensor | None]]
    learning_rates: list[float]
    schedule_steps: int
    inputs: list[bytes]
    micro_batches: int


class Recording:
    """All ranks' windows, and the facts of each rank beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ranks = [folder / f"rank{rank}" for rank in range(len([*folder.glob("rank*")]))]
        self.windows = [_windows(rank) for rank in ranks]
        self.facts: list[dict[str, Any]] = [json.loads((rank / "facts.json").read_text()) for rank in ranks]

    @property
    def steps(self) -> int:
        """Windows that all ranks have."""
        return min(map(len, self.windows), default=0)

    def tails(self) -> list[list[Read]]:
        """Return each rank's reads after its last window."""
        paths = [self.folder / f"rank{rank}" / "tail.pt" for rank in range(len(self.windows))]
        return [
            [Read(*each) for each in torch.serialization.load(path, weights_only=False)] if path.exists() else []
            for path in paths
        ]

    def final(self) -> list[list[Tensor]]:
        """Return rank 0's weights after its last window."""
        path = self.folder / "rank0" / "final.pt"
        return torch.serialization.load(path, weights_only=True) if path.exists() else []

    def universe(self, rank: int, loader: int) -> Tensor:
        """Return the indices (n) of the samples that a loader's data set has, in the data set it is a part of."""
        return torch.serialization.load(self.folder / f"rank{rank}" / f"universe {loader}.pt", weights_only=True)  # type: ignore[no-any-return]

    def augmentation(self) -> list[bytes]:
        """Return, by rank, what its data workers drew, as digests in any order."""
        paths = [self.folder / f"rank{rank}" / "augmentation" for rank in range(len(self.windows))]
        found = [path.read_bytes() if path.exists() else b"" for path in paths]
        return [b"".join(sorted(each[at : at + 32] for at in range(0, len(each), 32))) for each in found]

    def order(self, rank: int, loader: int, iteration: int) -> Tensor | None:
        """Return the sample indices (n) that a loader's iteration has on a rank, if they could be told beforehand."""
        path = self.folder / f"rank{rank}" / f"order {loader} {iteration}.pt"
        return torch.serialization.load(path, weights_only=True) if path.exists() else None

    def replayed(self, step: int, name: str) -> Replayed | None:
        """Return what a pass computed of a window; None where it did not come so far."""
        path = replay_path(self.folder, step, name)
        return Replayed(*torch.serialization.load(path, weights_only=False)) if path.exists() else None

    def whole(self, step: int) -> Replayed | None:
        """Return what one process computed of all ranks' samples."""
        return self.replayed(step, TURNS) or self.replayed(step, TOGETHER)

    def replay_facts(self) -> dict[str, Any]:
        """Return the facts of the one process that all samples were given to."""
        path = self.folder / "replay.json"
        facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return facts


def replay_path(folder: Path, step: int, name: str) -> Path:
    """Return the file of a window in the pass `name`."""
    return folder / f"replay {step} {name}.pt"


def _windows(folder: Path) -> list[Window]:
    found = list[Window]()
    while (path := folder / f"window{len(found)}.pt").exists():
        values = torch.serialization.load(path, weights_only=False)
        window = Window(*values)
        found.append(window._replace(reads=[Read(*each) for each in window.reads]))
    return found


def save(values: Any, path: Path) -> None:
    """Save so that nobody reads a part of it."""
    part = path.with_suffix(".part")
    torch.serialization.save(values, part)
    part.replace(path)


def key(path: Path) -> str:
    """Return the name by which the audit's folder knows a file of the script."""
    return hashlib.sha256(str(path).encode()).hexdigest()[:32]


def make(kept: Path, path: Path) -> None:
    """Note that the script is about to make a file that was not there."""
    kept.parent.mkdir(exist_ok=True)
    kept.with_suffix(".made").write_text(str(path))


def is_made(kept: Path) -> bool:
    """Return whether the script has made this file."""
    return kept.with_suffix(".made").exists()


def generator_states() -> tuple[Any, Any]:
    """Return the states of `random` and, if it is imported, of NumPy."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def set_generator_states(states: tuple[Any, Any]) -> None:
    """Set what `generator_states` returned."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def copied(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a batch whose tensors the script cannot change, with real numbers in `dtype`, if given."""

    def copy(parts: Sequence[Tensor]) -> Tensor:
        tensor = parts[0].detach().clone()
        return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor

    return _mapped(copy, [batch])


def joined(batches: Sequence[Any]) -> Any:
    """Return the batches as one, samples end to end. Raises ValueError for tensors that cannot be concatenated."""
    return _mapped(_concatenated, _padded(batches))


def size_of(batch: Any) -> int:
    """Return a batch's number of samples, by its first tensor; 0 without one."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.dim()), 0)


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch of any structure."""
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if hasattr(batch, "values") else batch if isinstance(batch, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    if not parts[0].dim():
        return parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = " and ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"its ranks have batches of shapes {shapes} at once, which are no batch of one process")
    return torch.cat([*parts])


def _padded(batches: Sequence[Any]) -> Sequence[Any]:
    """Pad token batches, which each rank has padded to its own longest, alike; as their attention mask tells."""
    if not all(isinstance(batch, Mapping) or hasattr(batch, "keys") for batch in batches):
        return batches
    found = [batch["attention_mask"] if "attention_mask" in batch else None for batch in batches]  # noqa: SIM401
    masks = [mask for mask in found if isinstance(mask, Tensor) and mask.dim() == 2]
    if len(masks) < len(batches) or len({mask.shape[1] for mask in masks}) == 1:
        return batches
    longest, is_left = max(mask.shape[1] for mask in masks), any(bool((mask[:, 0] == 0).any()) for mask in masks)

    def pad(key: str, tensor: Any, mask: Tensor) -> Any:
        if not isinstance(tensor, Tensor) or tensor.shape[:2] != mask.shape:
            return tensor
        hidden = [each[key][m == 0] for each, m in zip(batches, masks, strict=True)]
        seen = next((part.flatten()[0].item() for part in hidden if len(part)), _IGNORED if key == "labels" else 0)
        room = (longest - tensor.shape[1], 0) if is_left else (0, longest - tensor.shape[1])
        return torch.nn.functional.pad(tensor, (*(0, 0) * (tensor.dim() - 2), *room), value=seen)

    return [
        type(batch)({key: pad(key, value, mask) for key, value in batch.items()})
        for batch, mask in zip(batches, masks, strict=True)
    ]


def _mapped(join: Callable[[Sequence[Tensor]], Tensor], batches: Sequence[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return join(batches)
    if hasattr(first, "keys"):  # a dict, or a mapping such as a tokenizer's output
        return type(first)({key: _mapped(join, [batch[key] for batch in batches]) for key in first.keys()})  # noqa: SIM118
    if isinstance(first, tuple | list):
        lengths = {len(each) if each.dim() else -1 for batch in batches for each in batch if isinstance(each, Tensor)}
        are_samples = len({len(batch) for batch in batches}) > 1 or (
            isinstance(first, list) and len(lengths) > len(batches)
        )
        if are_samples or not any(isinstance(each, Tensor | tuple | list) or hasattr(each, "keys") for each in first):
            return type(first)(each for batch in batches for each in batch)  # texts, boxes: one for each sample
        made = [_mapped(join, [batch[index] for batch in batches]) for index in range(len(first))]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    if len(batches) > 1 and not (
        isinstance(first, str | int | float | None) and all(each == first for each in batches)
    ):
        raise ValueError(f"its batches hold a {type(first).__name__} that cannot be joined")
    return first

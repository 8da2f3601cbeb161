"""Compare variants of one job: losses of each step, final weights.

    parting = compare(read(folder), read(other), tolerance=1e-9)

`outcomes` trains the variants (see `variants`) and compares each with its partner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..config.schema import RunConfig
from ..errors import RequestError, counted
from ..files import lines_of, parse_json, understanding
from ..record.checks import BIT_FOR_BIT, Check
from . import variants
from .variants import ALONE, ReferenceFacts, Setup, Variant

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = 1e-3
"""Losses and tensors whose largest value is below this, and gradients below this share of the model's largest, are
compared as if it were this: a gradient that is mathematically zero, such as that of a bias before a BatchNorm, is
rounding noise."""
HOLDS, PARTS, REFERENCE, LEFT_OUT = "holds", "parts", "reference", "left out"
TENSORS = {"curve": "weights", "gradients": "gradients"}
"""Tensors compared beside the losses, by the check's name."""
_CLAIMS = {
    "curve": "Under every strategy, number of devices, launcher and continuation, training gives the same model",
    "gradients": "On any number of ranks, in micro-batches or not, a loop's optimizers begin with the same gradients",
}
_RESUMED_HINT = (
    "only resumed runs differ: state that a forward pass changes outside of the model's parameters and buffers, "
    "such as a counter in Python, is in no checkpoint; keep it in a buffer"
)
_HINTS = {
    "curve": "lockstep verify gradients looks for the cause",
    "gradients": "look for what depends on the samples that a rank sees at once: a sum of losses given to "
    "session.backward as a mean (reduction='sum' says that it is one), a mean over another number of things, "
    "statistics of a batch, random draws",
}


class Curve(NamedTuple):
    """A run's losses by step, and tensors of its last checkpoint."""

    losses: Mapping[int, float]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The distance of two curves. Differences are relative, and infinite where one side is missing."""

    loss: float  # the largest difference of a step's losses
    step: int | None  # the first step whose losses differ beyond the tolerance
    weight: float  # the largest difference within a tensor, relative to its largest value
    tensor: str  # the name of that tensor; empty if all have the same bits
    last_step: int
    holds: bool  # whether losses and tensors agree within the tolerance

    @property
    def place(self) -> str:
        """The place of the first difference; empty if none. Tensors are compared after the last step only."""
        return "" if self.holds else f"after step {self.last_step}" if self.step is None else f"at step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one variant."""

    variant: Variant
    verdict: str  # HOLDS or PARTS; LEFT_OUT or REFERENCE, which make no claim
    why_not: str = ""  # the reason for leaving it out
    parting: Parting | None = None
    seconds: float = 0.0

    def sentence(self, tensors: str) -> str:
        """Return the place and size of a difference, in losses and `tensors`."""
        parting = self.parting
        assert parting is not None
        most = (
            f"{tensors} by {size(parting.weight)}, most in {parting.tensor}" if parting.tensor else f"not in {tensors}"
        )
        place = f"{parting.place}, losses by {size(parting.loss)}, {most}"
        return f"{self.variant.name} differs from {self.variant.partner} {place}"


def default_tolerance(config: RunConfig) -> float:
    """Return the default relative tolerance: rounding, amplified over a short run."""
    if config.precision.name == "fp64":
        return 1e-9
    return 1e-2 if config.optim.name == "muon" else 1e-3  # Muon orthogonalises in bfloat16


def read(folder: Path, *, first_step: bool = False) -> Curve:
    """Return the curve of the run in `folder`. With `first_step`, its tensors stand for the gradients.

    They are the optimizer state by parameter (momentum, moments), and the weights of parameters without such state.
    """
    from .. import checkpoint

    tensors = checkpoint.load(folder).tensors
    if first_step:
        names = {name for name in tensors if name.startswith("optimizer/")}
        stateful = {name.partition("/")[2].rpartition("/")[0] for name in names}  # of several models: model_2.fc.weight
        weights = (name for name in tensors if name.startswith("model"))
        names |= {name for name in weights if not {name.partition("/")[2], name.replace("/", ".", 1)} & stateful}
        tensors = {name: tensor for name, tensor in tensors.items() if name in names}
    return Curve(losses_of(folder), tensors)


def losses_of(folder: Path) -> dict[int, float]:
    """Return {step: loss} of a run, exact to the bit. A loss that was not finite is NaN."""
    path = folder / "steps.jsonl"
    with understanding(path):
        rows = [parse_json(line) for line in lines_of(path)]
        # JSON has no NaN or infinity; the file holds null.
        return {row["step"]: math.nan if row["loss"] is None else row["loss"] for row in rows if row["event"] == "step"}


def compare(first: Curve, second: Curve, *, tolerance: float) -> Parting:
    """Return the distance of two curves. A `tolerance` of 0 asks for equal bits."""
    from ..checks import difference

    steps = sorted(first.losses.keys() | second.losses.keys())
    gaps = {step: gap(first.losses.get(step), second.losses.get(step)) for step in steps}
    beyond = [step for step, gap in gaps.items() if gap > tolerance]
    sizes = difference.compare(first.tensors, second.tensors).sizes(FLOOR)
    worst = max(sizes, key=lambda name: sizes[name], default="")
    weight = sizes.get(worst, 0.0)
    # A zero and a negative zero differ in bits, though not in value.
    tensors_hold = not sizes if tolerance == 0 else weight <= tolerance
    return Parting(
        loss=max(gaps.values(), default=0.0),
        step=beyond[0] if beyond else None,
        weight=weight,
        tensor=worst,
        last_step=max(steps, default=0),
        holds=bool(steps) and not beyond and tensors_hold,
    )


def gap(first: float | None, second: float | None) -> float:
    """Return two losses' relative difference. Infinite where one is missing or not finite."""
    if first is None or second is None or not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second), FLOOR)


def outcomes(setup: Setup, *, tolerance: float) -> Iterator[Outcome]:
    """Train the variants in turn; yield each outcome. Raises the error of a command that fails."""
    yield _trained(setup, variants.reference(setup), tolerance)
    for variant in variants.derive(setup, _reference_facts(setup)):
        if variant.why_not:
            yield Outcome(variant=variant, verdict=LEFT_OUT, why_not=variant.why_not)
        else:
            yield _trained(setup, variant, tolerance)


def _reference_facts(setup: Setup) -> ReferenceFacts:
    from .. import checkpoint

    folder = setup.folder / ALONE
    path = folder / "steps.jsonl"
    with understanding(path):
        rows = [parse_json(line) for line in lines_of(path)]
        header, steps = rows[0], [row for row in rows if row["event"] == "step"]
        if not steps:
            raise RequestError("The loop made no optimizer step in a session: there is nothing to compare.")
        state = checkpoint.load(folder)
        if setup.name == "gradients" and not steps[0]["lr"] and not state.part("optimizer"):
            raise RequestError(
                "The first step's learning rate is 0, and an optimizer without momentum keeps nothing of its "
                "gradients: there is nothing to compare; begin with another rate."
            )
        return ReferenceFacts(
            steps=len(steps),
            accumulation=header["chosen"]["accumulate"],
            batch=header["plan"].get("global_size", 0),
            has_statistics=header["chosen"]["batchnorm"] != "none",
            has_epochs=bool(header["epochs"]),
            optimizers=len(state.meta.get("optimizers", [()])),  # sessions record them
        )


def _trained(setup: Setup, variant: Variant, tolerance: float) -> Outcome:
    begun_s = time.monotonic()
    variants.train(setup, variant)
    seconds = time.monotonic() - begun_s
    if not variant.partner:
        return Outcome(variant=variant, verdict=REFERENCE, seconds=seconds)
    names, is_first = (variant.name, variant.partner), setup.name == "gradients"
    curve, partner = (read(setup.folder / name, first_step=is_first) for name in names)
    parting = compare(curve, partner, tolerance=0 if variant.same_bits else tolerance)
    verdict = HOLDS if parting.holds else PARTS
    return Outcome(variant=variant, verdict=verdict, parting=parting, seconds=seconds)


def check(name: str, results: Sequence[Outcome], tolerance: float, precision: str, cost_s: float) -> Check:
    """Return all comparisons as one claim `name` of a proof."""
    compared = [result.parting for result in results if result.parting is not None]
    parted = [result for result in results if result.verdict == PARTS]
    exact = sum(result.variant.same_bits for result in results if result.parting is not None)
    if parted:
        sentence = parted[0].sentence(TENSORS[name])
        if other_names := ", ".join(result.variant.name for result in parted[1:]):
            sentence += f"; so do {other_names}, of {len(compared)} compared"
        # A net with BatchNorm makes rounding of fp32 grow to a thousandth of a loss within 20 steps of digits.
        is_rounding = precision != "fp64" and not any(result.variant.same_bits for result in parted)
        rounding = f"rounding in {precision} can grow to that, and --precision fp64 shows whether it is no more"
        is_resumed = all(len(result.variant.stages) > 1 for result in parted)
        sentence += f"; {rounding if is_rounding else _RESUMED_HINT if is_resumed else _HINTS[name]}"
    else:
        sizes = [(parting.last_step, parting.loss, parting.weight) for parting in compared]
        steps, loss, weight = map(max, zip(*sizes, strict=True)) if sizes else (0, 0.0, 0.0)
        sentence = (
            f"{counted(len(compared), 'comparison')} over {counted(steps, 'step')}, {exact} bit for bit and "
            f"{len(compared) - exact} within {tolerance:g}; the largest difference is {size(loss)} of a loss and "
            f"{size(weight)} of a tensor"
        )
    return Check(
        name=name,
        claim=_CLAIMS[name],
        outcome=Check.FAILS if parted else Check.HOLDS if compared else Check.OPEN,
        times=len(compared),
        tolerance=f"{tolerance:g} relative; {BIT_FOR_BIT} in the same world",
        found=sentence,
        cost_s=cost_s,
    )


def size(difference: float) -> str:
    """Return a difference as text; 0 for none."""
    return f"{difference:.1e}" if difference else "0"

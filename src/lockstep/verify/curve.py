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
from .variants import ALONE, Known, Setup, Variant

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = 1e-3
"""Losses and tensors whose largest value is below this, and gradients below this share of the model's largest, are
compared as if it were this: what mathematics makes zero, such as the gradient of a bias before a BatchNorm, holds
rounding noise alone, which differs freely."""
HOLDS, PARTS, REFERENCE, LEFT_OUT = "holds", "parts", "reference", "left out"
TENSORS = {"curve": "weights", "gradients": "gradients"}
"""Tensors compared beside the losses, by the check's name."""
_CLAIMS = {
    "curve": "Under every strategy, number of devices, launcher and continuation, training comes to one model",
    "gradients": "On any number of ranks, in micro-batches or not, a loop's optimizers begin with the same gradients",
}
_RESUMED_HINT = (
    "only what was resumed parts: state that a forward pass changes outside of the model's parameters and buffers, "
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
    weight: float  # the largest difference of a tensor's values, by the tensor's largest value
    tensor: str  # which tensor that is; empty where all are the same bits
    last_step: int
    holds: bool  # whether losses and tensors agree within the tolerance

    @property
    def where(self) -> str:
        """The place of the first difference; empty if none. Tensors are seen after the last step alone."""
        return "" if self.holds else f"after step {self.last_step}" if self.step is None else f"at step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one variant."""

    variant: Variant
    verdict: str  # HOLDS or PARTS; LEFT_OUT or REFERENCE, of which nothing is claimed
    why_not: str = ""  # why it was left out
    parting: Parting | None = None
    seconds: float = 0.0

    def sentence(self, tensors: str) -> str:
        """Return the place and size of a difference, in losses and `tensors`."""
        parting = self.parting
        assert parting is not None
        most = (
            f"{tensors} by {size(parting.weight)}, most in {parting.tensor}" if parting.tensor else f"not in {tensors}"
        )
        where = f"{parting.where}, losses by {size(parting.loss)}, {most}"
        return f"{self.variant.name} parts from {self.variant.partner} {where}"


def default_tolerance(config: RunConfig) -> float:
    """Return the default relative tolerance: rounding, amplified over a short run."""
    if config.optim.name == "muon":  # torch's orthogonalises in bfloat16 whatever the precision
        return 1e-2
    return 1e-9 if config.precision.name == "fp64" else 1e-3


def read(folder: Path, *, first_step: bool = False) -> Curve:
    """Return the curve of the run in `folder`. With `first_step`, its tensors stand for the gradients.

    Those are what optimizers keep of gradients, by parameter (momentum, moments), and the weights without such state.
    """
    from .. import checkpoint

    tensors = checkpoint.load(folder).tensors
    if first_step:
        kept = {name for name in tensors if name.startswith("optimizer/")}
        known = {name.partition("/")[2].rpartition("/")[0] for name in kept}  # of several models: model_2.fc.weight
        others = (name for name in tensors if name.startswith("model"))
        kept |= {name for name in others if not {name.partition("/")[2], name.replace("/", ".", 1)} & known}
        tensors = {name: held for name, held in tensors.items() if name in kept}
    return Curve(losses_of(folder), tensors)


def losses_of(folder: Path) -> dict[int, float]:
    """Return {step: loss} of a run, to the last bit. NaN for a loss that was not finite."""
    path = folder / "steps.jsonl"
    with understanding(path):
        rows = [parse_json(line) for line in lines_of(path)]
        # JSON has neither NaN nor infinities: they are null there.
        return {row["step"]: math.nan if row["loss"] is None else row["loss"] for row in rows if row["event"] == "step"}


def compare(ours: Curve, theirs: Curve, *, tolerance: float) -> Parting:
    """Return the distance of two curves. A `tolerance` of 0 asks for equal bits."""
    from ..checks import difference

    steps = sorted(ours.losses.keys() | theirs.losses.keys())
    gaps = {step: gap(ours.losses.get(step), theirs.losses.get(step)) for step in steps}
    beyond = [step for step, gap in gaps.items() if gap > tolerance]
    sizes = difference.compare(ours.tensors, theirs.tensors).sizes(FLOOR)
    worst = max(sizes, key=lambda name: sizes[name], default="")
    weight = sizes.get(worst, 0.0)
    # A zero and a negative zero are no distance apart, and yet not the same bits.
    tensors_hold = not sizes if tolerance == 0 else weight <= tolerance
    return Parting(
        loss=max(gaps.values(), default=0.0),
        step=beyond[0] if beyond else None,
        weight=weight,
        tensor=worst,
        last_step=max(steps, default=0),
        holds=bool(steps) and not beyond and tensors_hold,
    )


def gap(ours: float | None, theirs: float | None) -> float:
    """Return two losses' relative difference. Infinite where one is missing or not finite."""
    if ours is None or theirs is None or not (math.isfinite(ours) and math.isfinite(theirs)):
        return math.inf
    return abs(ours - theirs) / max(abs(ours), abs(theirs), FLOOR)


def outcomes(setup: Setup, *, tolerance: float) -> Iterator[Outcome]:
    """Train the variants in turn; yield each outcome. Raises the error of a command that fails."""
    yield _trained(setup, variants.reference(setup), tolerance)
    for variant in variants.others(setup, _known(setup)):
        if variant.why_not:
            yield Outcome(variant=variant, verdict=LEFT_OUT, why_not=variant.why_not)
        else:
            yield _trained(setup, variant, tolerance)


def _known(setup: Setup) -> Known:
    from .. import checkpoint

    folder = setup.folder / ALONE
    path = folder / "steps.jsonl"
    with understanding(path):
        rows = [parse_json(line) for line in lines_of(path)]
        told, steps = rows[0], [row for row in rows if row["event"] == "step"]
        if not steps:
            raise RequestError("The loop made no optimizer step in a session: there is nothing to compare.")
        state = checkpoint.load(folder)
        if setup.name == "gradients" and not steps[0]["lr"] and not state.part("optimizer"):
            raise RequestError(
                "The first step's learning rate is 0, and an optimizer without momentum keeps nothing of its "
                "gradients: there is nothing to compare; begin with another rate."
            )
        return Known(
            steps=len(steps),
            accumulation=told["chosen"]["accumulate"],
            batch=told["plan"].get("global_size", 0),
            has_statistics=told["chosen"]["batchnorm"] != "none",
            has_epochs=bool(told["epochs"]),
            optimizers=len(state.meta.get("optimizers", [()])),  # sessions record them
        )


def _trained(setup: Setup, variant: Variant, tolerance: float) -> Outcome:
    begun_s = time.monotonic()
    variants.train(setup, variant)
    seconds = time.monotonic() - begun_s
    if not variant.partner:
        return Outcome(variant=variant, verdict=REFERENCE, seconds=seconds)
    names, is_first = (variant.name, variant.partner), setup.name == "gradients"
    ours, theirs = (read(setup.folder / name, first_step=is_first) for name in names)
    parting = compare(ours, theirs, tolerance=0 if variant.same_bits else tolerance)
    verdict = HOLDS if parting.holds else PARTS
    return Outcome(variant=variant, verdict=verdict, parting=parting, seconds=seconds)


def check(name: str, found: Sequence[Outcome], tolerance: float, precision: str, cost_s: float) -> Check:
    """Return all comparisons as one claim `name` of a proof."""
    compared = [each.parting for each in found if each.parting is not None]
    parted = [each for each in found if each.verdict == PARTS]
    exact = sum(each.variant.same_bits for each in found if each.parting is not None)
    if parted:
        said = parted[0].sentence(TENSORS[name])
        if others := ", ".join(each.variant.name for each in parted[1:]):
            said += f"; so do {others}, of {len(compared)} compared"
        # A net with BatchNorm makes rounding of fp32 grow to a thousandth of a loss within 20 steps of digits.
        is_rounding = precision != "fp64" and not any(each.variant.same_bits for each in parted)
        rounding = f"rounding in {precision} can grow to that, and --precision fp64 shows whether it is no more"
        is_resumed = all(len(each.variant.stages) > 1 for each in parted)
        said += f"; {rounding if is_rounding else _RESUMED_HINT if is_resumed else _HINTS[name]}"
    else:
        sizes = [(each.last_step, each.loss, each.weight) for each in compared]
        steps, loss, weight = map(max, zip(*sizes, strict=True)) if sizes else (0, 0.0, 0.0)
        said = (
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
        found=said,
        cost_s=cost_s,
    )


def size(difference: float) -> str:
    """Return a difference as text; 0 for none."""
    return f"{difference:.1e}" if difference else "0"

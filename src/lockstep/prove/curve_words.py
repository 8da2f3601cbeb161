"""What the comparison of variants came to, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import counted
from ..proof import BIT_FOR_BIT, Check
from .curve import PARTS, Outcome

CLAIMS = {
    "curve": "Under every strategy, number of devices, launcher and continuation, training comes to one model",
    "gradients": "On any number of ranks, in micro-batches or not, a loop's optimizers begin with the same gradients",
}
"""By the name of the check."""
_HINTS = {
    "curve": "lockstep verify gradients looks for the cause",
    "gradients": "look for what depends on the samples that a rank sees at once: a mean over another number of things, "
    "statistics of a batch, random draws",
}
TENSORS = {"curve": "weights", "gradients": "gradients"}
"""What is compared beside the losses."""


def check(name: str, found: Sequence[Outcome], tolerance: float, precision: str, cost_s: float) -> Check:
    """Return what came of all comparisons, as the claim `name` of a proof."""
    claims = [each for each in found if each.is_claim]
    parted = [each for each in claims if each.verdict == PARTS]
    return Check(
        name=name,
        claim=CLAIMS[name],
        outcome=Check.FAILS if parted else Check.HOLDS,
        times=len(claims),
        tolerance=f"{tolerance:g} relative; {BIT_FOR_BIT} in the same world",
        found=(_parted(name, parted, len(claims), precision) if parted else _held(claims, tolerance)) + _besides(found),
        cost_s=cost_s,
    )


def _held(claims: Sequence[Outcome], tolerance: float) -> str:
    partings = [each.parting for each in claims if each.parting]
    exact = sum(each.variant.same_bits for each in claims)
    loss, weight = (max(getattr(each, name) for each in partings) for name in ("loss", "weight"))
    steps = counted(partings[0].last_step, "step")
    return (
        f"{counted(len(claims), 'comparison')} over {steps}, {exact} bit for bit and {len(claims) - exact} within "
        f"{tolerance:g}; the largest difference is {size(loss)} of a loss and {size(weight)} of a tensor"
    )


def _besides(found: Sequence[Outcome]) -> str:
    said = ", ".join(each.variant.name for each in found if each.is_claim and each.variant.note)
    return f"; {said}: by design not one device's model, but that of local batch statistics" if said else ""


def _parted(name: str, parted: Sequence[Outcome], claims: int, precision: str) -> str:
    first, *others = parted
    more = f"; so do {', '.join(each.variant.name for each in others)}, of {claims} compared" if others else ""
    # A net with BatchNorm makes rounding of fp32 grow to a thousandth of a loss within 20 steps of the digits recipe.
    hint = (
        _HINTS[name]
        if precision == "fp64" or any(each.variant.same_bits for each in parted)
        else f"rounding in {precision} can grow to that, and --precision fp64 shows whether it is no more"
    )
    return f"{sentence(name, first)}{more}; {hint}"


def sentence(name: str, each: Outcome) -> str:
    """Return where two variants part, and how far, in the check of that name."""
    parting = each.parting
    assert parting is not None
    begins = f"after step {parting.last_step}" if parting.step is None else f"at step {parting.step}"
    what = TENSORS[name]
    weights = f"{what} by {size(parting.weight)}, most in {parting.tensor}" if parting.tensor else f"not in {what}"
    return f"{each.variant.name} parts from {each.variant.partner} {begins}, losses by {size(parting.loss)}, {weights}"


def size(difference: float) -> str:
    """Return a difference as a word; none at all as 0."""
    return f"{difference:.1e}" if difference else "0"

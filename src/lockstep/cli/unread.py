"""Flags that nothing would read beside the others: refused, since whoever gives one expects it to matter.

Only flags are looked at: a recipe or a file may well hold the milestones of a schedule that a flag has replaced.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..config.options import flatten
from ..config.registry import KINDS
from ..config.schema import RunConfig
from ..data import sets
from ..errors import RequestError

_OF_OPTIMIZATION = {
    "milestones": ("schedule", ("step", "multistep")),
    "gamma": ("schedule", ("step", "multistep")),
    "momentum": ("optimizer", ("sgd", "muon")),
    "nesterov": ("optimizer", ("sgd", "muon")),
    "base-batch": ("lr-rule", ("linear", "sqrt")),
}


def check(given: Iterable[str], config: RunConfig) -> None:
    """Raise `RequestError` for the first of the flags `given` (without dashes) that `config` leaves without effect."""
    values, readers = flatten(config), _readers()
    for flag in given:
        off = values.get(flag) is False  # --no-nesterov is true of an optimizer without momentum, too
        if flag not in readers or off:
            continue
        chooser, fitting = readers[flag]
        chosen = values[chooser]
        found_out_later = chosen == "auto" or ":" in chosen  # the user's own code may read what it is given
        if chosen not in fitting and not found_out_later:
            raise RequestError(
                f"--{flag} has no effect with --{chooser} {chosen}: it belongs to {_listed(fitting)}; "
                f"leave it out, or choose another --{chooser}."
            )


def _readers() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return, for each flag that is read under some values of another one only, that other one and those values."""
    of_strategies = {flag for kind in KINDS.values() for flag in kind.options}
    return (
        _OF_OPTIMIZATION
        | {flag: ("data", names) for flag, names in sets.readers().items()}
        | {
            flag: ("strategy", tuple(name for name, kind in KINDS.items() if flag in kind.options))
            for flag in of_strategies
        }
    )


def _listed(names: tuple[str, ...]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last

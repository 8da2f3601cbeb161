"""`lockstep.session()`: one rank's session for a user script."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from ..config.options import OF_A_SESSION, apply, flatten, left_to_command
from ..config.schema import RunConfig
from ..errors import unknown
from ..record.base import Nothing
from ..record.console import Notices
from ..runs.run import Opened, opened
from . import script
from .session import Session


def session(**options: Any) -> Session:
    """Return this rank's session. A process without a launcher is the only rank.

    `options` are those of `lockstep train` in `OF_A_SESSION`, by their names (`output="runs/mnist"`, `resume="auto"`,
    `accumulate=4`, `precision="bf16"`, `seed=1` …); flags of `lockstep run` beat them. Call it once, before the model
    is made: the weights follow from the seed. Raises `RequestError` for options that cannot be honoured.
    """
    named = {name.replace("_", "-"): value for name, value in options.items()}
    for name in options:
        if name.replace("_", "-") not in OF_A_SESSION:
            taken = [each.replace("-", "_") for each in OF_A_SESSION]
            raise unknown("option of lockstep.session", name, taken, f"It takes {', '.join(taken)}.")
    # A model keeps the order of memory that its user gave it.
    config = apply(apply(RunConfig(), {"channels-last": "off"}, source="a session"), named, source="lockstep.session")
    again, started = "", script.take()
    has_folder = started is not None or config.record.output is not None
    if started is not None:
        decided = started.given | {"launcher", "strategy", "accelerator", "model", "data"}
        flags = {key: value for key, value in flatten(started.config).items() if key in decided}
        config = apply(config, flags, source="the flags")
    else:
        started = script.own_process(config)
        config = dataclasses.replace(config, parallel=started.config.parallel)  # the launcher, and the number of ranks
        how = "" if config.checkpoint.resume == "auto" else ' and lockstep.session(output=…, resume="auto")'
        again = f"continue with the same command{how}"
    world = started.world
    run: contextlib.AbstractContextManager[Opened] = contextlib.nullcontext(
        Opened(config, Notices() if world.is_main else Nothing(), None)
    )
    if has_folder:
        recorded = {"model", "data", *left_to_command()}
        run = opened(config, world, keys=("seed",), console=Notices(), only=recorded, resume_hint=again)
    made = Session(config, world, run, hooks=started.hooks)
    started.closing.append(made.close)
    return made

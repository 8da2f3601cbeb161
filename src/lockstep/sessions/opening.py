"""`lockstep.session()`: one rank's session for a user script."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Literal, Never

from ..config.options import apply, flatten, left_to_command
from ..config.schema import RunConfig
from ..errors import RequestError, unknown
from ..record.base import Nothing
from ..record.console import Notices
from ..runs.opened import OpenRun, open_run
from . import script
from .session import Session


def session(
    *,
    output: str | Path | None = None,
    resume: str = "",
    checkpoint_every: int | None = None,
    log_every: int = 50,
    verify_every: int | None = None,
    ledger: bool = False,
    seed: int = 0,
    max_steps: int | None = None,
    accumulate: int | None = None,
    micro_batch: int | None = None,
    draws: Literal["rank", "global"] = "rank",
    batchnorm: Literal["auto", "sync", "local"] = "auto",
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32",
    deterministic: bool = False,
    timeout: float = 60.0,
    stall_timeout: float = 600.0,
    collectives: Literal["auto", "gloo", "shared-memory"] = "auto",
    **unknown_options: Never,
) -> Session:
    """Return this rank's session (*collective*). A process without a launcher is the only rank.

    Call it once, before the model is made: the weights follow from the seed. Flags of `lockstep run` beat the options.
    While the session of a process without a launcher is open, an uncaught error goes through a `sys.excepthook` of
    lockstep's, which ends the ranks together and calls the hook before it; closing the session restores that one.

    - `output`: the run's folder. By default nothing is written, or under `lockstep run`, to runs/NAME.
    - `resume`: "auto" (the last checkpoint in `output`, if any), or the path of a checkpoint or a run.
    - `checkpoint_every`: optimizer steps between checkpoints; by default an epoch.
    - `log_every`: optimizer steps between log lines (fewer where steps are slow).
    - `verify_every`: optimizer steps between comparisons of all ranks' weights, besides the one before each checkpoint;
      0 for none at all, by default as often as costs under 0.5 % of the time.
    - `ledger`: count each sample in every epoch and evaluation; stop unless it came exactly once.
    - `seed`: of the weights, of the order of the samples and of their augmentation.
    - `max_steps`: optimizer steps after which the run ends.
    - `accumulate`: micro-batches that each global batch is cut into.
    - `micro_batch`: in place of `accumulate`, the most samples that a rank computes at once.
    - `draws`: "rank" (each rank draws its own dropout and noise), or "global" (as one device would).
    - `batchnorm`: statistics of the global micro-batch ("sync", which "auto" takes), or of each rank's share ("local").
    - `precision`: "auto" takes bf16 where the hardware has it; then the model depends on the hardware.
    - `deterministic`: use only algorithms that give the same bits each time.
    - `timeout`: seconds to wait for all ranks at the start.
    - `stall_timeout`: seconds without progress on any rank after which all end.
    - `collectives`: how ranks exchange CPU tensors; "auto" takes shared memory among ranks of one host.

    Raises `RequestError` for options that cannot be honoured, and where it is called twice.
    """
    options = dict(locals())
    for name in options.pop("unknown_options"):
        raise unknown("option of lockstep.session", name, [*options], f"It takes {', '.join(options)}.")
    named = {name.replace("_", "-"): value for name, value in options.items()}
    # A model keeps the order of memory that its user gave it.
    base = apply(RunConfig(), {"channels-last": "off"}, source="a session")
    try:
        config = apply(base, named, source="lockstep.session")
    except RequestError as error:  # which names flags
        raise RequestError(
            re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_") if flag[1] in named else flag[0], str(error))
        ) from error
    again, started = "", script.take()
    is_own, has_folder = started is None, started is not None or config.record.output is not None
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
    run: contextlib.AbstractContextManager[OpenRun] = contextlib.nullcontext(
        OpenRun(config, Notices() if world.is_main else Nothing(), None)
    )
    if has_folder:
        recorded = {"model", "data", *left_to_command()}
        run = open_run(config, world, keys=("seed",), console=Notices(), only=recorded, resume_hint=again)
    made = Session(config, world, run, hooks=started.hooks)
    started.closing.append(made._close_with_process if is_own else made.close)
    return made

"""`lockstep.session()`: one rank's session for a user script."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Never

from ..config.options import apply, flatten, left_to_command
from ..config.registry import KINDS, per_device
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
    remote: str = "",
    resume: str = "",
    checkpoint_every: int | None = None,
    keep: int = 2,
    log_every: int = 50,
    profile: str = "",
    verify_every: int | None = None,
    ledger: bool = False,
    seed: int = 0,
    max_steps: int | None = None,
    accumulate: int | None = None,
    micro_batch: int | None = None,
    draws: Literal["rank", "global"] = "rank",
    batchnorm: Literal["auto", "sync", "local"] = "auto",
    strategy: Literal["auto", "ddp", "zero1", "fsdp"] = "auto",
    shard_modules: Sequence[str] = (),
    shard_size: int | None = None,
    shard_reshard: bool = True,
    exchange: Literal["full", "bf16", "fp16", "powersgd", "local-sgd", "diloco"] = "full",
    exchange_every: int | None = None,
    powersgd_rank: int | None = None,
    powersgd_start: int | None = None,
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32",
    deterministic: bool = False,
    checkpoint_activations: Sequence[str] = (),
    timeout: float = 60.0,
    stall_timeout: float = 600.0,
    collectives: Literal["auto", "gloo", "shared-memory"] = "auto",
    track: Sequence[str] = (),
    **unknown_options: Never,
) -> Session:
    """Return this rank's session (*collective*). A process without a launcher is the only rank.

    Call it once, before you make the model: the seed determines the weights. Flags of `lockstep run` override the
    options. While the session of a process without a launcher is open, lockstep's `sys.excepthook` handles uncaught
    errors: it ends the ranks together and calls the previous hook. Closing the session restores that hook.

    - `output`: the run's folder. Default: none, or runs/NAME under `lockstep run`. A URL, such as s3://bucket/run, is
      `remote` and a folder in runs.
    - `remote`: the URL of a folder in a store of fsspec's, to which the run is copied. Default: none.
    - `resume`: "auto" (the last checkpoint in `output` or `remote`, if any), the path of a checkpoint or a run, or the
      URL of a run.
    - `checkpoint_every`: optimizer steps between checkpoints. Default: an epoch.
    - `keep`: how many of the last checkpoints stay, besides the best.
    - `log_every`: optimizer steps between log lines (fewer for slow steps).
    - `profile`: optimizer steps to trace by torch.profiler, such as "10:15", into `output`'s folder.
    - `verify_every`: optimizer steps between comparisons of all ranks' weights; every checkpoint also follows one. 0
      disables all. Default: as often as costs under 0.5 % of the time.
    - `ledger`: count each sample in every epoch and evaluation; stop unless it came exactly once.
    - `seed`: seed of the weights, the order of the samples and their augmentation.
    - `max_steps`: optimizer steps after which the run ends.
    - `accumulate`: micro-batches per global batch.
    - `micro_batch`: in place of `accumulate`, the most samples that a rank computes at once.
    - `draws`: "rank" (dropout and noise differ between ranks), or "global" (as on one device).
    - `batchnorm`: statistics of the global micro-batch ("sync", the choice of "auto"), or of each rank's share
      ("local").
    - `strategy`: "auto" and "ddp" give each rank the whole model and the optimizers' state; "zero1" divides the state
      among the ranks, "fsdp" also the weights and gradients.
    - `shard_modules`: under fsdp, the classes of the modules whose weights are gathered one at a time, by name or
      shell pattern. Default: those that repeat.
    - `shard_size`: under fsdp, the ranks that divide the weights, such as those of a node. Default: all.
    - `shard_reshard`: under fsdp, free weights between forward and backward. False keeps them, which saves one of two
      gathers and takes more memory.
    - `exchange`: "bf16" and "fp16" round the gradients that ranks send, "powersgd" sends matrices of low rank; with
      "local-sgd" and "diloco", ranks step by their own gradients, and exchange weights every few steps. All but "full"
      train another model.
    - `exchange_every`: optimizer steps between two exchanges of weights. Default: 100.
    - `powersgd_rank`: rank of the matrices. Default: 4.
    - `powersgd_start`: optimizer steps with full gradients before powersgd begins. Default: 0.
    - `precision`: "auto" uses bf16 if the hardware has it; then the model depends on the hardware.
    - `deterministic`: use only algorithms with reproducible bits.
    - `checkpoint_activations`: class names, or shell patterns of them, of modules whose activations are recomputed in
      the backward pass, to save memory; the bits stay the same.
    - `timeout`: seconds to wait for all ranks at the start.
    - `stall_timeout`: seconds without progress on any rank until all ranks end.
    - `collectives`: transport of CPU tensors between ranks; "auto" uses shared memory among ranks of one host.
    - `track`: experiment trackers, such as ["wandb", "csv"], or your own class as "module:name". Needs `output`, which
      keeps their ids for a resumed run.

    Raises `RequestError` for options that cannot be honoured, and for a second call.
    """
    options = dict(locals())
    for name in options.pop("unknown_options"):
        raise unknown("option of lockstep.session", name, [*options], f"It takes {', '.join(options)}.")
    flags = {name.replace("_", "-"): value for name, value in options.items()}
    # A model keeps the user's memory format.
    base = apply(RunConfig(), {"channels-last": "off"}, source="a session")
    try:
        config = apply(base, flags, source="lockstep.session")
    except RequestError as error:  # its text names flags
        raise RequestError(
            re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_") if flag[1] in flags else flag[0], str(error))
        ) from error
    if strategy != "auto" and not KINDS[strategy].process_per_device:
        raise RequestError(
            f"lockstep.session(strategy={strategy!r}): each process of a script drives one device; give "
            f"{per_device()}, or leave it out."
        )
    if config.batch.fits_memory:
        raise RequestError(
            "micro_batch 'auto' belongs to lockstep train: a session cannot repeat a step of your loop; give a number."
        )
    resume_hint, started = "", script.take()
    is_own, has_folder = started is None, started is not None or config.record.output is not None
    if config.record.track and not has_folder:
        raise RequestError("lockstep.session(track=…) keeps the trackers' run ids in the run's folder; give output=.")
    if started is not None:
        decided = started.flags | {"launcher", "accelerator", "model", "data"}
        if config.parallel.strategy == "auto":
            decided |= {"strategy"}
        if not config.checkpoint.resume:
            decided |= {"resume"}  # which several nodes imply
        if started.config.record.remote:
            decided |= {"output", "remote"}  # a URL in one flag is both
        overrides = {key: value for key, value in flatten(started.config).items() if key in decided}
        # cuBLAS and NCCL read their settings once: those of the flag precede the group.
        if deterministic and not started.config.precision.deterministic and started.world.device.type != "cpu":
            raise RequestError(
                "lockstep.session(deterministic=True) comes too late under lockstep run, which has formed the ranks' "
                "group for any algorithms; give lockstep run --deterministic."
            )
        config = apply(config, overrides, source="the flags")
    else:
        started = script.own_process(config)
        config = dataclasses.replace(config, parallel=started.config.parallel)  # the launcher, and the number of ranks
        option = "" if config.checkpoint.resume == "auto" else ' and lockstep.session(output=…, resume="auto")'
        resume_hint = f"continue with the same command{option}"
    world = started.world
    run: contextlib.AbstractContextManager[OpenRun] = contextlib.nullcontext(
        OpenRun(config, Notices() if world.is_main else Nothing(), None)
    )
    if has_folder:
        recorded = {"model", "data", *left_to_command()}
        run = open_run(config, world, keys=("seed",), console=Notices(), only=recorded, resume_hint=resume_hint)
    opened_session = Session(config, world, run, hooks=started.hooks)
    started.closing.append(opened_session._close_with_process if is_own else opened_session.close)
    return opened_session

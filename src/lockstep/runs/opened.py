"""One run from start to summary, in its folder. Rank 0 chooses the folder and writes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from .. import hardware
from ..checkpoint import find, resume
from ..checkpoint.state import State
from ..config.options import IDENTITY, flatten, flatten_common, to_toml
from ..config.schema import RunConfig
from ..config.validity import is_url
from ..errors import RequestError, RunError
from ..files import write_whole
from ..launchers.devices import visible_gpus
from ..monitor import failures, output
from ..monitor.notes import FOLDER
from ..monitor.progress import SETUP
from ..record import trackers
from ..record.base import Epoch, Nothing, Recorder, Recorders
from ..record.console import Notices, Terminal
from ..record.jsonl import JsonLines, rewind
from ..record.manifest import Documents
from ..screen import Screen
from ..world.world import World
from . import folders, remote

_FIRST_CHECKPOINT = "came upon"
"""Note of a run's first start for later ones: the last checkpoint already in the run's folder."""


@dataclass(frozen=True)
class OpenRun:
    """A run with a locked folder: its config, recorder and resumed state. `config` names the folder."""

    config: RunConfig
    recorder: Recorder
    state: State | None
    resume_hint: str = ""  # advice for continuing a stopped run, unless a flag does that


@contextlib.contextmanager
def open_run(
    config: RunConfig,
    world: World,
    *,
    keys: Collection[str] = IDENTITY,
    console: Recorder | None = None,
    only: Collection[str] | None = None,
    resume_hint: str = "",
) -> Iterator[OpenRun]:
    """Lock the run's folder within the block; record its errors (*collective*).

    `keys` are the options that a continued run must share with the saved one. `console` replaces the terminal's
    recorder. `only` are the options to record, by default all. `resume_hint` is that of `OpenRun`. Raises
    `RequestError` for options that differ between ranks, and as `folders.claim` and `resume.load` do.
    """
    world.progress.enter(SETUP)  # other ranks wait while rank 0 works with files
    if mismatch := world.find_mismatch({f"--{key}": value for key, value in flatten_common(config).items()}):
        raise RequestError(
            f"Rank {mismatch[0]} was started with {mismatch[1]}: the replicas would drift apart; "
            "start every rank with the same options."
        )
    if config.record.track:
        world.together(lambda: trackers.check(config.record.track) if world.is_main else None)
    must_exist = is_url(config.checkpoint.resume)
    if must_exist:  # `apply` has made it the run's own
        config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
    requested = config
    config, earlier = _continue_earlier_start(config, world)
    # Raises before a folder is made. Of a run in a store, a newer checkpoint may be there.
    state = None if config.record.remote else resume.load(config, world, keys=keys)
    with contextlib.ExitStack() as stack:
        folder = _claim_folder(stack, config, world, earlier)
        stack.enter_context(output.logged_to_file(folder / "output" / f"rank_{world.rank}.txt", shown=world.is_main))
        config = replace(config, record=replace(config.record, output=folder))
        world.progress.folder = folder
        if config.record.remote:
            remote.restore(config, world, is_restart=earlier is not None, must_exist=must_exist)
        state = state or resume.load(config, world, keys=keys)  # from the folder that --resume auto has found
        begun_s = time.time()
        recorder: Recorder = Nothing()
        if world.is_main:
            shown = console or Terminal.detect()
            if config.record.quiet:  # a user's script, if any, keeps standard output
                shown = Notices(Screen(stderr=console is not None), quiet=True)
            step = state.meta["step"] if state else 0
            portable = _portable_config(requested, folder)
            upload: Recorder = Nothing()
            if config.record.remote:
                upload = remote.Upload(config, lambda event, **fields: recorder.record(event, **fields))
            recorder = Recorders(partial(_open_recorders, portable, folder, world, keys, step, only, upload, shown))
        world.progress.failed = lambda error: recorder.record("failed", exit=RunError.exit_code, error=error)
        try:
            yield OpenRun(config, recorder, state, resume_hint)
        except (Exception, SystemExit) as error:
            failure = failures.account(error, world.rank, config)
            cause = failures.cause_in(folder / "failures", since_s=begun_s) if failure.is_echo else ""
            # A script may pass text to sys.exit. A library's error may have an unrelated `code`, such as HTTP's 404.
            code = error.code if isinstance(error, SystemExit) else failure.error().exit_code
            recorder.record("failed", exit=code if type(code) is int else 1, error=cause or failure.sentence)
            raise
        finally:
            world.progress.failed = None
            recorder.close()


def _open_recorders(
    config: RunConfig,
    folder: Path,
    world: World,
    keys: Collection[str],
    step: int,
    only: Collection[str] | None,
    upload: Recorder,
    shown: Recorder,
) -> tuple[list[Recorder], Epoch]:
    """Return rank 0's recorders and the current epoch. Raises `OSError` for an unwritable folder."""
    from ..record.tensorboard import TensorBoard  # on rank 0 alone: the import is slow
    from ..record.tracking import Tracking

    facts = {"topology": asdict(world.topology), "hardware": asdict(hardware.survey(visible_gpus()))}
    write_whole(folder / "config.toml", to_toml(config, only).encode())
    epoch = rewind(folder / "steps.jsonl", step=step)  # cuts off the records of later steps
    lines = JsonLines(folder / "steps.jsonl")
    tensorboard = TensorBoard(folder, config=flatten(config, only), identity=keys, resume_step=step)
    names = [name for name in config.record.track if name != "tensorboard"]
    # The last reports failed writes of the others; the first ones close while they record their warnings.
    tracking = [Tracking(name, folder, flatten(config, only)) for name in names]
    return [upload, *tracking, lines, tensorboard, Documents(folder, facts), shown], epoch


def _continue_earlier_start(config: RunConfig, world: World) -> tuple[RunConfig, Path | None]:
    """Return (config, folder) to continue a lost earlier start (*collective*).

    Returns (`config`, None) without an earlier start, or if that was lost before it had a folder.
    """
    note = world.from_main(lambda: world.notes.read(FOLDER))
    if not note:
        return config, None
    folder = Path(note)
    # If the earlier start was lost before its first checkpoint, this one begins in the same way.
    has_saved = world.from_main(lambda: _last_checkpoint(folder) != world.notes.read(_FIRST_CHECKPOINT))
    checkpoint = replace(config.checkpoint, resume="auto") if has_saved else config.checkpoint
    return replace(config, checkpoint=checkpoint, record=replace(config.record, output=folder)), folder


def _last_checkpoint(folder: Path) -> str:
    """Return the name of a run's last checkpoint, or ""."""
    path = find(folder)
    return Path(os.path.realpath(path)).name if path else ""


def _claim_folder(stack: contextlib.ExitStack, config: RunConfig, world: World, earlier: Path | None) -> Path:
    """Lock the run's folder until `stack` closes; return its path (*collective*). See `folders.claim` on `earlier`."""
    # An absolute path: a user's data set may change the working folder.
    path = Path(world.from_main(lambda: str(stack.enter_context(folders.claim(config, earlier=earlier)))))
    if world.is_main:
        if earlier is None:
            world.notes.write(_FIRST_CHECKPOINT, _last_checkpoint(path))
        world.notes.write(FOLDER, str(path))
    return path


def _portable_config(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config that repeats the run in another folder.

    Leaves out the rendezvous and folders of this start, and a --resume of the same folder.
    """
    parallel = replace(config.parallel, launcher="auto", init_method="", rank=None, world_size=None, interface="")
    resume = config.checkpoint.resume
    is_own = resume == "auto" or (resume and folders.run_of(Path(resume).absolute()) == folder)
    checkpoint = replace(config.checkpoint, resume="" if is_own else resume)
    record = replace(config.record, output=None, remote="")
    return replace(config, parallel=parallel, checkpoint=checkpoint, record=record)

"""One run from start to summary, in its own folder. Rank 0 alone chooses the folder and writes; all learn of it."""

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
from ..errors import RequestError, RunError
from ..files import write_whole
from ..launchers.devices import visible_gpus
from ..monitor import failures, output
from ..monitor.notes import FOLDER
from ..monitor.progress import SETUP
from ..record.base import Epoch, Nothing, Recorder, Recorders
from ..record.console import Notices, Terminal
from ..record.jsonl import JsonLines, rewind
from ..record.manifest import Documents
from ..screen import Screen
from ..world.world import World
from . import folders

_CAME_UPON = "came upon"
"""A note of a run's first start for the next: the last checkpoint that the run's folder had already."""


@dataclass(frozen=True)
class OpenRun:
    """A run with a held folder: its config, recorder and resumed state. `config` names the folder."""

    config: RunConfig
    recorder: Recorder
    state: State | None
    resume_hint: str = ""  # how it can be continued once it was stopped, where that is not by a flag


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
    """Hold the run's folder within the block; record its errors (*collective*).

    `keys` are the options that a continued run must share with the one before. `console` replaces the recorder for a
    person. The options in `only` are recorded, by default all. `resume_hint` is as in `OpenRun`.
    """
    world.progress.enter(SETUP)  # the others wait while rank 0 works with files
    if found := world.find_mismatch({f"--{key}": value for key, value in flatten_common(config).items()}):
        raise RequestError(
            f"Rank {found[0]} was started with {found[1]}: the replicas would drift apart; "
            "start every rank with the same options."
        )
    asked = config
    config, before = _after(config, world)
    state = resume.load(config, world, keys=keys)  # what cannot be continued is refused before a folder is made
    with contextlib.ExitStack() as stack:
        folder = _claimed(stack, config, world, before)
        stack.enter_context(output.kept(folder / "output" / f"rank_{world.rank}.txt", shown=world.is_main))
        config = replace(config, record=replace(config.record, output=folder))
        world.progress.folder = folder
        state = state or resume.load(config, world, keys=keys)  # of the folder that --resume auto has found
        begun_s = time.time()
        recorder: Recorder = Nothing()
        if world.is_main:
            shown = console or Terminal.detect()
            if config.record.quiet:  # standard output is that of a user's own script, where there is one
                shown = Notices(Screen(stderr=console is not None), quiet=True)
            step = state.meta["step"] if state else 0
            recorder = Recorders(partial(_opened, _lasting(asked, folder), folder, world, keys, step, only, shown))
        world.progress.failed = lambda told: recorder.record("failed", exit=RunError.exit_code, error=told)
        try:
            yield OpenRun(config, recorder, state, resume_hint)
        except (Exception, SystemExit) as error:
            failure = failures.account(error, world.rank, config)
            cause = failures.cause_in(folder / "failures", since_s=begun_s) if failure.is_echo else ""
            # A script's sys.exit may be given a text. A library's error may have a code of its own, such as HTTP's 404.
            code = error.code if isinstance(error, SystemExit) else failure.error().exit_code
            recorder.record("failed", exit=code if type(code) is int else 1, error=cause or failure.sentence)
            raise
        finally:
            world.progress.failed = None
            recorder.close()


def _opened(
    config: RunConfig,
    folder: Path,
    world: World,
    keys: Collection[str],
    step: int,
    only: Collection[str] | None,
    shown: Recorder,
) -> tuple[list[Recorder], Epoch]:
    """Open rank 0's recorders; return them and the epoch under way. Raises OSError where the folder is not writable."""
    from ..record.tensorboard import TensorBoard  # rank 0's alone: it takes a while

    facts = {"topology": asdict(world.topology), "hardware": asdict(hardware.survey(visible_gpus()))}
    write_whole(folder / "config.toml", to_toml(config, only).encode())
    epoch = rewind(folder / "steps.jsonl", step=step)  # what was recorded of later steps is cut off
    lines = JsonLines(folder / "steps.jsonl")
    tensorboard = TensorBoard(folder, config=flatten(config, only), identity=keys, resume_step=step)
    return [lines, tensorboard, Documents(folder, facts), shown], epoch  # the last tells what else was not written


def _after(config: RunConfig, world: World) -> tuple[RunConfig, Path | None]:
    """Return (config, folder) to continue a lost earlier start (*collective*).

    (`config`, None) without an earlier start, or where that was lost before it had a folder. Raises `RequestError`
    where the noted folder is none that this command would have taken.
    """
    told = world.from_main(lambda: world.notes.read(FOLDER))
    if not told:
        return config, None
    # Rank 0's alone: nodes may be in different working folders.
    folder = Path(world.from_main(lambda: str(taken_up(config, Path(told)))))
    # Where it was lost before its first checkpoint, this one begins as it did.
    again = world.from_main(lambda: _last(folder) != world.notes.read(_CAME_UPON))
    saving = replace(config.checkpoint, resume="auto") if again else config.checkpoint
    return replace(config, checkpoint=saving, record=replace(config.record, output=folder)), folder


def taken_up(config: RunConfig, told: Path) -> Path:
    """Return an earlier start's folder: named by flags, or the default `told`.

    On several nodes the note comes over the network: it may choose among the runs that this command could have begun.
    """
    asked = config.checkpoint.resume
    named = config.record.output or (folders.run_of(Path(asked)) if asked not in ("", "auto") else None)
    if named is not None:
        return named.absolute()
    is_ours = told.parent == folders.RUNS.absolute() and told.name.startswith(folders.default_name(config))
    if is_ours and not told.is_symlink():
        return told
    raise RequestError(
        f"An earlier start of these ranks is said to have written to {told}, where this command would not have: give "
        "all nodes the same --output, and start them in the same folder."
    )


def _last(folder: Path) -> str:
    """Return the name of a run's last checkpoint, or ""."""
    found = find(folder)
    return Path(os.path.realpath(found)).name if found else ""


def _claimed(stack: contextlib.ExitStack, config: RunConfig, world: World, before: Path | None) -> Path:
    """Hold the run's folder until `stack` is left; return its path (*collective*). `before` is as in `held`."""
    # An absolute path: a data set of the user's may change the working folder.
    path = Path(world.from_main(lambda: str(stack.enter_context(folders.held(config, before=before)))))
    if world.is_main:
        if before is None:
            world.notes.write(_CAME_UPON, _last(path))
        world.notes.write(FOLDER, str(path))
    return path


def _lasting(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config that repeats the run in another folder.

    Without what belongs to this start: how its ranks met, where it is written, and that it goes on in its own folder.
    """
    parallel = replace(config.parallel, launcher="auto", init_method="", rank=None, world_size=None)
    parallel = replace(parallel, clear_meeting=False, interface="")
    resume = config.checkpoint.resume
    own = resume == "auto" or (resume and folders.run_of(Path(resume).absolute()) == folder)
    checkpoint = replace(config.checkpoint, resume="" if own else resume)
    return replace(config, parallel=parallel, checkpoint=checkpoint, record=replace(config.record, output=None))

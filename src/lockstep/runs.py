"""One run as a folder: who claims it, what is written into it at the start and at the end.

`run` is what a launcher starts on every rank. Rank 0 alone decides on the folder and writes, and all hear of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from . import failures, hardware, resume
from .config import RunConfig, flatten, to_toml
from .engine import train
from .errors import LockstepError, RequestError
from .launchers.table import visible_gpus
from .record.base import Nothing, Recorder
from .record.files import write_whole
from .record.table import build as build_recorder
from .result import RunResult
from .state import State
from .world import World

RUNS = Path("runs")
OWN_TO_A_RANK = frozenset(
    {"rank", "gpus", "devices", "data-dir", "output", "init-method", "launcher", "workers", "on-device"}
)
"""Options in which ranks that people start by hand may differ: who and where they are. All others make the run."""


def run(config: RunConfig, world: World) -> RunResult:
    """Train in a folder of its own: claim it, record, and leave a summary (*collective*)."""
    config, state = _open(config, world)
    folder = config.record.output
    assert folder is not None
    recorder: Recorder = Nothing()
    if world.is_main:
        facts = dataclasses.asdict(hardware.survey(visible_gpus()))
        resume_step = state.meta["step"] if state else 0
        recorder = build_recorder(folder, topology=world.topology, hardware=facts, resume_step=resume_step)
    try:
        return train(config, world, recorder, state=state)
    except Exception as error:
        _account(error, world, folder, recorder)
        raise
    finally:
        recorder.close()


def _open(config: RunConfig, world: World) -> tuple[RunConfig, State | None]:
    """Return the config with the run's folder in it, and the state to continue from (*collective*)."""
    _check_alike(config, world)
    state = resume.load(config, world)  # what cannot be continued is refused before a folder is made
    claimed = world.together(lambda: str(_claim(config)) if world.is_main else "")
    output = Path(world.gather(claimed)[0])
    config = dataclasses.replace(config, record=dataclasses.replace(config.record, output=output))
    state = state or resume.load(config, world)
    if world.is_main:
        write_whole(output / "config.toml", to_toml(config).encode())
    world.barrier()
    return config, state


def _check_alike(config: RunConfig, world: World) -> None:
    """Raise `RequestError`, on every rank, where one was started with other options than rank 0 (*collective*)."""
    asked = {key: value for key, value in flatten(config).items() if key not in OWN_TO_A_RANK}
    first, *others = world.gather(asked)
    for rank, theirs in enumerate(others, start=1):
        differ = [f"--{key} {theirs[key]} (rank 0 has {first[key]})" for key in first if theirs[key] != first[key]]
        if differ:
            raise RequestError(
                f"Rank {rank} was started with {', '.join(differ)}: the replicas would drift apart; "
                "start every rank with the same options."
            )


def _claim(config: RunConfig) -> Path:
    """Return the run's folder, made if it is new."""
    asked, output = config.checkpoint.resume, config.record.output
    if output is None and asked:
        output = _latest(config) if asked == "auto" else _run_of(Path(asked))
    if output is None:
        return _fresh(config)
    # Written when training starts: a run that was refused before that does not keep its folder.
    taken = (output / "manifest.json").exists()
    if taken and asked not in ("", "auto") and _run_of(Path(asked)) != output:
        raise RequestError(
            f"--output {output} holds another run than the one to continue, {asked}; leave --output out to continue "
            "that one in its own folder, or give a new one."
        )
    if taken and not asked:
        raise RequestError(
            f"--output {output} holds a run already: continue it with --resume auto, or give another folder."
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--output {output} cannot be made: {error.strerror}; give another folder.") from error
    return output


def _names(config: RunConfig) -> Iterator[Path]:
    """Yield the default folders in the order in which they are taken: runs/NAME, runs/NAME-2, …"""
    name = f"{config.data.name}-{config.model.name}".replace(":", ".").replace("/", ".")
    yield RUNS / name
    for number in count(2):
        yield RUNS / f"{name}-{number}"


def _fresh(config: RunConfig) -> Path:
    for folder in _names(config):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RequestError(f"{folder} cannot be made: {error.strerror}; give --output FOLDER.") from error
        return folder
    raise AssertionError("numbers do not end")


def _latest(config: RunConfig) -> Path | None:
    """Return the newest default folder of this config that exists."""
    latest = None
    for folder in _names(config):
        if not folder.exists():
            return latest
        latest = folder
    return latest


def _run_of(path: Path) -> Path | None:
    """Return the run's folder that a checkpoint lies in, or the path itself if it is one."""
    for folder in (path, *list(path.absolute().parents)[:2]):  # RUN/checkpoints/last
        if (folder / "steps.jsonl").exists():
            return folder
    return None


def _account(error: Exception, world: World, folder: Path, recorder: Recorder) -> None:
    """Leave the failure's whole trace, and a summary that says how the run ended."""
    code = error.exit_code if isinstance(error, LockstepError) else 1
    failure = failures.describe(error, world.rank)
    if code == 1:
        with contextlib.suppress(OSError):  # a full disk must not hide why the rank failed
            failures.write(failure, folder / "failures")
    recorder.record("failed", exit=code, error=failure.sentence)

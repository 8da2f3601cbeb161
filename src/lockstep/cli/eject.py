"""`lockstep eject RECIPE | RUN | SCRIPT.py`: a run, or a loop over a session, as one file of plain PyTorch."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from ..config.options import read_toml
from ..config.schema import ParallelConfig, PrecisionConfig, RecordConfig, RunConfig
from ..errors import RequestError, choose
from ..files import read, shown, write_whole
from ..models import table
from ..runs import folders
from . import flags, output

_FLAGS = {"--slurm": bool, "--language": str, "--diff": bool, "--output": str}
_PROG = "lockstep eject"


def main(words: list[str]) -> int:
    """Write the file, and return the exit code."""
    if not words or words[0].startswith("-"):
        raise RequestError(f"No recipe, run or script given; example: {_PROG} digits --strategy ddp.")
    options, _ = flags.take(words[1:], _FLAGS, prog=_PROG)
    path = Path(options["--output"]) if "--output" in options else None
    if path is not None and path.exists():
        raise RequestError(f"--output {path} exists; give the path of a new file.")
    ejected = text(words)
    if path is None:
        output.show(ejected)
        return 0
    try:
        write_whole(path, ejected.encode())
    except OSError as error:
        raise RequestError(f"--output {path} cannot be written: {error.strerror}.") from error
    return 0


def text(words: list[str]) -> str:
    """Return the file for a command line."""
    options, config_flags = flags.take(words[1:], _FLAGS, prog=_PROG)
    language = choose("language", options.get("--language", "en"), ("en", "zh"))
    path = Path(words[0])
    if path.suffix == ".py":
        from ..eject.loop import eject_loop

        if config_flags or options.keys() & {"--slurm", "--diff"}:
            raise RequestError(f"{_PROG} {path} takes no flags but --language and --output.")
        try:
            return eject_loop(path, read(path, through_links=True).decode(), language=language)
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    config = _config(words[0], config_flags)
    table.preflight(config.model.name)
    from ..eject import recipe

    command = shlex.join(["lockstep", "eject", *words])
    ejected = recipe.eject(config, command, slurm="--slurm" in options, language=language)
    if "--diff" not in options:
        return ejected
    alone = dataclasses.replace(
        config,
        parallel=ParallelConfig(strategy="single", accelerator=config.parallel.accelerator),
        precision=PrecisionConfig(),
        batch=dataclasses.replace(config.batch, accumulate=None, micro_batch_asked=None),
    )
    return recipe.difference(recipe.eject(alone, command, language=language), ejected)


def _config(subject: str, config_flags: list[str]) -> RunConfig:
    """Return the config of a recipe or of a run's folder, with the command line's flags."""
    if not Path(subject).is_dir():
        return flags.parse([subject, *config_flags], prog=_PROG)
    source = folders.find(Path(subject), "config.toml") / "config.toml"
    base = dataclasses.replace(read_toml(source), record=RecordConfig())
    if base.data.name == "":
        raise RequestError(f"{shown(source.parent)} was trained by a script; eject that script.")
    return flags.parse(config_flags, prog=f"{_PROG} RUN", base=base, source=source)

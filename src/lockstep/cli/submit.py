"""`lockstep submit slurm|kubernetes [its flags] RECIPE [flags]`, or a script in place of the recipe: a run as a job."""

from __future__ import annotations

import shlex
import shutil

from ..batching import BatchPlan
from ..errors import RequestError, choose
from ..files import write_whole
from ..launchers import kubernetes, submit
from ..monitor.output import say
from ..runs import folders
from ..verify import commands
from . import flags, output, run
from .preflight import check_names

_TYPES: dict[str, type] = {
    **dict.fromkeys((*submit.OPTIONS, "--tasks-per-node"), str),
    "--sbatch": list,
    "--dry-run": bool,
}
_SET_BY_SCRIPT = ("output", "remote", "resume", "devices", "nodes", "accelerator", "launcher")
"""Options of the run that the script sets."""


def main(words: list[str]) -> int:
    """Submit the run, and return the exit code."""
    if not words or words[0].startswith("-"):
        raise RequestError("No scheduler given; example: lockstep submit slurm digits.")
    scheduler, *words = words
    choose("scheduler", scheduler, ["slurm", "kubernetes"])
    is_script, prog = run.names_script(words, run.SWITCHES), f"lockstep submit {scheduler}"
    flag_words, script = run.split(words, run.SWITCHES) if is_script else (words, [])
    types = _TYPES if scheduler == "slurm" else {**dict.fromkeys(kubernetes.FORMS, str), "--dry-run": bool}
    options, run_words = flags.take(flag_words, types, prog=prog)
    is_dry, sbatch = options.pop("--dry-run", False), options.pop("--sbatch", [])
    if "--tasks-per-node" in options:
        options["--ntasks-per-node"] = options.pop("--tasks-per-node")
    if is_script:
        config, _ = run.parse([*run_words, *script], prog=prog)
    else:
        config = flags.parse(run_words, prog=prog)
        check_names(config)
    if config.checkpoint.resume not in ("", "auto"):
        raise RequestError(
            f"--resume {config.checkpoint.resume}: a requeued job continues in its own folder; give --output RUN "
            "--resume auto to continue a run."
        )
    remote = ("--remote", config.record.remote) if config.record.remote else ()
    command = ["run" if is_script else "train", *flags.without(run_words, _SET_BY_SCRIPT), *remote]
    if scheduler == "kubernetes":
        name = folders.default_name(config)
        output.show(kubernetes.manifest(options, config, name, ["lockstep", *command], script))
        return 0
    # Check the request here as far as possible: the cluster would refuse it only after a long wait.
    job = submit.lay_out({"--job-name": folders.default_name(config), **options}, sbatch, config)
    micro, accumulate = config.batch.micro_batch, config.batch.accumulate
    if not is_script:
        BatchPlan.solve(config.batch.size, job.ranks, micro_size=micro, accumulation=accumulate, devices=job.devices)
    if submit.is_unwarned(options):
        say(
            f"--time {options['--time']}: too short for a warning: at its limit the job ends without saving; give "
            f"{submit.WARNED_FROM_S // 60}:00 or more, or a smaller --checkpoint-every"
        )
    if not is_dry and shutil.which("sbatch") is None:
        raise RequestError(
            "sbatch is not on PATH: submit from a machine that has Slurm's commands, or add --dry-run, which prints "
            "the script anywhere."
        )
    folder, is_new = folders.reserve(config, make=not is_dry)
    try:
        text = submit.render(job, folder, commands.python("lockstep", *command), script)
        if is_dry:
            output.show(text)
            return 0
        try:
            write_whole(folder / submit.NAME, text.encode())
        except OSError as error:
            raise folders.unwritable(folder, error) from error
        number = submit.submit(folder / submit.NAME)
        log = shlex.quote(str(folder / f"slurm-{number}.out"))
        say(f"submitted as job {number}: tail -F {log} follows its log, and scancel {number} ends it")
        return 0
    except RequestError:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise

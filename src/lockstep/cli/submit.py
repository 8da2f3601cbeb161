"""`lockstep submit slurm [its flags] RECIPE [flags]`: a run as a job of Slurm."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from ..batching import BatchPlan
from ..config.options import flatten
from ..config.schema import RunConfig
from ..errors import RequestError, Stopped, unknown
from ..files import write_whole
from ..launchers.submit import (
    NAME,
    WARNED_FROM_S,
    Layout,
    Plan,
    SlurmRequest,
    check_settled,
    check_there,
    follow,
    is_unwarned,
    lay_out,
    render,
    submit,
)
from ..printable import told
from ..runs import folders
from . import flags, output, words
from .train import preflight

_USAGE = """\
usage: lockstep submit slurm [its flags] RECIPE [flags of lockstep train]

Writes one sbatch script, {name}, into the run's folder, submits it, and follows its log until the job has ended; the
exit code is the job's. Ctrl-C ends the following, not the job. The job saves and requeues itself shortly before its
time limit and when it is pre-empted, and goes on from its last checkpoint.

  --nodes N             nodes (default: 1)
  --gpus-per-node G     GPUs of each node, with one task for each of them, or one a node where the strategy drives all
  --ntasks-per-node T   without GPUs: tasks on each node (default: 1); also --tasks-per-node
  --cpus-per-task C     processors of each task
  --mem M               memory of each node, such as 32G
  --time T              time limit, such as 20:00 for twenty minutes, or 1-12 for a day and a half
  --partition P   --account A   --qos Q   --job-name NAME
  --sbatch=OPTION       any other option of sbatch, such as --sbatch=--exclusive; may be given several times
  --dry-run             print the script, and submit nothing
"""
_OWN: dict[str, type] = {
    **dict.fromkeys(("--nodes", "--ntasks-per-node", "--tasks-per-node", "--cpus-per-task", "--gpus-per-node"), str),
    **dict.fromkeys(("--time", "--mem", "--partition", "--account", "--qos", "--job-name"), str),
    "--sbatch": list,
    "--dry-run": bool,
}
_COUNTS = ("--nodes", "--ntasks-per-node", "--cpus-per-task")
_SETTLED = ("output", "resume", "devices", "nodes", "accelerator", "launcher")
"""Options of the run that the script gives itself."""


def main(given: list[str]) -> int:
    """Submit the run, follow it, and return the job's exit code."""
    usage = _USAGE.format(name=NAME)
    if output.helped(given, usage) or (given[:1] == ["slurm"] and output.helped(given[1:], usage)):
        return 0
    if not given or given[0].startswith("-"):
        raise RequestError(
            "lockstep submit lacks the scheduler, which comes first: slurm, as in lockstep submit slurm --nodes 2 "
            "digits."
        )
    if given[0] != "slurm":
        raise unknown("scheduler", given[0], ["slurm"], "As in lockstep submit slurm --nodes 2 digits.")
    own, rest = words.take(given[1:], _OWN)
    is_dry = own.pop("--dry-run", False)
    config = flags.parse(rest, prog="lockstep submit slurm")
    request = _request(own, config)
    layout = _checked(request, config)
    if is_unwarned(request):
        _say(
            f"--time {request.time}: no warning can come that early; at its limit the job just ends, and what its last "
            f"checkpoint lacks is lost: give {WARNED_FROM_S // 60}:00 or more, or a --checkpoint-every that fits"
        )
    if not is_dry:
        check_there()
    folder, is_new = folders.reserve(config, make=not is_dry)
    try:
        script = render(_plan(request, layout, config, rest, folder))
        if is_dry:
            with output.written():
                print(script, end="")
            return 0
        path = folder / NAME
        try:
            write_whole(path, script.encode())
        except OSError as error:
            raise folders.unwritable(folder, error) from error
        job = submit(path)
    except RequestError:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return _followed(job, folder)


def _request(own: dict[str, Any], config: RunConfig) -> SlurmRequest:
    if "--tasks-per-node" in own:
        own.setdefault("--ntasks-per-node", own["--tasks-per-node"])
        if own.pop("--tasks-per-node") != own["--ntasks-per-node"]:
            raise RequestError("--tasks-per-node and --ntasks-per-node are the same thing; give one of them.")
    for flag in _COUNTS:
        if flag in own:
            own[flag] = _whole(flag, own[flag])
    own.setdefault("--job-name", folders.default_name(config))
    own["--sbatch"] = tuple(own.get("--sbatch", ()))
    return SlurmRequest(**{flag.removeprefix("--").replace("-", "_"): value for flag, value in own.items()})


def _whole(flag: str, text: str) -> int:
    try:
        if text.isascii():
            return int(text)
    except ValueError:
        pass
    raise RequestError(f"{flag} {text}: give a whole number.")


def _checked(request: SlurmRequest, config: RunConfig) -> Layout:
    """Return how the run lies on the nodes. Raises `RequestError` for what could be refused only after a long wait."""
    preflight(config)
    asked = config.parallel
    check_settled(flatten(config))
    if asked.accelerator == "cpu" and request.gpus:
        raise RequestError(
            f"--accelerator cpu disagrees with --gpus-per-node {request.gpus_per_node}; leave one of them out."
        )
    if asked.accelerator == "cuda" and not request.gpus:
        raise RequestError("--accelerator cuda: the job has no GPU unless it asks for them; add --gpus-per-node N.")
    if config.checkpoint.resume not in ("", "auto"):
        raise RequestError(
            f"--resume {config.checkpoint.resume}: a job that is requeued goes on in its own folder; give --output RUN "
            "--resume auto to continue a run."
        )
    layout = lay_out(request, asked.strategy, asked.devices)
    BatchPlan.solve(
        config.batch.size,
        layout.ranks,
        micro_size=config.batch.micro_batch,
        accumulation=config.batch.accumulate,
        devices=layout.devices or 1,
    )
    return layout


def _plan(request: SlurmRequest, layout: Layout, config: RunConfig, rest: list[str], folder: Path) -> Plan:
    derived = ["--output", str(folder), "--resume", "auto"]
    if request.nodes > 1:
        derived += ["--nodes", str(request.nodes)]
    if layout.devices is not None:
        derived += ["--devices", str(layout.devices)]
    if request.gpus:  # a node without a working driver is then refused, and does not train on its CPU
        derived += ["--accelerator", "cuda"]
    elif config.parallel.accelerator == "cpu":
        derived += ["--accelerator", "cpu"]
    return Plan(
        request=request,
        layout=layout,
        words=flags.without(rest, _SETTLED),
        settled=derived,
        folder=folder,
        submitted_from=Path.cwd(),
        python=sys.executable,
    )


def _followed(job: int, folder: Path) -> int:
    log = folder / f"slurm-{job}.out"
    _say(f"submitted as job {job}; its log is {log}")
    try:
        code = follow(job, log, _show, _say)
    except KeyboardInterrupt:
        raise Stopped(
            f"Job {job} goes on, no longer followed: tail -F {shlex.quote(str(log))} follows it again, and scancel "
            f"{job} ends it."
        ) from None
    if code:
        _say(f"job {job} ended with exit code {code}; its log is {log}")
    return code


def _show(more: bytes) -> None:
    with output.written():
        sys.stdout.buffer.write(more)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(told(line), end="", file=sys.stderr, flush=True)

"""A run on Kubernetes: a readable manifest of a JobSet, or of a Kubeflow TrainJob with the runtime that it names.

A pod is a node. The agents of several pods meet at the first one, by the name that the JobSet's headless service gives
it. A pod whose ranks have saved and stopped exits with 75, and then the job starts again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from ..batching import BatchPlan
from ..config.registry import KINDS, resolved
from ..config.schema import ParallelConfig, RunConfig
from ..config.validity import require
from ..errors import counted
from .submit import COUNT, OPTIONS, WORD, accelerator_flags, check_hardware, check_values, seconds, unplaced

_LABEL = (r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "a letter and at most 39 letters, digits and dashes, all small")
FORMS = {
    "--kind": (r"trainjob|jobset", "trainjob or jobset"),
    "--image": WORD,
    "--volume": (r"[a-z0-9.-]+:/[^:]+", "CLAIM:/PATH, a volume claim and where the pods have it"),
    **dict.fromkeys(("--job-name", "--namespace"), _LABEL),
    "--nodes": COUNT,
    "--gpus-per-node": (r"([\w./-]+:)?[1-9][0-9]{0,8}", "a number from 1 up, or a resource with it: amd.com/gpu:4"),
    "--cpus-per-node": COUNT,
    "--mem": (r"[0-9]{1,9}[KMGT]i?", "memory of a node, such as 64Gi"),
    "--time": OPTIONS["--time"],
    "--max-restarts": (r"0|[1-9][0-9]{0,8}", "a number from 0 up"),
}
"""Flags of this command: the form of the value, and the same in words."""
_PORT, _MEET_S, _GRACE_S = 29500, 1800, 90
"""Of the agents' store; for the last pod to get its image; for a save."""


def manifest(
    options: Mapping[str, str], config: RunConfig, name: str, command: Sequence[str], script: Sequence[str]
) -> str:
    """Return the manifest: YAML for kubectl.

    The run's folder is by default runs/`name` on the volume, and so is the job's name. A pod runs the command, with the
    flags that the job sets, and the script. Raises `RequestError` for malformed or contradictory options.
    """
    import jinja2

    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = (label if label[:1].isalpha() else f"run-{label}")[:40].strip("-")
    options = {"--kind": "trainjob", "--job-name": label, "--nodes": "1", "--max-restarts": "0", **options}
    check_values(options, FORMS)
    for flag, example in (("--image", "registry.example/me/lockstep:1"), ("--volume", "my-claim:/storage")):
        require(flag in options, f"No {flag} given: add it, such as {flag} {example}.")
    values, label, nodes = (
        unplaced(config, "each pod's command sets it"),
        options["--job-name"],
        int(options["--nodes"]),
    )
    claim, _, volume = options["--volume"].partition(":")
    folder = PurePosixPath(values["output"] or f"{volume}/runs/{name}")
    require(
        folder.is_relative_to(volume) and ".." not in folder.parts,
        f"--output {folder} is not on --volume {options['--volume']}, and a pod's own files end with it; give a folder "
        f"below {volume}.",
    )
    resource, _, count = options.get("--gpus-per-node", "0").rpartition(":")
    gpus, accelerator = int(count), values["accelerator"]
    devices = gpus or values["devices"] or 1
    disagrees = f"--devices {values['devices']} disagrees with --gpus-per-node {gpus}; leave it out."
    require(values["devices"] in (None, devices), disagrees)
    strategy = resolved(values["strategy"], distributed=nodes * devices > 1)
    check_hardware(strategy, accelerator, nodes, gpus)
    flags = ["--output", str(folder), "--resume", "auto", "--devices", f"{devices}"]
    if nodes > 1:
        flags += ["--nodes", f"{nodes}", "--init-method", f"tcp://{label}-node-0-0.{label}:{_PORT}"]
        flags += ["--timeout", f"{_MEET_S}"] if values["timeout"] == ParallelConfig().timeout else []
    command = [*command, *flags, *accelerator_flags(accelerator, gpus), *script]
    ranks, devices_per_rank = (nodes * devices, 1) if KINDS[strategy].process_per_device else (nodes, devices)
    micro, accumulate = config.batch.micro_batch, config.batch.accumulate
    if not script:
        BatchPlan.solve(config.batch.size, ranks, micro_size=micro, accumulation=accumulate, devices=devices_per_rank)
    limits = {"cpu": options.get("--cpus-per-node"), "memory": options.get("--mem")}
    limits |= {resource or "nvidia.com/gpu": count} if gpus else {}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(Path(__file__).with_name("kubernetes.yaml.jinja").read_text("utf-8")).render(
        options=options,
        about=f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}, strategy {strategy}",
        metadata={"name": label} | ({"namespace": options["--namespace"]} if "--namespace" in options else {}),
        command=[word.replace("$", "$$") for word in command],  # Kubernetes makes a value of $(NAME), and $ of $$
        limits={key: value for key, value in limits.items() if value},
        limit_s=seconds(options.get("--time", "UNLIMITED")),
        grace_s=_GRACE_S,
        claim=claim,
        path=volume,
    )

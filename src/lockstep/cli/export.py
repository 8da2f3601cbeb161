"""`lockstep export RUN --to FORMAT`: a trained model as a file for other programs."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ..config.schema import ParallelConfig, PrecisionConfig
from ..config.validity import is_url
from ..errors import RequestError, choose
from ..files import shown, write_whole
from ..launchers import start
from ..runs import folders, hub
from ..screen import Screen
from . import flags, output
from .eval import base_of, check_flags, has_own_loop
from .preflight import check_names

_PROG = "lockstep export"
_FORMATS = {"torch.export": "model.pt2", "onnx": "model.onnx", "safetensors": "model.safetensors", "hub": "hub"}
"""{format: its file or folder in the run's folder}"""
_PACKAGES = {"onnx": ("export", "onnx", "onnxscript", "onnxruntime"), "hub": ("hf", "huggingface_hub")}
"""{format: the extra, and its packages}"""


def main(words: list[str]) -> int:
    """Write the file, and return the exit code."""
    if not words or words[0].startswith("-"):
        raise RequestError(f"No run given; example: {_PROG} runs/digits-resnet8 --to onnx.")
    options, flag_words = flags.take(words[1:], {"--to": str, "--output": str, "--push": str}, prog=_PROG)
    if "--to" not in options:
        raise RequestError(f"No --to given: add one of {', '.join(_FORMATS)}, such as --to onnx.")
    form = choose("format of --to", options["--to"], _FORMATS)
    if is_url(words[0]):
        from ..runs.remote import fetched  # late: it imports torch

        words[0] = str(fetched(words[0]))
    extra, *packages = _PACKAGES.get(form, ("",))
    if missing := [name for name in packages if find_spec(name) is None]:
        raise RequestError(f"--to {form} needs {', '.join(missing)}: pip install 'lockstep-torch[{extra}]'.")
    if "--push" in options and form != "hub":
        raise RequestError(f"--push belongs to --to hub, and --to is {form}; leave it out.")
    run = folders.find(Path(words[0]), "config.toml")
    if has_own_loop(run):
        raise RequestError(
            f"{shown(run)} was trained by your own loop or step, and only your code makes its model: export it there; "
            f"{shown(run / 'checkpoints' / 'last' / 'model.safetensors')} has its weights."
        )
    path = Path(options.get("--output", run / _FORMATS[form])).absolute()
    if os.path.lexists(path):
        raise RequestError(f"--output {shown(path)} exists; give another path.")
    source, check = run / "config.toml", partial(check_flags, verb="export")
    config = flags.parse(flag_words, prog=f"{_PROG} RUN", base=base_of(source), source=source, check=check)
    check_names(config)
    from ..jobs.export import export_model  # late: it imports torch

    precision = config.precision.name if config.precision.name == "fp64" else "fp32"
    config = dataclasses.replace(
        config,
        parallel=ParallelConfig(strategy="single", devices=1, accelerator="cpu", batchnorm="local"),
        precision=PrecisionConfig(name=precision, channels_last="off"),
        checkpoint=dataclasses.replace(config.checkpoint, resume=words[0]),
    )
    exported = start.launch(partial(export_model, form="safetensors" if form == "hub" else form), config)
    data, step, checked = exported or (b"", 0, "")
    try:
        if form == "hub":
            hub.write_folder(run, path, data, step)
        else:
            write_whole(path, data)
    except OSError as error:
        raise folders.unwritable(path, error) from error
    if repo := options.get("--push"):
        checked += f"; {hub.push(path, repo)}"
    with output.written():
        Screen().say(f"{shown(path)}, {len(data):,} bytes, from {checked}")
    return 0

"""A trained classifier as a file for other programs, checked against the model on samples of its test set.

The file's own bytes are loaded and run, on batches of other sizes than the traced one.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from ..checkpoint import resume
from ..config.schema import RunConfig
from ..errors import ProofError, RequestError, counted
from ..files import shown
from ..models import table
from ..world.world import World
from .job import Job, assemble

_SAMPLES = 64
Exported = tuple[bytes, Callable[[Tensor], Tensor]]
"""A file's bytes, and the program in them: x (n, …) to logits (n, classes)."""


def export_model(config: RunConfig, world: World, *, form: str) -> tuple[bytes, int, str]:
    """Return the file of the checkpoint in `config.checkpoint.resume`, its step, and a line on its check.

    Exports the averaged weights if the run has them. Raises `RequestError` for a model that cannot be exported, and
    `ProofError` for a program whose outputs differ from the model's.
    """
    loaded = resume.load(config, world, keys=resume.EVALUATED)
    assert loaded is not None, "the command names a checkpoint"
    job = assemble(config, world, evaluated=loaded)
    with contextlib.closing(job.data), torch.no_grad():
        job.load_weights(loaded)
        model, count = [*job.groups.values()][-1].eval(), min(_SAMPLES, len(job.data.test))
        x = next(job.data.test.stream(iter([np.arange(count)]), epoch=0)).x
        data, program = _export(form, job, model, torch.cat([x, x])[: max(2, count // 2)])
        # By torch, whose maximum of numbers with a NaN is one.
        largest = float(torch.stack([(program(part) - model(part)).abs().max() for part in (x, x[:1])]).max())
        logits = model(x)
    scale = float(logits.abs().max())
    difference = f"largest difference from the model {largest:.2g}, in outputs up to {scale:.3g}"
    covers = f"on {counted(count, 'sample')} of the test set"
    if not largest <= torch.finfo(logits.dtype).eps ** 0.5 * scale:
        raise ProofError(f"--to {form}: {difference}, {covers}: that is more than rounding, and no file was written.")
    step = int(loaded.meta["step"])
    return data, step, f"{shown(loaded.origin)}, step {step:,}; {difference}, {covers}"


def _export(form: str, job: Job, model: nn.Module, x: Tensor) -> Exported:
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs, and prints, the whole program of a model that it cannot export
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if form == "safetensors":
                return _weights(job, model)
            traced = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
            return _program(traced) if form == "torch.export" else _onnx(traced)
    except Exception as error:  # of the user's forward, of torch or of onnxruntime
        cause = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        advice = "" if form == "safetensors" else "; --to safetensors takes any model"
        raise RequestError(
            f"--to {form}: the model has no such form for batches of all sizes, for example where shapes or branches "
            f"depend on values: {cause}{advice}."
        ) from error
    finally:
        logging.disable(disabled)


def _weights(job: Job, model: nn.Module) -> Exported:
    train, name = job.data.train, job.config.model.name
    fresh = table.build_for(name, classes=job.config.model.classes or train.classes, shape=train.shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_model(model, str(path))
        load_model(fresh.to(job.precision.dtype), path)
        return path.read_bytes(), fresh.eval()


def _program(traced: torch.export.ExportedProgram) -> Exported:
    file = io.BytesIO()
    torch.export.save(traced, file)
    return file.getvalue(), torch.export.load(io.BytesIO(file.getvalue())).module()


def _onnx(traced: torch.export.ExportedProgram) -> Exported:
    from onnxruntime import InferenceSession

    exported = torch.onnx.export(
        traced, dynamo=True, verbose=False, input_names=["x"], output_names=["logits"], dynamic_shapes=({0: "batch"},)
    )
    assert exported is not None, "of dynamo=True"
    data = exported.model_proto.SerializeToString()
    session = InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda batch: torch.from_numpy(session.run(None, {"x": batch.numpy()})[0])

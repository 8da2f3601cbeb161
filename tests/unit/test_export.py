"""Exported models: what other programs load computes what the run's model computes, for batches of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.cli import export
from lockstep.cli.main import main
from lockstep.models import table

from ..command import refusal

BATCH = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def _train(folder: Path, *words: str) -> Path:
    steps = ("train", "digits", "--max-steps", "2", "--devices", "1", "--accelerator", "cpu", "--quiet")
    assert main([*steps, "--output", str(folder), *words]) == 0
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with averaged weights."""
    return _train(tmp_path_factory.mktemp("export") / "run", "--model", "mlp", "--ema", "0.5")


def _expected(run: Path, model: str = "mlp") -> Tensor:
    """Return the logits of the run's averaged weights, from its checkpoint."""
    network: nn.Module = table.build_for(model, classes=10, shape=(1, 8, 8)).eval()
    network.load_state_dict(load_file(run / "checkpoints" / "last" / "ema.safetensors"))
    with torch.no_grad():
        return network(BATCH)  # type: ignore[no-any-return]


def _of_program(path: Path) -> Tensor:
    with torch.no_grad():
        return torch.export.load(path).module()(BATCH)  # type: ignore[no-any-return]


def _of_onnx(path: Path) -> Tensor:
    from onnxruntime import InferenceSession

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    (x,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (x.name, x.shape, logits.name, logits.shape) == ("x", ["batch", 1, 8, 8], "logits", ["batch", 10])
    return torch.from_numpy(session.run(None, {"x": BATCH.numpy()})[0])


@pytest.mark.parametrize(
    ("form", "name", "outputs"),
    [
        ("torch.export", "model.pt2", _of_program),
        pytest.param("onnx", "model.onnx", _of_onnx, marks=pytest.mark.slow),
    ],
)
def test_an_exported_program_computes_what_the_averaged_weights_do(
    run: Path, capsys: pytest.CaptureFixture[str], form: str, name: str, outputs: Callable[[Path], Tensor]
) -> None:
    assert main(["export", str(run), "--to", form]) == 0
    assert "largest difference from the model" in capsys.readouterr().out
    expected = _expected(run)
    assert float((outputs(run / name) - expected).abs().max()) < 1e-6 * float(expected.abs().max())
    assert f"{name} exists" in refusal(capsys, "export", run, "--to", form)  # it is not overwritten


def test_exported_weights_have_the_bits_of_the_checkpoint(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    assert main(["export", str(run / "checkpoints" / "best"), "--to", "safetensors", "--output", str(path)]) == 0
    saved, exported = load_file(run / "checkpoints" / "best" / "ema.safetensors"), load_file(path)
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)


def test_a_model_that_no_program_can_follow_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = ("--model", "tests.models:Choosing")
    run = _train(tmp_path / "run", *code)
    assert "shapes or branches depend on values" in refusal(capsys, "export", run, "--to", "torch.export", *code)
    assert not (run / "model.pt2").exists()
    assert main(["export", str(run), "--to", "safetensors", *code]) == 0


def test_a_program_that_differs_from_the_model_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ("--model", "tests.models:Drifting")
    run = _train(tmp_path / "run", *code)
    assert "that is more than rounding" in refusal(capsys, "export", run, "--to", "safetensors", *code, code=3)
    assert not (run / "model.safetensors").exists()


def test_what_cannot_be_exported_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    (own / "checkpoints").mkdir(parents=True)
    (own / "config.toml").touch()
    (own / "manifest.json").write_text('{"chosen": {"loop": "own"}}')
    said = refusal(capsys, "export", own, "--to", "safetensors")
    assert "only your code makes its model" in said
    assert "checkpoints/last/model.safetensors has its weights" in said
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    assert "pip install 'lockstep-torch[export]'" in refusal(capsys, "export", run, "--to", "onnx")

"""How a new run begins: weights from elsewhere as far as they fit, frozen parameters, rates of layers."""

from __future__ import annotations

import os
import pickle
import urllib.request
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.cli.main import main
from lockstep.config.options import override
from lockstep.config.schema import ModelConfig, RunConfig
from lockstep.errors import RequestError
from lockstep.jobs import initial
from lockstep.models import table
from lockstep.models.modes import evaluating
from lockstep.training import optim
from lockstep.training.precision import Precision
from lockstep.world.world import World

from ..command import events, refusal

Tensors = dict[str, Tensor]


def net(classes: int = 10, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return table.build_for("resnet8", classes=classes, shape=(1, 8, 8))


def begun(model: nn.Module, path: object, name: str = "resnet8") -> initial.InitialWeights:
    taken = initial.load_weights(ModelConfig(name=name, init_from=str(path)), model, World.alone())
    assert taken is not None
    return taken


def written(path: Path, content: Any) -> Path:
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


WRAPPED: dict[str, Callable[[Tensors], Any]] = {
    "plain.pth": lambda own: own,
    "w.safetensors": lambda own: own,
    "script.pt": lambda own: {"epoch": 3, "state_dict": own, "optimizer": {"state": {0: {"m": torch.ones(2)}}}},
    "model.pt": lambda own: {"model": own},
    "wrapped.pt": lambda own: {f"module._orig_mod.{name}": each for name, each in own.items()},
    "averaged.pt": lambda own: {"model": {name: each * 0 for name, each in own.items()}, "model_ema": own},
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_file_of_weights_is_taken_whole(name: str, tmp_path: Path) -> None:
    theirs = net(seed=1).state_dict()
    model = net()
    taken = begun(model, written(tmp_path / name, WRAPPED[name](theirs)))
    assert all(map(torch.equal, model.state_dict().values(), theirs.values()))
    assert (taken.drawn, taken.left_out, taken.reshaped) == ([], [], [])
    assert taken.taken == list(theirs)
    assert ("averaged" in taken.source) == ("averaged" in name)
    assert len(taken.lines()) == 1
    assert initial.load_weights(ModelConfig(), model, World.alone()) is None


def test_what_does_not_fit_stays_as_drawn_and_is_told(tmp_path: Path) -> None:
    theirs = net(classes=7, seed=1).state_dict()
    del theirs["stem.0.weight"]
    model, drawn = net(), net().state_dict()
    taken = begun(model, written(tmp_path / "w.pt", theirs | {"head.weight": torch.ones(3)}))
    kept = {"stem.0.weight", "classifier.weight", "classifier.bias"}
    for name, held in model.state_dict().items():
        assert torch.equal(held, (drawn if name in kept else theirs)[name])
    assert (taken.drawn, taken.left_out) == (["stem.0.weight"], ["head.weight"])
    assert taken.reshaped[0] == "classifier.bias is (7,), the model's is (10,)"
    assert set(taken.taken) == drawn.keys() - kept
    assert taken.lines() == [
        f"weights from {tmp_path / 'w.pt'}: {len(taken.taken)} of the model's {len(drawn)} tensors",
        "2 of another shape there, initialized from the seed: classifier.bias is (7,), the model's is (10,), "
        "classifier.weight is (7, 64), the model's is (10, 64)",
        "1 not there, initialized from the seed: stem.0.weight",
        "1 not in the model, ignored: head.weight",
    ]


def _sparse(path: Path) -> None:
    path.write_bytes(b"PK\3\4")
    os.truncate(path, 2 << 40)


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gone": (lambda path: None, "There is no checkpoint at .*gone"),
    "empty folder": (Path.mkdir, "holds no lockstep checkpoint"),
    "code": (lambda path: path.write_bytes(pickle.dumps({"a": _Runs()})), "could run code"),
    "code of torch": (lambda path: torch.save({"w": torch.ones(1), "a": _Runs()}, path), "could run code"),
    "cut": (lambda path: path.write_bytes(torch.zeros(9).numpy().tobytes()), "no file of weights"),
    "sparse": (_sparse, "cannot be read"),
    "pipe": (os.mkfifo, "no regular file"),
    "other": (lambda path: torch.save({"a": torch.ones(3)}, path), "has nothing of --model resnet8"),
    "optimizer": (lambda path: torch.save({"optimizer": [torch.ones(3)]}, path), "holds no model's weights"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_file_of_weights_is_refused_in_a_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make, told = HOSTILE[kind]
    make(Path(kind))
    before = net().state_dict()
    model = net()
    with pytest.raises(RequestError, match=told):
        begun(model, kind)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    words = ("--data", "digits", "--model", "resnet8", "--accelerator", "cpu", "--output", "run")
    assert refusal(capsys, "train", *words, "--init-from", kind)
    assert not Path("run").exists()
    assert not Path("ran").exists()


def test_pretrained_weights_are_torchvisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.setattr(urllib.request, "_opener", None)  # made with the proxies of the first call in this process
    shape, name = (3, 32, 32), "torchvision.resnet18"
    model = table.build_for(name, classes=10, shape=shape)
    with pytest.raises(RequestError, match=r"ResNet18_Weights.* cannot be loaded \(.*refused.*resnet18-f37072fd.pth"):
        begun(model, "pretrained", name)
    theirs = table.build_for(name, classes=1000, shape=shape).state_dict()
    cached = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    torch.save(theirs, cached)
    taken = begun(model, "pretrained", name)
    assert taken.source == "ResNet18_Weights.IMAGENET1K_V1"
    assert len(taken.reshaped) == 2
    assert torch.equal(model.state_dict()["conv1.weight"], theirs["conv1.weight"])
    cached.write_bytes(b"no weights")
    with pytest.raises(RequestError, match="cannot be loaded"):
        begun(model, "pretrained", name)
    for other in ("resnet18", "my:Net"):
        with pytest.raises(RequestError, match=f"--model {other} is none; take one, such as torchvision.resnet18"):
            begun(model, "pretrained", other)
    with pytest.raises(RequestError, match="normalised in another way"):
        begun(model, "pretrained", "googlenet")


def test_a_frozen_batchnorm_stays_in_evaluation_mode() -> None:
    model = net()
    initial.freeze(model, ["stem.*", "stages.0.*", "stages.1.0.residual.1.weight"])
    norms = {name: each for name, each in model.named_modules() if isinstance(each, nn.BatchNorm2d)}
    frozen = {"stem.1", "stages.0.0.residual.1", "stages.0.0.residual.4"}
    for _ in range(2):
        assert {name for name in norms if not model.get_submodule(name).training} == frozen
        with evaluating(model):
            assert not any(each.training for each in model.modules())
    before = {name: held.clone() for name, held in model.named_buffers()}
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    moved = {name.rpartition(".")[0] for name, held in model.named_buffers() if not torch.equal(held, before[name])}
    assert moved == norms.keys() - frozen
    trained = {name for name, each in model.named_parameters() if each.grad is not None}
    assert trained == {
        name for name in dict(model.named_parameters()) if name.startswith(("stages.1", "stages.2", "c"))
    } - {"stages.1.0.residual.1.weight"}


@pytest.mark.parametrize(
    ("patterns", "is_held"),
    [(["body.*"], True), (["body.1"], True), (["*.weight"], True), (["body.0.*"], True), (["body.0.weight"], False)],
)
def test_a_batchnorm_without_parameters_is_held_by_its_name_or_what_stands_beside_it(
    patterns: list[str], is_held: bool
) -> None:
    body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False))
    model = nn.Sequential(OrderedDict(body=body, head=nn.Linear(3, 2)))
    initial.freeze(model, patterns)
    model(torch.randn(8, 4))
    assert (int(body[1].get_buffer("num_batches_tracked")) == 0) == is_held
    (line,) = initial.describe_patterns(model, override(RunConfig(), freeze=patterns))
    assert ("statistics of 1 layer" in line) == (patterns[0] in ("body.*", "body.1", "*.weight"))


def test_weights_that_a_precision_converts_are_reported() -> None:
    double, half = nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16()
    lines = {
        name: Precision.of(override(RunConfig(), precision=name).precision, torch.device("cpu")).cautions
        for name in ("fp32", "fp64")
    }
    assert lines["fp32"](nn.Linear(2, 2)) == lines["fp64"](nn.Linear(2, 2)) == lines["fp64"](double) == []
    (line,) = lines["fp32"](double)
    assert line == "the model's float64 tensors become float32 under --precision fp32; --precision fp64 keeps them"
    assert lines["fp32"](half)


def test_patterns_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(RequestError, match=r"--freeze pattern 'stages.01.\*': did you mean .*stages\.0\.\*"):
        initial.freeze(net(), ["stages.01.*"])
    with pytest.raises(RequestError, match=r"--freeze \* leaves nothing to train"):
        initial.freeze(net(), ["*"])
    with pytest.raises(RequestError, match=r"--lr-scale pattern 'clasifier.\*': did you mean classifier\.\*"):
        optim.build(net(), override(RunConfig(), lr_scale=["clasifier.*=2"]).optim)
    frozen = net()
    initial.freeze(frozen, ["stem.*"])
    with pytest.raises(RequestError, match="--lr-scale pattern 'stem"):
        optim.build(frozen, override(RunConfig(), lr_scale=["stem.*=2"]).optim)
    with pytest.raises(RequestError, match=r"--lr-scale classifier.\*=2 reaches no parameter: the patterns before it"):
        optim.build(net(), override(RunConfig(), lr_scale=["*=3", "classifier.*=2"]).optim)
    for word in ("fc", "fc=", "=3", "fc=0", "fc=-1", "fc=inf", "fc=nan", "fc=x"):
        with pytest.raises(RequestError, match=f"--lr-scale {word}: give PATTERN=FACTOR"):
            override(RunConfig(), lr_scale=[word])


def test_how_much_each_pattern_reached_is_told() -> None:
    model = net()
    wanted = override(RunConfig(), freeze=["stem.*", "stages.0.*"], lr_scale=["classifier.bias=10", "classifier.*=3"])
    assert initial.describe_patterns(model, RunConfig()) == []
    initial.freeze(model, wanted.model.freeze)
    assert initial.describe_patterns(model, wanted) == [
        "frozen by stem.*: 3 tensors with 176 weights",
        "frozen by stages.0.*: 6 tensors with 4,672 weights",
        "learning rate × 10 by classifier.bias: 1 tensor with 10 weights",
        "learning rate × 3 by classifier.*: 1 tensor with 640 weights",
    ]


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "lamb", "lars"])
def test_a_parameters_rate_is_the_schedules_times_its_factor(name: str) -> None:
    model = net()
    scales = ["classifier.weight=10", "classifier.*=3", "*.residual.*=0.1"]
    built = optim.build(model, override(RunConfig(), optimizer=name, lr_scale=scales).optim)
    optim.set_lr(built, 0.5)
    rates = {id(each): group["lr"] for one in built for group in one.param_groups for each in group["params"]}
    for named, each in model.named_parameters():
        factor = {"classifier.weight": 10, "classifier.bias": 3}.get(named, 0.1 if ".residual." in named else 1)
        assert rates.pop(id(each)) == 0.5 * factor
    assert not rates


def test_a_new_rate_for_an_old_run_is_a_new_run_from_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ("train", "digits", "--accelerator", "cpu", "--batch", "256", "--max-steps", "2")
    assert main([*train, "--output", "old"]) == 0
    told = refusal(capsys, *train, "--resume", "old", "--lr", "0.01")
    assert "begin a new run with its weights by --init-from old in place of --resume" in told
    assert main([*train, "--output", "new", "--init-from", "old", "--lr", "0.01", "--log-every", "1"]) == 0
    assert "weights from old: " in "".join(capsys.readouterr())
    (first,) = events(Path("new"), "start")
    old = checkpoint.load(Path("old")).part("model")
    assert (first["first_step"], first["init"]["source"]) == (0, "old")
    assert sorted(first["init"]["taken"]) == sorted(old)
    words = ("--freeze", "*.weight", "--lr-scale", "*.bias=10", "--init-from", "old/checkpoints/best")
    assert main([*train, "--output", "frozen", *words]) == 0
    told = "".join(capsys.readouterr())
    assert "frozen by *.weight: " in told
    assert "learning rate × 10 by *.bias: " in told
    frozen = checkpoint.load(Path("frozen")).part("model")
    best = checkpoint.load(Path("old/checkpoints/best")).part("model")
    parameters = [name for name in frozen if name.endswith((".weight", ".bias"))]
    assert {name for name in parameters if torch.equal(frozen[name], best[name])} == {
        name for name in parameters if name.endswith("weight")
    }

"""`lockstep diff`: two checkpoints, whoever wrote them, compared tensor by tensor; no code in them runs."""

from __future__ import annotations

import math
import os
import pickle
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.checkpoint import Checkpoints, foreign
from lockstep.checkpoint.state import State
from lockstep.checks import difference
from lockstep.cli.main import main
from lockstep.models import table

from ..command import refusal

Capture = pytest.CaptureFixture[str]


def _weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(table.build_for("resnet8", classes=10, shape=(1, 8, 8)).state_dict())


def _ours(folder: Path, weights: dict[str, Tensor]) -> Path:
    saver = Checkpoints(folder / "checkpoints", warn=pytest.fail)
    held = {f"model/{name}": each for name, each in weights.items()} | {"optimizer/a/momentum_buffer": torch.ones(3)}
    saver.save(State(held, {"step": 1}), step=1, best=True)
    saver.wait()
    return folder


def _save(path: Path, value: Any) -> str:
    torch.save(value, path)
    return str(path)


# ---- reading


def test_the_same_weights_are_the_same_whoever_wrote_them(tmp_path: Path, capsys: Capture) -> None:
    weights = _weights()
    wrapped = {f"module.{name}": each for name, each in weights.items()}
    ours = _ours(tmp_path / "run", weights)
    save_file(weights, tmp_path / "weights.safetensors")
    for number, saved in enumerate(
        (
            weights,
            {f"_orig_mod.{name}": each for name, each in wrapped.items()},  # compiled
            {"epoch": 3, "arch": "resnet8", "state_dict": wrapped, "best_acc1": 0.5},  # a script of DataParallel
            {"model": weights, "step": 7},  # accelerate
        )
    ):
        _save(tmp_path / f"{number}.pth", saved)
    for other in ("weights.safetensors", "0.pth", "1.pth", "2.pth", "3.pth"):
        assert main(["diff", str(ours), str(tmp_path / other)]) == 0
        told = capsys.readouterr()
        assert told.out.splitlines() == [
            "not compared, since only A has more than weights: optimizer (1 tensor)",
            f"The same bits: {len(weights)} tensors.",
        ]
        assert told.err == ""
    assert main(["diff", str(ours), str(ours / "checkpoints" / "best")]) == 0
    assert capsys.readouterr().out == f"The same bits: {len(weights) + 1} tensors.\n"


class _Runs:
    """Unpickled, it makes a file: what a checkpoint from somewhere must never be able to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, capsys: Capture) -> None:
    good, ran = str(_ours(tmp_path / "run", _weights())), tmp_path / "ran"
    torch.save({"weight": torch.ones(2), "more": _Runs(ran)}, tmp_path / "torch.pth")
    torch.save({"more": _Runs(ran)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(_Runs(ran)))
    for name in ("torch.pth", "old.pth", "module.pth", "plain.pth"):
        assert "could run code, so it is not loaded" in refusal(capsys, "diff", good, tmp_path / name)
    assert not ran.exists()


def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path, capsys: Capture) -> None:
    good = _ours(tmp_path / "run", _weights())
    whole, cut = _save(tmp_path / "whole.pth", _weights()), tmp_path / "cut.pth"
    cut.write_bytes(Path(whole).read_bytes()[:-1])
    assert f"{cut} cannot be read: it is cut short, damaged" in refusal(capsys, "diff", good, cut)
    assert "holds no tensor" in refusal(capsys, "diff", good, _save(tmp_path / "numbers.pt", {"epoch": 3}))
    assert "no such file or folder" in refusal(capsys, "diff", good, tmp_path / "nothing")
    damaged = good / "checkpoints" / "last" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    assert "does not match its checksum" in refusal(capsys, "diff", good, whole)


# ---- comparing


def test_a_difference_is_said_in_words(tmp_path: Path, capsys: Capture) -> None:
    ours = _weights()
    theirs = {name: each.clone() for name, each in ours.items()}
    statistics = [name for name in ours if name.endswith("running_var")]
    for name in statistics:
        theirs[name] *= 1.01
    both = _save(tmp_path / "a.pth", ours), _save(tmp_path / "b.pth", theirs)
    count = len(statistics)
    said = refusal(capsys, "diff", *both, code=3)
    assert said.endswith(f"are not the same. Only BatchNorm statistics differ: {count} of {len(ours)} tensors.")
    assert main(["diff", *both, "--all"]) == 3
    told = capsys.readouterr().out
    assert all(f"model/{name} " in told for name in statistics)
    assert main(["diff", *both, "--tolerance", "0.02"]) == 0
    assert f"The same within 0.02: {len(ours)} tensors, of which {count}" in capsys.readouterr().out

    theirs.pop("classifier.bias")
    theirs["head\x1b[2J"] = torch.zeros(10)
    theirs["classifier.weight"] = torch.zeros(9, 64)
    theirs["stem.0.weight"] = ours["stem.0.weight"].double()
    _save(tmp_path / "b.pth", theirs)
    assert main(["diff", *both]) == 3
    told, err = capsys.readouterr()
    for part in (
        "only in A: model/classifier.bias",
        "only in B: model/head␛[2J",  # a name cannot move the cursor
        "(10, 64) in A, (9, 64) in B",
        "0, other bits (float32 in A, float64 in B)",
    ):
        assert part in told
    assert f"{count} of BatchNorm statistics, 1 of linear and embedding weights, 1 of convolution weights" in err


class _Named(nn.Module):
    """Has parameters whose dimensions say nothing of their kind."""

    def __init__(self) -> None:
        super().__init__()
        self.cls, self.pos = nn.Parameter(torch.ones(1, 1, 4)), nn.Parameter(torch.ones(1, 9, 4))
        self.table, self.scale = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(()))
        self.conv1, self.conv2 = nn.Conv1d(2, 3, 5), nn.Conv2d(2, 3, 5)
        self.attention, self.norm = nn.MultiheadAttention(4, 2), nn.BatchNorm1d(4)


def test_a_kind_is_named_where_name_and_dimensions_tell_it() -> None:
    ours = {f"model/{name}": each for name, each in _Named().state_dict().items()}
    found = difference.compare(ours, {name: each + 1 for name, each in ours.items()})
    kinds = {each.name.removeprefix("model/"): each.kind for each in found.differences}
    unknown = {name for name, kind in kinds.items() if kind == "parameters"}
    assert unknown == {"cls", "pos", "table", "scale", "conv1.weight"}
    assert kinds["conv2.weight"] == "convolution weights"
    assert kinds["attention.in_proj_weight"] == "linear and embedding weights"
    assert kinds["attention.in_proj_bias"] == kinds["conv2.bias"] == "biases and other vectors"
    assert kinds["norm.weight"] == "BatchNorm weights and biases"
    assert kinds["norm.num_batches_tracked"] == "BatchNorm statistics"


def _one(a: Tensor, b: Tensor) -> difference.Difference:
    (found,) = difference.compare({"model/x": a}, {"model/x": b}).differences
    return found


def test_ulps_count_the_numbers_between() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        one, inf = torch.ones(3, dtype=dtype), torch.tensor(math.inf, dtype=dtype)
        up = torch.nextafter(torch.nextafter(one, inf), inf)
        found = _one(one, torch.cat([one[:2], up[:1]]))
        assert (found.ulps, found.differing, found.elements) == (2, 1, 3)
        assert found.absolute == 2 * torch.finfo(dtype).eps
        least = torch.nextafter(torch.zeros(1, dtype=dtype), inf)
        assert _one(least, -least).ulps == 2


def test_the_whole_of_a_tensor_is_compared_by_its_largest_number() -> None:
    a = torch.arange(50_000.0)
    b = a.clone()
    b[[3, 48_000]] += torch.tensor([0.5, 2.0])
    found = _one(a.view(5, -1), b.view(5, -1))
    assert (found.differing, found.absolute, found.relative) == (2, 2.0, 2.0 / 49_999)


def test_what_is_no_number_differs_from_all_others_without_end() -> None:
    for numbers in permutations((0.0, 1.5, -1.5, math.inf, -math.inf, math.nan), 2):
        found = _one(*(torch.tensor([1.0, each]) for each in numbers))
        is_finite = all(map(math.isfinite, numbers))
        assert (found.differing, found.absolute) == (1, abs(numbers[0] - numbers[1]) if is_finite else math.inf)


def test_bits_that_are_no_other_value_are_seen() -> None:
    found = _one(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.differing, found.absolute, found.relative, found.ulps) == (0, 0.0, 0.0, 0)
    assert difference.compare({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])}).beyond(0)
    nan = torch.tensor([math.nan, 1.0])
    assert difference.compare({"x": nan}, {"x": nan.clone()}).equal == 1


def test_several_models_or_optimizers_are_told_apart(tmp_path: Path) -> None:
    one, two = ({"w": torch.tensor([value])} for value in (1.0, 2.0))
    for changed, rest in (
        ("optimizer_G", {"net": one, "optimizer_G": one, "optimizer_D": two}),
        ("model", {"model": one, "net": two}),
    ):
        paths = _save(tmp_path / "a.pth", rest), _save(tmp_path / "b.pth", rest | {changed: {"w": torch.tensor([9.0])}})
        found = difference.compare(*(foreign.read(Path(path)) for path in paths))
        assert (len(found.differences), found.only_a, found.only_b) == (1, (), ())

"""Two checkpoints: read whoever wrote them, compared tensor by tensor, and the difference in words."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.checkpoint import Checkpoints
from lockstep.cli.main import main
from lockstep.models import table
from lockstep.state import State
from lockstep.verify import difference, tensors

from ..command import refusal


def _weights(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return dict(table.build("resnet8", classes=10, in_channels=1, image_size=8).state_dict())


def _ours(folder: Path, weights: dict[str, Tensor]) -> Path:
    saver = Checkpoints(folder / "checkpoints", warn=pytest.fail)
    state = State(
        {f"model/{name}": each for name, each in weights.items()} | {"optimizer/a/momentum_buffer": torch.ones(3)},
        {"step": 1},
    )
    saver.save(state, step=1, best=True)
    saver.close()
    return folder


# ---- reading


def test_the_same_weights_are_the_same_whoever_wrote_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = _weights()
    wrapped = {f"module.{name}": each for name, each in weights.items()}
    ours = _ours(tmp_path / "run", weights)
    save_file(weights, tmp_path / "weights.safetensors")
    for name, saved in {
        "plain.pth": weights,
        "model_rank_0.pth": wrapped,
        "compiled.pth": {f"_orig_mod.{name}": each for name, each in wrapped.items()},
        "script.pt": {"epoch": 3, "arch": "resnet8", "state_dict": wrapped, "best_acc1": 0.5},
        "accelerate.bin": {"model": weights, "step": 7},
    }.items():
        torch.save(saved, tmp_path / name)
    others = ["weights.safetensors", "plain.pth", "model_rank_0.pth", "compiled.pth", "script.pt", "accelerate.bin"]
    for other in others:
        assert main(["diff", str(ours), str(tmp_path / other)]) == 0
        told = capsys.readouterr()
        assert told.out.splitlines() == [
            "not compared, since only A has more than weights: optimizer (1 tensor)",
            f"The same bits: {len(weights)} tensors.",
        ]
        assert told.err == ""
    assert main(["diff", str(ours), str(ours / "checkpoints" / "best")]) == 0
    assert capsys.readouterr().out == f"The same bits: {len(weights) + 1} tensors.\n"


def test_an_optimizers_state_is_compared_where_both_have_it(tmp_path: Path) -> None:
    saved = {"model": {"a": torch.ones(2)}, "optimizer": {"state": {0: {"momentum_buffer": torch.ones(2)}}}}
    torch.save(saved, tmp_path / "a.pt")
    assert tensors.read(tmp_path / "a.pt").keys() == {"model/a", "optimizer/state/0/momentum_buffer"}
    saved["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(2)  # type: ignore[index]
    torch.save(saved, tmp_path / "b.pt")
    found = difference.compare(tensors.read(tmp_path / "a.pt"), tensors.read(tmp_path / "b.pt"))
    assert found.verdict(0) == "Only optimizer tensors differ: 1 of 2 tensors."


class _Runs:
    """Unpickled, it makes a file: what a checkpoint from somewhere must never be able to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


class _Commands(_Runs):
    """The same, by a command, from a module of which torch speaks in other words."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(_ours(tmp_path / "run", _weights()))
    torch.save({"weight": torch.ones(2), "more": _Runs(tmp_path / "ran")}, tmp_path / "torch.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    torch.save({"more": _Commands(tmp_path / "ran")}, tmp_path / "command.pth")
    torch.save({"more": _Commands(tmp_path / "ran")}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("torch.pth", "plain.pth", "module.pth", "command.pth", "old.pth"):
        assert "could run code, so it is not loaded" in refusal(capsys, "diff", good, tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = _ours(tmp_path / "run", _weights())
    torch.save(_weights(), tmp_path / "whole.pth")
    save_file(_weights(), tmp_path / "whole.safetensors")
    for name in ("whole.pth", "whole.safetensors"):
        whole = (tmp_path / name).read_bytes()
        cut = tmp_path / f"cut.{name}"
        for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
            cut.write_bytes(whole[:length])
            said = refusal(capsys, "diff", good, cut)
            assert said.startswith(f"{cut} cannot be read: it is cut short, damaged, or no file of weights (")
    (tmp_path / "notes.txt").write_text("no weights at all\n")
    assert "cannot be read" in refusal(capsys, "diff", tmp_path / "notes.txt", good)
    torch.save({"epoch": 3}, tmp_path / "numbers.pt")
    assert "holds no tensor" in refusal(capsys, "diff", good, tmp_path / "numbers.pt")
    assert "no such file or folder" in refusal(capsys, "diff", good, tmp_path / "nothing")
    damaged = good / "checkpoints" / "last" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    assert "does not match its checksum" in refusal(capsys, "diff", good, tmp_path / "whole.pth")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("diff", "compares two checkpoints, found 0"),
        ("diff a b c", "compares two checkpoints, found 3"),
        ("diff a b --tolerance x", "--tolerance x: give 0 or more"),
        ("diff a b --tolerance nan", "--tolerance nan: give 0 or more"),
        ("diff a b --tolerance -1", "--tolerance -1: give 0 or more"),
        ("diff a b --fast", "lockstep diff has no flag --fast; lockstep diff --help"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refusal(capsys, *words.split())


# ---- comparing


def test_a_difference_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = _weights()
    theirs = {name: each.clone() for name, each in ours.items()}
    statistics = [name for name in ours if name.endswith("running_var")]
    for name in statistics:
        theirs[name] *= 1.01
    torch.save(ours, tmp_path / "a.pth")
    torch.save(theirs, tmp_path / "b.pth")
    both = (str(tmp_path / "a.pth"), str(tmp_path / "b.pth"))
    count = len(statistics)
    said = refusal(capsys, "diff", *both, code=3)
    assert said.endswith(f"are not the same. Only BatchNorm statistics differ: {count} of {len(ours)} tensors.")
    assert main(["diff", *both, "--all"]) == 3
    told = capsys.readouterr().out
    assert all(f"model/{name} " in told for name in statistics)
    assert main(["diff", *both, "--tolerance", "0.02"]) == 0
    assert f"The same within 0.02: {len(ours)} tensors, of which {count}" in capsys.readouterr().out

    theirs.pop("classifier.bias")
    theirs["head.bias"] = torch.zeros(10)
    theirs["classifier.weight"] = torch.zeros(9, 64)
    theirs["stem.0.weight"] = ours["stem.0.weight"].double()
    torch.save(theirs, tmp_path / "b.pth")
    assert main(["diff", *both]) == 3
    told, err = capsys.readouterr()
    assert "only in A: model/classifier.bias" in told
    assert "only in B: model/head.bias" in told
    assert "(10, 64) in A, (9, 64) in B" in told
    assert "0, other bits (float32 in A, float64 in B)" in told
    assert f"{count} of BatchNorm statistics, 1 of linear and embedding weights, 1 of convolution weights" in err
    assert "1 tensor only in A; 1 tensor only in B." in err


def _one(a: Tensor, b: Tensor) -> difference.Difference:
    (found,) = difference.compare({"model/x": a}, {"model/x": b}).differences
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ulps_count_the_numbers_between(dtype: torch.dtype) -> None:
    one, inf = torch.ones(3, dtype=dtype), torch.tensor(math.inf, dtype=dtype)
    up = torch.nextafter(torch.nextafter(one, inf), inf)
    found = _one(one, torch.cat([one[:2], up[:1]]))
    assert (found.ulps, found.differing, found.elements) == (2, 1, 3)
    assert found.absolute == 2 * torch.finfo(dtype).eps
    zero = torch.zeros(1, dtype=dtype)
    least = torch.nextafter(zero, inf)
    assert _one(least, -least).ulps == 2
    assert _one(-one, -torch.nextafter(one, inf)).ulps == 1


@given(st.lists(st.floats(width=32), min_size=1, max_size=9), st.lists(st.floats(width=32), min_size=1, max_size=9))
def test_what_is_found_is_what_numpy_finds(a: list[float], b: list[float]) -> None:
    size = min(len(a), len(b))
    x, y = (torch.tensor(each[:size], dtype=torch.float32) for each in (a, b))
    p, q = x.double().numpy(), y.double().numpy()
    if x.numpy().tobytes() == y.numpy().tobytes():
        assert difference.compare({"x": x}, {"x": y}).equal == 1
        return
    found = _one(x, y)
    same = (p == q) | (np.isnan(p) & np.isnan(q))
    with np.errstate(invalid="ignore"):
        gaps = np.where(same, 0, np.nan_to_num(np.abs(p - q), nan=np.inf, posinf=np.inf))
    # Of gaps that are alike when rounded, one is taken.
    assert found.absolute == pytest.approx(gaps.max(), rel=1e-6, abs=0)
    assert found.differing == (~same).sum()


def test_bits_that_are_no_other_value_are_seen() -> None:
    found = _one(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.differing, found.absolute, found.relative, found.ulps) == (0, 0.0, 0.0, 0)
    assert difference.compare({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])}).beyond(0)
    nan = torch.tensor([math.nan, 1.0])
    assert difference.compare({"x": nan}, {"x": nan.clone()}).equal == 1
    assert _one(nan, torch.ones(2)).absolute == math.inf
    far = _one(torch.tensor([-1e308], dtype=torch.float64), torch.tensor([1e308], dtype=torch.float64))
    assert far.ulps == torch.iinfo(torch.int64).max


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn])
def test_every_kind_of_number_is_compared(dtype: torch.dtype) -> None:
    a, b = (torch.tensor(values).to(dtype) for values in ([0.0, 1.0, 1.0], [0.0, 1.0, 0.0]))
    found = _one(a, b)
    assert (found.absolute, found.relative, found.differing) == (1.0, 1.0, 1)
    assert (found.ulps is None) == (not dtype.is_floating_point)
    nothing = _one(torch.zeros(0), torch.zeros(0, dtype=torch.float64))
    assert (nothing.absolute, nothing.elements, nothing.dtypes) == (0.0, 0, "float32 in A, float64 in B")


def test_a_tensor_of_many_parts_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "_PART", 7)
    a = torch.arange(50.0)
    b = a.clone()
    b[[3, 48]] += torch.tensor([0.5, 2.0])
    found = _one(a.view(5, 10), b.view(5, 10))
    assert (found.differing, found.absolute, found.relative) == (2, 2.0, 2.0 / 50)


# ---- what could be taken for something else


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"net": {"w": 1.0}, "optimizer_G": {"m": 1.0}, "optimizer_D": {"m": 2.0}}, {"optimizer_G": {"m": 99.0}}),
        ({"model": {"w": 1.0}, "net": {"w": 2.0}}, {"model": {"w": 7.0}}),
        ({"module.a": 1.0, "a": 2.0}, {"module.a": 7.0}),
        ([1.0, 2.0], [1.0, 3.0]),
    ],
    ids=["two optimizers", "two models", "a prefix alone", "a list"],
)
def test_tensors_of_one_name_are_told_apart(tmp_path: Path, a: Any, b: Any) -> None:
    def made(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: made(part) for key, part in value.items()}
        return [made(part) for part in value] if isinstance(value, list) else torch.tensor([value])

    torch.save(made(a), tmp_path / "a.pth")
    torch.save(made(a | b if isinstance(a, dict) else b), tmp_path / "b.pth")
    found = difference.compare(*(tensors.read(tmp_path / name) for name in ("a.pth", "b.pth")))
    assert (len(found.differences), found.only_a, found.only_b) == (1, (), ())


def test_tensors_whose_values_cannot_be_compared_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "without data": torch.empty(3, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }
    for kind, tensor in odd.items():
        torch.save({"layer.w": tensor}, tmp_path / "odd.pth")
        said = refusal(capsys, "diff", tmp_path / "odd.pth", tmp_path / "odd.pth")
        assert f"holds model/layer.w, a tensor that is {kind}" in said


def test_names_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a\x1b[2J": torch.ones(1)}, tmp_path / "a.pth")
    torch.save({"a\x1b[2J": torch.zeros(1)}, tmp_path / "b.pth")
    assert main(["diff", str(tmp_path / "a.pth"), str(tmp_path / "b.pth")]) == 3
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "a\\x1b[2J" in out

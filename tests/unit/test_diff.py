"""`lockstep diff`: two checkpoints, whoever wrote them, compared tensor by tensor; no code in them runs."""

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

Capture = pytest.CaptureFixture[str]


def _weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(table.build("resnet8", classes=10, in_channels=1, image_size=8).state_dict())


def _ours(folder: Path, weights: dict[str, Tensor]) -> Path:
    saver = Checkpoints(folder / "checkpoints", warn=pytest.fail)
    held = {f"model/{name}": each for name, each in weights.items()} | {"optimizer/a/momentum_buffer": torch.ones(3)}
    saver.save(State(held, {"step": 1}), step=1, best=True)
    saver.close()
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
        return open, (str(self.path), "w")


class _Commands(_Runs):
    """The same, by a command, from a module of which torch speaks in other words."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, capsys: Capture) -> None:
    good, ran = str(_ours(tmp_path / "run", _weights())), tmp_path / "ran"
    torch.save({"weight": torch.ones(2), "more": _Runs(ran)}, tmp_path / "torch.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(_Runs(ran)))
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    torch.save({"more": _Commands(ran)}, tmp_path / "command.pth")
    torch.save({"more": _Commands(ran)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("torch.pth", "plain.pth", "module.pth", "command.pth", "old.pth"):
        assert "could run code, so it is not loaded" in refusal(capsys, "diff", good, tmp_path / name)
    assert not ran.exists()


def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path, capsys: Capture) -> None:
    good = _ours(tmp_path / "run", _weights())
    whole = _save(tmp_path / "whole.pth", _weights())
    save_file(_weights(), tmp_path / "whole.safetensors")
    for path in (tmp_path / "whole.pth", tmp_path / "whole.safetensors"):
        data, cut = path.read_bytes(), tmp_path / f"cut{path.suffix}"
        for length in (0, 100, len(data) // 2, len(data) - 1):
            cut.write_bytes(data[:length])
            assert f"{cut} cannot be read: it is cut short, damaged" in refusal(capsys, "diff", good, cut)
    assert "holds no tensor" in refusal(capsys, "diff", good, _save(tmp_path / "numbers.pt", {"epoch": 3}))
    assert "no such file or folder" in refusal(capsys, "diff", good, tmp_path / "nothing")
    for kind, odd in {"sparse": torch.eye(3).to_sparse(), "without data": torch.empty(3, device="meta")}.items():
        said = refusal(capsys, "diff", good, _save(tmp_path / "odd.pth", {"layer.w": odd}))
        assert f"holds model/layer.w, a tensor that is {kind}" in said
    damaged = good / "checkpoints" / "last" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    assert "does not match its checksum" in refusal(capsys, "diff", good, whole)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("diff", "compares two checkpoints, found 0"),
        ("diff a b --tolerance nan", "--tolerance nan: give 0 or more"),
        ("diff a b --fast", "no flag --fast; lockstep diff --help"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: str, expected: str, capsys: Capture) -> None:
    assert expected in refusal(capsys, *words.split())


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
        "only in B: model/head\\x1b[2J",  # escaped: a name cannot move the cursor
        "(10, 64) in A, (9, 64) in B",
        "0, other bits (float32 in A, float64 in B)",
    ):
        assert part in told
    assert f"{count} of BatchNorm statistics, 1 of linear and embedding weights, 1 of convolution weights" in err


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
    least = torch.nextafter(torch.zeros(1, dtype=dtype), inf)
    assert _one(least, -least).ulps == 2


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=9))
def test_what_is_found_is_what_numpy_finds(pairs: list[tuple[float, float]]) -> None:
    x, y = torch.tensor(pairs, dtype=torch.float32).t()
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


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_every_kind_of_number_is_compared(dtype: torch.dtype) -> None:
    a, b = (torch.tensor(values).to(dtype) for values in ([0.0, 1.0, 1.0], [0.0, 1.0, 0.0]))
    found = _one(a, b)
    assert (found.absolute, found.relative, found.differing) == (1.0, 1.0, 1)


def test_a_large_tensor_is_compared_whole() -> None:
    a = torch.arange(50_000.0)
    b = a.clone()
    b[[3, 48_000]] += torch.tensor([0.5, 2.0])
    found = _one(a.view(5, -1), b.view(5, -1))
    assert (found.differing, found.absolute, found.relative) == (2, 2.0, 2.0 / 49_999)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"net": {"w": 1}, "optimizer_G": {"m": 1}, "optimizer_D": {"m": 2}}, {"optimizer_G": {"m": 9}}),
        ({"model": {"w": 1}, "net": {"w": 2}}, {"model": {"w": 7}}),
        ({"module.a": 1, "a": 2}, {"module.a": 7}),
    ],
    ids=["two optimizers", "two models", "a prefix alone"],
)
def test_tensors_of_one_name_are_told_apart(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> None:
    def made(value: Any) -> Any:
        return {key: made(part) for key, part in value.items()} if isinstance(value, dict) else torch.tensor([value])

    paths = _save(tmp_path / "a.pth", made(a)), _save(tmp_path / "b.pth", made(a | b))
    found = difference.compare(*(tensors.read(Path(path)) for path in paths))
    assert (len(found.differences), found.only_a, found.only_b) == (1, (), ())

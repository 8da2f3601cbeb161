"""Networks by name: their sizes, their names in checkpoints, and what they say to requests they cannot honour."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.errors import RequestError
from lockstep.models import table, trial
from lockstep.models.pyramidnet import Block, PyramidNet, carry, pyramidnet
from lockstep.models.weights import seed_weights

# Parameters for 10 classes and 32×32 images of 3 channels, and a digest of the state's keys in their order, which
# checkpoints depend on.
FROZEN = {
    "convnet-small": (242_474, "86fa729dd64cc215"),
    "mlp": (394_634, "c2ad79eb1b125701"),
    "pyramidnet-20-48": (310_845, "27fd2783433aa8d3"),
    "pyramidnet-110-48": (1_772_706, "ac2628968993b9d9"),
    "pyramidnet-110-270": (28_485_477, "e052a239df9c8b46"),
    "pyramidnet-110-270-padded": (29_548_346, "4217f122e7560092"),
    "pyramidnet-110-270-reference": (24_253_410, "6593f0dbde38c5ab"),
    "resnet8": (78_042, "49994dc60630eccc"),
    "resnet18": (11_173_962, "e65b4f40261754b2"),
    "resnet20": (272_474, "ace8a67dd7abe1b6"),
    "resnet34": (21_282_122, "f391b25383cebed4"),
    "resnet50": (23_520_842, "d8e077e0f0cdeb98"),
}
LIGHT = ["convnet-small", "mlp", "pyramidnet-20-48", "resnet8", "resnet18", "resnet20"]


def _build(name: str, classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    return table.build(name, classes=classes, in_channels=in_channels, image_size=image_size)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", FROZEN)
def test_sizes_and_state_keys_are_frozen(name: str) -> None:
    with torch.device("meta"):
        model = _build(name)
    keys = "\n".join(f"{key} {tuple(value.shape)}" for key, value in model.state_dict().items())
    assert (_parameters(model), hashlib.sha256(keys.encode()).hexdigest()[:16]) == FROZEN[name]
    assert name != "resnet18" or _parameters(_build(name, classes=100)) == 11_220_132


@pytest.mark.parametrize("name", LIGHT)
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(_build(name).state_dict())
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
    torch.manual_seed(8)
    other = _build(name).state_dict()
    assert not all(torch.equal(tensor, states[0][key]) for key, tensor in other.items())


@pytest.mark.parametrize("image_size", [8, 33])
@pytest.mark.parametrize("name", LIGHT)
def test_channels_classes_and_sides_are_honoured(name: str, image_size: int) -> None:
    model = _build(name, classes=7, in_channels=1, image_size=image_size)
    logits = model(torch.randn(3, 1, image_size, image_size))
    assert logits.shape == (3, 7)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", [*LIGHT, "mobilenet_v3_small"])
def test_an_empty_share_gives_zero_gradients_and_leaves_the_statistics(name: str) -> None:
    model = _build(name)
    before = {key: buffer.clone() for key, buffer in model.named_buffers()}
    nn.functional.cross_entropy(
        model(torch.zeros(0, 3, 32, 32)), torch.zeros(0, dtype=torch.int64), reduction="sum"
    ).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    for key, buffer in model.named_buffers():
        assert key.endswith("num_batches_tracked") or torch.equal(buffer, before[key]), key


def test_a_block_is_the_sum_of_residual_and_shortcut() -> None:
    torch.manual_seed(0)
    for stride in (1, 2):
        block = Block(3, 5, stride).eval()
        x = torch.randn(2, 3, 6, 6)
        expected = block.residual(x)
        expected[:, :3] += x if stride == 1 else x.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))
        torch.testing.assert_close(block(x), expected)


def _twins() -> tuple[PyramidNet, PyramidNet]:
    """Return a plain net and its padded one, in float64."""
    nets = []
    for padded in (False, True):
        torch.manual_seed(1)
        nets.append(pyramidnet(20, 40, padded=padded, classes=3, in_channels=1).double())
    return nets[0], nets[1]


def _step(net: PyramidNet, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((6, 1, 8, 8), generator=generator, dtype=torch.float64)
    logits: torch.Tensor = net(x)
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits, torch.arange(6) % 3).backward()
    optimizer.step()
    return logits.detach()


def test_padding_leaves_the_mathematics_as_it_is() -> None:
    plain, padded = _twins()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2) for net in (plain, padded)]
    close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
    for seed in range(5):
        expected, found = (
            _step(net, optimizer, seed) for net, optimizer in zip((plain, padded), optimizers, strict=True)
        )
        torch.testing.assert_close(found, expected, **close)
        for (name, mine), theirs in zip(padded.named_parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            real = tuple(slice(side) for side in theirs.shape)
            torch.testing.assert_close(mine.grad[real], theirs.grad, **close, msg=partial("{}: {}".format, name))
    back = pyramidnet(20, 40, classes=3, in_channels=1).double()
    carry(padded, back)
    for name, tensor in back.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], **close)
    # All of the state lies in the real channels: nothing is lost on the way back and forth.
    again = _twins()[1]
    carry(back, again)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, padded.state_dict()[name]), name
    x = torch.randn((2, 1, 8, 8), dtype=torch.float64)
    torch.testing.assert_close(padded.eval()(x), plain.eval()(x), **close)


def test_torchvision_by_plain_name_and_by_prefix() -> None:
    assert _parameters(_build("torchvision.resnet18")) == 11_181_642
    assert _parameters(_build("mobilenet_v3_small")) == _parameters(_build("torchvision.mobilenet_v3_small"))
    assert _build("vit_b_32", image_size=64).training


@pytest.mark.parametrize(
    ("name", "in_channels", "image_size", "sentence"),
    [
        ("mobilenet_v3_small", 1, 32, r"takes images of 3 channels, the data has 1; take one of our own"),
        ("vit_b_32", 3, 33, r"cannot take 33×33 images .*--image-size 224"),
        ("alexnet", 3, 32, r"cannot take 32×32 images .*--image-size 224"),
    ],
)
def test_images_that_a_net_cannot_take(name: str, in_channels: int, image_size: int, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        _build(name, in_channels=in_channels, image_size=image_size)


OWN = """
from torch import nn
SEEN = []
class Net(nn.Module):
    def __init__(self, classes, in_channels=3):
        super().__init__()
        self.line = nn.Linear(in_channels, classes)
def everything(**shape):
    SEEN.append(shape)
    return nn.Identity()
def shaped(classes, shape):
    return everything(classes=classes, shape=shape)
class Plain(nn.Module):
    def forward(self, x):
        return x.flatten(1)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)


@pytest.mark.usefixtures("own")
def test_the_users_own_gets_what_it_asks_for() -> None:
    path = list(sys.path)
    table.preflight("own_models:Net")
    net = _build("own_models:Net", classes=4, in_channels=2)
    assert isinstance(net.line, nn.Linear)
    assert (net.line.in_features, net.line.out_features) == (2, 4)
    _build("own_models:Plain", classes=4)
    _build("own_models:everything", classes=4, in_channels=2, image_size=8)
    assert sys.modules["own_models"].SEEN == [{"classes": 4, "in_channels": 2, "image_size": 8}]
    assert sys.path == path


@pytest.mark.parametrize("shape", [(5,), (4, 6), (1, 8, 8), (3, 8, 16), (2, 3, 4, 5)])
def test_a_perceptron_takes_samples_of_any_shape(shape: tuple[int, ...]) -> None:
    model = table.build_for("mlp", classes=3, shape=shape)
    assert model(torch.randn(2, *shape)).shape == (2, 3)
    trial.check("mlp", model, classes=3, shape=shape, dtype=torch.float32)


@pytest.mark.usefixtures("own")
def test_the_users_own_is_told_the_shape_if_it_asks() -> None:
    for name in ("shaped", "everything"):  # whoever takes anything may hand it on to what knows no shape
        table.build_for(f"own_models:{name}", classes=3, shape=(2, 4, 6))
    assert sys.modules["own_models"].SEEN == [
        {"classes": 3, "shape": (2, 4, 6)},
        {"classes": 3, "in_channels": 2, "image_size": 6},
    ]


def test_weights_are_drawn_from_the_seed_by_whatever_library() -> None:
    def drawn(seed: int) -> tuple[float, float, float]:
        seed_weights(seed)
        return float(torch.rand(())), float(np.random.rand()), random.random()

    first = drawn(7)
    assert drawn(7) == first
    assert len({*first, *drawn(8)}) == 6
    seed_weights(2**40)  # more than NumPy's generator takes
    torch.manual_seed(7)
    assert float(torch.rand(())) == first[0]  # torch's are those of its own seed, as in a user's own script


# --- a first pass


class _Returns(nn.Module):
    """A net with dropout, BatchNorm and a frozen part whose scores are made into something else."""

    def __init__(self, made: Callable[[torch.Tensor], object], outputs: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, outputs), nn.BatchNorm1d(outputs), nn.Dropout(0.5))
        self.frozen = nn.BatchNorm1d(4).eval()
        self.made = made

    def forward(self, x: torch.Tensor) -> object:
        return self.made(self.body(self.frozen(x)))


def _tried(model: nn.Module, dtype: torch.dtype = torch.float32, name: str = "my:Net") -> None:
    trial.check(name, model, classes=10, shape=(4,), dtype=dtype)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda x: (x, x), r"--model my:Net returns 2 things at once, .* the scores alone"),
        (lambda x: {"logits": x, "aux": x}, r"returns several things by name \(logits, aux\)"),
        (lambda x: None, r"returns nothing"),
        (lambda x: x[:, :, None, None], r"of shape \(2, 10, 1, 1\) for 2 samples, .* of shape \(2, 10\)"),
        (lambda x: x.mean(0, keepdim=True), r"of shape \(1, 10\)"),
        (lambda x: x.argmax(1, keepdim=True).expand(2, 10), r"torch.int64 of shape"),
        (lambda x: x[:, :5], r"returns 5 scores a sample, and the labels are of 10 classes; give its last layer 10"),
    ],
)
def test_what_cannot_be_scored_is_refused(made: Callable[[torch.Tensor], object], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        _tried(_Returns(made))
    assert "\n" not in str(caught.value)


def test_a_first_pass_changes_nothing() -> None:
    model = _Returns(lambda x: x, outputs=12)  # more outputs than classes are legal
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    _tried(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class _Reshaped(nn.Linear):
    """A net that reshapes its samples, as many do, and then its scores."""

    def __init__(self, into: Callable[[torch.Tensor], torch.Tensor], scored: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(4, 10)
        self.into, self.scored = into, scored

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scored(super().forward(self.into(x)))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (_Reshaped(lambda x: x.view(x.size(0), -1), lambda x: x), r"a batch of no samples \(cannot reshape"),
        (_Reshaped(lambda x: x, lambda x: x if len(x) else x.new_zeros(1, 10)), r"shape \(1, 10\) of a batch"),
    ],
)
def test_a_model_that_takes_no_empty_batch_is_refused_where_one_will_come(model: nn.Module, sentence: str) -> None:
    _tried(model)
    with pytest.raises(RequestError, match=rf"{sentence}.*flatten\(1\).*or --drop-last, or another --batch.$"):
        trial.check("my:Net", model, classes=10, shape=(4,), dtype=torch.float32, empty=True)
    flat = _Returns(lambda x: x.flatten(1))
    trial.check("my:Net", flat, classes=10, shape=(4,), dtype=torch.float32, empty=True)


def test_whole_numbers_are_for_models_that_take_them() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(7, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.words(x).mean(1)  # type: ignore[no-any-return]

    _tried(Embedded(), torch.int64)
    with pytest.raises(RequestError, match=r"--model mlp computes with floating-point numbers.*torch\.int64"):
        _tried(table.build_for("mlp", classes=10, shape=(4,)), torch.int64, "mlp")

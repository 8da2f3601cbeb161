"""Networks by name: their sizes, their names in checkpoints, and what they say to requests they cannot honour."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import RequestError
from lockstep.models import table, trial
from lockstep.models.pyramidnet import Block
from lockstep.world.random_state import seed_weights

from ..needs import need

# Parameters for 10 classes and 32×32 images of 3 channels, and a digest of the state's keys in their order, which
# checkpoints depend on.
FROZEN = {
    "convnet-small": (242_474, "86fa729dd64cc215"),
    "mlp": (394_634, "c2ad79eb1b125701"),
    "pyramidnet-20-48": (310_845, "27fd2783433aa8d3"),
    "pyramidnet-110-48": (1_772_706, "ac2628968993b9d9"),
    "pyramidnet-110-270": (28_485_477, "e052a239df9c8b46"),
    "pyramidnet-110-270-reference": (24_253_410, "6593f0dbde38c5ab"),
    "resnet8": (78_042, "49994dc60630eccc"),
    "resnet18": (11_173_962, "e65b4f40261754b2"),
    "resnet20": (272_474, "ace8a67dd7abe1b6"),
    "resnet34": (21_282_122, "f391b25383cebed4"),
    "resnet50": (23_520_842, "d8e077e0f0cdeb98"),
    "vgg-small": (1_972_816, "7acd5fb185981ba2"),
}
LIGHT = ["convnet-small", "mlp", "pyramidnet-20-48", "resnet8", "resnet18"]


def _build(name: str, classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    return table.build_for(name, classes=classes, shape=(in_channels, image_size, image_size))


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", FROZEN)
def test_sizes_and_state_keys_are_frozen(name: str) -> None:
    with torch.device("meta"):
        model = _build(name)
    keys = "\n".join(f"{key} {tuple(value.shape)}" for key, value in model.state_dict().items())
    assert (_parameters(model), hashlib.sha256(keys.encode()).hexdigest()[:16]) == FROZEN[name]


@pytest.mark.parametrize("name", LIGHT)
def test_the_seed_gives_the_bits_and_samples_of_each_shape_and_number_are_taken(name: str) -> None:
    models = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        models.append(_build(name, classes=7, in_channels=1, image_size=8))
    first, second, other = (list(model.state_dict().values()) for model in models)
    assert all(map(torch.equal, first, second))
    assert not all(map(torch.equal, first, other))
    for model, side in ((models[0], 8), (_build(name, classes=7, in_channels=1, image_size=33), 33)):
        assert model(torch.randn(3, 1, side, side)).shape == (3, 7)


def test_a_vgg_starts_as_the_identity_on_its_first_filters_and_needs_nine_pixels() -> None:
    first, *_ = _build("vgg-small").get_submodule("blocks.1").eval().children()
    x = torch.rand(2, 64, 8, 8)
    torch.testing.assert_close(first(x)[:, :64], x)
    assert _build("vgg-small", classes=7, in_channels=1, image_size=9)(torch.rand(3, 1, 9, 9)).shape == (3, 7)
    with pytest.raises(RequestError, match=r"--model vgg-small cannot take .*\(3, 8, 8\)"):
        trial.check("vgg-small", _build("vgg-small"), classes=10, shape=(3, 8, 8), dtype=torch.float32)


def test_a_block_is_the_sum_of_residual_and_shortcut() -> None:
    torch.manual_seed(0)
    for stride in (1, 2):
        block = Block(3, 5, stride).eval()
        x = torch.randn(2, 3, 6, 6)
        expected = block.residual(x)
        expected[:, :3] += x if stride == 1 else x.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))
        torch.testing.assert_close(block(x), expected)


def test_torchvision_by_plain_name_and_by_prefix() -> None:
    assert _parameters(_build("torchvision.resnet18")) == 11_181_642
    assert _parameters(_build("mobilenet_v3_small")) == _parameters(_build("torchvision.mobilenet_v3_small"))
    with pytest.raises(RequestError, match=r"cannot take 33×33 images .*--image-size 224"):
        _build("vit_b_32", image_size=33)
    with pytest.raises(RequestError, match=r"--model alexnet cannot take .*\(3, 32, 32\).*--image-size 224"):
        trial.check("alexnet", _build("alexnet"), classes=10, shape=(3, 32, 32), dtype=torch.float32)


def everything(**asked: object) -> nn.Module:
    net = nn.Module()
    for name, given in asked.items():
        net.register_buffer(name, torch.tensor(given))
    return net


def some(classes: int, in_channels: int = 3) -> nn.Module:
    return everything(classes=classes, in_channels=in_channels)


def shaped(classes: int, shape: tuple[int, ...]) -> nn.Module:
    return everything(classes=classes, shape=shape)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("everything", {"classes": 3, "in_channels": 2, "image_size": 6}),  # other libraries' builders know no shape
        ("some", {"classes": 3, "in_channels": 2}),
        ("shaped", {"classes": 3, "shape": [2, 4, 6]}),
    ],
)
def test_the_users_own_gets_what_it_asks_for(name: str, asked: dict[str, object]) -> None:
    model = table.build_for(f"{__name__}:{name}", classes=3, shape=(2, 4, 6))
    assert {key: value.tolist() for key, value in model.state_dict().items()} == asked


def test_weights_are_drawn_from_the_seed_by_whatever_library() -> None:
    def drawn(seed: int) -> tuple[float, float, float]:
        seed_weights(seed)
        return float(torch.rand(())), float(np.random.rand()), random.random()

    first = drawn(7)
    assert drawn(7) == first
    assert len({*first, *drawn(2**40)}) == 6  # more than NumPy's generator takes


# --- a first pass


class _Returns(nn.Module):
    """A net with dropout and BatchNorm, a part of it frozen, whose scores are made into something else."""

    def __init__(self, made: Callable[[Tensor], object], outputs: int = 10) -> None:
        super().__init__()
        norms = nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(outputs)
        self.body = nn.Sequential(norms[0], nn.Linear(4, outputs), norms[1], nn.Dropout(0.5))
        self.made = made

    def forward(self, x: Tensor) -> object:
        return self.made(self.body(x))


def _tried(model: nn.Module, dtype: torch.dtype = torch.float32, name: str = "my:Net") -> None:
    trial.check(name, model, classes=10, shape=(4,), dtype=dtype)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda x: (x, x), "a tuple for 2 samples, .* the scores alone"),
        (lambda x: x.mean(0, keepdim=True), r"of shape \(1, 10\) .* of shape \(2, 10\)"),
        (lambda x: x.argmax(1, keepdim=True).expand(2, 10), "torch.int64"),
        (lambda x: x[:, :5], r"of shape \(2, 5\) .* a last layer of 10 outputs"),
    ],
)
def test_what_cannot_be_scored_is_refused(made: Callable[[Tensor], object], told: str) -> None:
    with pytest.raises(RequestError, match=f"--model my:Net returns .*{told}"):
        _tried(_Returns(made))


def test_a_first_pass_changes_nothing() -> None:
    model = _Returns(lambda x: x, outputs=12)  # more outputs than classes are legal
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    _tried(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in model.modules()] == modes


def test_samples_of_whole_numbers_are_for_models_that_take_them() -> None:
    _tried(nn.Sequential(nn.Embedding(7, 10), nn.AvgPool2d((4, 1)), nn.Flatten()), torch.int64)
    with pytest.raises(RequestError, match=r"--model mlp cannot take .*torch\.int64.* raised RuntimeError"):
        _tried(table.build_for("mlp", classes=10, shape=(4,)), torch.int64, "mlp")


@pytest.mark.slow
def test_timms_networks_by_name() -> None:
    need([] if find_spec("timm") else ["timm"])
    import timm

    for name, shape in (("test_resnet", (1, 40, 32)), ("test_vit", (3, 32, 32)), ("vit_tiny_patch16_224", (3, 32, 48))):
        torch.manual_seed(1)
        model = table.build_for(f"timm.{name}", classes=7, shape=shape)
        size = {} if name == "test_resnet" else {"img_size": shape[1:]}
        torch.manual_seed(1)
        theirs = timm.create_model(name, num_classes=7, in_chans=shape[0], **size)
        assert all(map(torch.equal, model.state_dict().values(), theirs.state_dict().values()))
        assert model(torch.zeros(2, *shape)).shape == (2, 7)
        call, _, module, arguments = table.source(f"timm.{name}", classes=7, shape=shape)
        assert _parameters(getattr(timm, call)(**arguments)) == _parameters(model)
        assert module == "timm"
    with pytest.raises(RequestError, match=r"did you mean timm\.vit_tiny_patch16_224"):
        table.preflight("timm.vit_tiny_patch16_244")
    with pytest.raises(RequestError, match=r"cannot take 33×33 images .*use --image-size 224"):
        table.build_for("timm.nest_tiny", classes=7, shape=(3, 33, 33))
    with pytest.raises(RequestError, match="give a file of weights"):
        table.pretrained("timm.test_vit")
    table.preflight("timm.vit_tiny_patch16_224.augreg_in21k")  # a tag of weights


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(RequestError, match=r"timm.NAME needs timm, .*pip install 'lockstep-torch\[hf\]'"):
        table.preflight("timm.resnet18")

"""Ejected files: what they hold, and what has no plain form."""

from __future__ import annotations

import ast
import io
import itertools
import json
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.cli import eject as verb
from lockstep.cli.main import main
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.data.images import Transform
from lockstep.data.order import Order
from lockstep.data.source import Request
from lockstep.eject import chinese, loop, recipe
from lockstep.errors import RequestError
from lockstep.world.world import World

from ..command import ROOT, refusal

WAYS: dict[str, tuple[object, ...]] = {
    "single": ("--strategy", "single"),
    "dp": ("--strategy", "dp", "--devices", 2),
    "torchrun": ("--strategy", "ddp", "--devices", 2),
    "spawn": ("--strategy", "ddp", "--devices", 2, "--launcher", "spawn"),
    "by hand": ("--strategy", "ddp", "--world-size", 2, "--rank", 0, "--init-method", "tcp://127.0.0.1:1"),
    "slurm": ("--strategy", "ddp", "--slurm"),
    "hybrid": ("--strategy", "hybrid", "--devices", 2, "--world-size", 2, "--rank", 0, "--init-method", "file:///x"),
}
VARIANTS: dict[str, tuple[object, ...]] = {
    "plain": (),
    "accumulated": ("--accumulate", 2, "--precision", "bf16", "--clip", 1.0, "--max-steps", 5),
    "scaled": ("--precision", "fp16", "--ema", 0.9, "--drop-last", "--schedule", "onecycle", "--compile"),
    "varied": ("--augment", "crop", "flip", "cutout", "--optimizer", "adamw", "--warmup", 0, "--accelerator", "cuda"),
}
RECIPES: dict[str, tuple[object, ...]] = {
    "digits": (),
    "cifar10-pyramidnet": (),
    "cifar100-resnet18": (),
    "cifar10-small": (),
    "imagenet-resnet50": ("--classes", 10),
}


def ejected(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["eject", *map(str, words)]) == 0
    return capsys.readouterr().out


def _cases(rounds: int) -> Iterator[tuple[object, ...]]:
    """Yield command lines in which each recipe, way and variant comes at least so many times."""
    recipes, variants = itertools.cycle(RECIPES.items()), itertools.cycle(VARIANTS.values())
    for way in itertools.chain(*[WAYS.values()] * rounds):
        (name, words), variant = next(recipes), next(variants)
        yield (name, *words, *way, *variant)


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_files_are_clean_and_need_no_lockstep(rounds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, words in enumerate(_cases(rounds)):
        text = ejected(capsys, *words)
        (tmp_path / f"{number}.py").write_text(text)
        imported = {
            alias.name if isinstance(node, ast.Import) else str(getattr(node, "module", ""))
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        foreign = {module.partition(".")[0] for module in imported} - sys.stdlib_module_names
        assert foreign <= {"torch", "torchvision"}
        assert _code_lines(text) <= 280, words
        _check_translated(text)
    ruff = [str(Path(sys.executable).with_name("ruff")), "check", "--config", str(ROOT / "pyproject.toml")]
    linted = subprocess.run([*ruff, "--ignore", "N812", str(tmp_path)], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


def _check_translated(text: str) -> None:
    """Check that every comment and docstring has a translation."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# mypy", "# noqa")):
            assert token.string.lstrip("# ").partition("  #")[0] in chinese.COMMENTS
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (docstring := ast.get_docstring(node)):
            assert docstring in chinese.COMMENTS


def _code_lines(text: str) -> int:
    """Count lines other than blank ones, comments and docstrings."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {token.start[0] for token in tokens if token.type not in ignored}
    documented = [
        node.body[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node)
    ]
    return len(lines - {line for node in documented for line in range(node.lineno, (node.end_lineno or 0) + 1)})


def _module(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "ejected", "__file__": "train.py"}
    exec(compile(text, "train.py", "exec"), names)
    return names


@pytest.mark.parametrize("samples", [3, 10, 1437, 4097])
def test_the_order_is_that_of_the_run(samples: int, capsys: pytest.CaptureFixture[str]) -> None:
    module = _module(ejected(capsys, "digits", "--seed", 7))
    for epoch in (0, 3):
        expected = Order(samples, seed=7, epoch=epoch).indices(0, samples)
        assert np.array_equal(module["permutation"](samples, epoch).numpy(), expected)


@pytest.mark.parametrize("names", [("crop",), ("flip",), ("cutout",), ("crop", "flip", "cutout")])
def test_the_augmentation_is_that_of_the_run(names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    words = ("cifar10-small", "--augment", *names, "--precision", "fp64", "--seed", 5)
    module = _module(ejected(capsys, *words))
    config = override(RunConfig(), data="cifar10").data
    request = Request(config=config, seed=5, world=World.alone(), dtype=torch.float64, channels_last=False)
    transform = Transform(request, (3, 32, 32), names, module["MEAN"], module["STD"])
    images = torch.randint(256, (40, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    indices = np.arange(40) * 13
    expected = transform(images, transform.draw(4, indices))
    found = module["augment"](images.permute(0, 3, 1, 2), torch.from_numpy(indices), 4)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_every_comment_of_a_loop_has_a_translation() -> None:
    _check_translated((ROOT / "src/lockstep/eject/plain.py").read_text())


def test_chinese_files_compute_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    english = ejected(capsys, "digits", "--strategy", "ddp", "--devices", 2)
    translated = ejected(capsys, "digits", "--strategy", "ddp", "--devices", 2, "--language", "zh")
    assert _without_docstrings(english) == _without_docstrings(translated)
    assert "损失" in translated


def _without_docstrings(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body[:1] = []
    return ast.dump(tree)


def test_the_difference_names_chapters_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = ejected(capsys, "digits", "--strategy", "ddp", "--devices", 2, "--precision", "bf16", "--diff")
    for chapter in ("06-ddp", "07-means", "08-samples", "11-precision"):
        assert f"docs/notes/{chapter}.md" in text
    for chapter in recipe.CHAPTERS:
        assert (ROOT / "docs" / "notes" / f"{chapter}.md").is_file()


def test_a_run_is_ejected_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", "digits", "--model", "mlp", "--max-steps", "1", "--accelerator", "cpu", "--quiet")
    assert main([*words, "--output", str(tmp_path / "run")]) == 0
    text = ejected(capsys, tmp_path / "run", "--strategy", "ddp", "--devices", 2)
    assert "mlp(classes=10, shape=(1, 8, 8))" in text
    assert "DistributedDataParallel" in text
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('model = "mlp"', 'model = "os:system"'))
    assert "names code" in refusal(capsys, "eject", tmp_path / "run")


def test_paths_of_a_foreign_run_stay_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = 'x", train=exit()) #\\'
    text = ejected(capsys, "cifar10-small", "--data-dir", tmp_path / hostile)
    (call,) = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "datasets.CIFAR10"
    )
    assert ast.literal_eval(call.args[0]) == str(tmp_path / hostile)


def test_a_model_of_the_users_own_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    text = ejected(capsys, "digits", "--model", "tests.models:Wide")
    assert "from tests.models import Wide" in text
    text = ejected(capsys, "digits", "--label-smoothing", 0, "--loss", "torch.nn.functional:cross_entropy")
    assert text.count("torch.nn.functional.cross_entropy(") == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("digits", "--freeze", "stem.*"), "--freeze has no plain form"),
        (("digits", "--optimizer", "muon"), "muon has no plain form"),
        (("digits", "--data", "fake", "--augment", "--"), "--data fake has no plain form"),
        (("digits", "--augment", "flip", "mixup"), "--augment mixup has no plain form"),
        (("digits", "--draws", "global"), "--draws has no plain form"),
        (("digits", "--precision", "auto"), "--precision auto depends"),
        (("digits", "--nodes", "2", "--init-method", "tcp://h:1"), "--nodes has no plain form"),
        (("digits", "--gpus", "1,2"), "--gpus has a plain form for dp"),
        (("digits", "--strategy", "dp", "--batchnorm", "sync"), "cannot work under"),
        (("digits", "--slurm", "--launcher", "spawn"), "--slurm starts the ranks"),
        (("digits", "--slurm", "--strategy", "single"), "use ddp or zero1 or fsdp or hybrid"),
        (("imagenet-resnet50", "--data-dir", "/nowhere"), "add --classes N"),
        (("digits", "--language", "fr"), "language"),
        (("digits", "--output", "."), "exists"),
        (("nowhere.py",), "cannot be read"),
        ((), "No recipe, run or script given"),
    ],
)
def test_what_has_no_plain_form_is_refused(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refusal(capsys, "eject", *(word for word in words if word != "--"))


LOOP = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

session = lockstep.session(output="runs/x")
torch.set_default_dtype(torch.float64)
x = torch.randn(103, 5)
data = TensorDataset(x, (x.sum(1) > 0).long())
loader, test = DataLoader(data, batch_size=10, shuffle=True), DataLoader(data, batch_size=32)
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        session.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=session.mean(loss), where=session.rank)
    correct = 0
    for x, y in session.evaluating(test):
        correct += (model(x).argmax(1) == y).sum()
    correct = session.sum(correct)
    session.print(f"epoch {epoch}  correct {correct.item():.0f}  {model.state_dict()['1.running_mean'].sum():.12g}")
"""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("session(output", "session(accumulate=2, output", "line 8 has no plain form: session(accumulate=…)"),
        ("session.backward(loss)", "session.backward(loss, reduction='sum')", "line 19 has no plain form"),
        ("session.log(loss=session.mean(loss)", "session.save(loss=session.mean(loss)", "session.save"),
        ("session.log(", "a = 1; session.log(", "a separate line"),
        ("model(x), y)", "model.score(x), y)", "hides model.score"),
        ("for x, y in loader", "for x in loader", "give the count"),
        ("for x, y in loader", "for (x, y), _ in zip(loader, test)", "give the count"),
        ("        loss = F", "        x = x[:1]\n        loss = F", "give the count"),
        ("session = lockstep.session", "session = lockstep.launch", "one line such as session = lockstep.session()"),
        ("import lockstep\n", "import lockstep\nfrom lockstep.data import digits\n", "imports a part of lockstep"),
        ("model, optimizer, loader = session", "_ = session", "to the same variables"),
        ("for epoch in session.epochs(2):", "for epoch in session.epochs(2:", "is not Python"),
        ("    correct = 0", "    rank = 0", "uses the name rank"),
        ("    correct = 0", "    moved = 0", "defines moved"),
        ("    correct = 0", "    print(session)", "session is passed on"),
        ("    correct = 0", "    lockstep.launch(1)", "it uses lockstep.launch"),
        (
            "    correct = 0",
            "    def save(net):\n        torch.save(net.state_dict(), 'x.pt')\n    save(model)",
            "save uses net.state_dict, which a wrapper hides",
        ),
    ],
)
def test_a_line_without_plain_form_is_named(old: str, new: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refused:
        loop.eject_loop(tmp_path / "train.py", LOOP.replace(old, new))
    assert reason in str(refused.value)


def test_a_function_above_the_session_uses_the_inner_model(tmp_path: Path) -> None:
    above = "def save():\n    torch.save(model.state_dict(), 'x.pt')\n\n\nsession ="
    assert "torch.save(model.module.state_dict()" in loop.eject_loop(
        tmp_path / "train.py", LOOP.replace("session =", above, 1)
    )


def test_parts_of_a_model_are_reached_before_and_after_it_is_wrapped(tmp_path: Path) -> None:
    head, opening, rest = LOOP.partition("session =")
    rest = rest.replace("optimizer =", "model.head = nn.Linear(8, 2)\noptimizer =", 1)
    rest = rest.replace("    correct = 0", "    model.head.train()\n    correct = 0")
    script = f"{head}def main():\n{textwrap.indent(opening + rest, '    ')}\n\nmain()\n"
    ejected = loop.eject_loop(tmp_path / "train.py", script)
    assert "    model.head = nn" in ejected
    assert "model.module.head.train()" in ejected


def test_the_ways_are_those_of_eject() -> None:
    """`examples/ways` holds what the command writes; `python -m tests.unit.test_eject` writes them anew."""
    for name, text in ways().items():
        assert (ROOT / "examples" / "ways" / name).read_text(encoding="utf-8") == text, name


def ways() -> dict[str, str]:
    table = json.loads((ROOT / "examples" / "ways" / "commands.json").read_text(encoding="utf-8"))
    return {name: verb.text(words) for name, words in table.items()}


if __name__ == "__main__":
    for name, text in ways().items():
        (ROOT / "examples" / "ways" / name).write_text(text, encoding="utf-8")

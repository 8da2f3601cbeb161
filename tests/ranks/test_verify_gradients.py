"""`lockstep verify gradients` as a person uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..command import command, refusal

CPU = ("--accelerator", "cpu")


def test_digits_on_two_devices_has_one_gradient_and_says_so(tmp_path: Path) -> None:
    done = command(tmp_path, "verify", "gradients", "digits", "--devices", 2, *CPU)
    assert done.code == 0, done
    assert done.err == ""
    assert "The same gradient within 1e-09: ddp. Another one by design, as said above: dp." in done.out
    assert "64 = 32 + 32" in done.out
    folder = tmp_path / "runs" / "digits-resnet8-gradients"
    check = json.loads((folder / "summary.json").read_text())["proof"]["gradients"]
    assert (check["outcome"], check["times"], check["tolerance"]) == ("holds", 8, "1e-09 relative")
    assert "ddp agrees within" in (folder / "proof.md").read_text()


def test_a_difference_exits_with_three_and_names_tensors_and_cause(tmp_path: Path) -> None:
    words = ("--devices", 2, "--batchnorm", "local", "--strategy", "ddp", "--output", "here", *CPU)
    done = command(tmp_path, "verify", "gradients", "digits", *words)
    assert done.code == 3, done
    assert "stem.0.weight" in done.out
    assert "because of" in done.out
    assert "local BatchNorm: each replica normalises by the statistics of its own share" in done.out
    (said,) = done.err.splitlines()
    assert "ddp differs by" in said
    assert "(local BatchNorm): not the gradient of one process. here/proof.md has the numbers." in said
    assert json.loads((tmp_path / "here" / "summary.json").read_text())["proof"]["gradients"]["outcome"] == "fails"


def test_a_step_of_ones_own_is_judged(tmp_path: Path) -> None:
    words = ("--model", "tests.judged:Plain", "--data", "tests.judged:vectors", "--batch", 12, "--devices", 2, *CPU)
    done = command(tmp_path, "verify", "gradients", *words, "--step", "tests.judged:mean_step", "--strategy", "ddp")
    assert done.code == 3, done
    assert "mean of means: ranks' means are averaged" in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "gradient"], "Unknown proof 'gradient': did you mean gradients?"),
        (["verify", "--devices", 2], "lacks what to verify"),
        (["verify", "gradients", "digits", "--devices", 1, *CPU], "--devices 1 leaves nothing to compare"),
        (["verify", "gradients", "digits", "--strategy", "single"], "--strategy single has one replica"),
        (["verify", "gradients", "digits", "--tolerance", "-1"], "--tolerance -1: give 0 or more"),
        (["verify", "gradients", "digits", "--tolerance"], "--tolerance lacks its value"),
        (["verify", "gradients", "digits", "--all=yes"], "--all takes no value"),
        (["verify", "gradients", "digits", "--step", "nowhere:step"], "--step nowhere:step: no module 'nowhere'"),
        (["verify", "gradients", "digits", "--step", "step"], "--step step: write module:attribute"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str], words: list[object], said: str) -> None:
    assert said in refusal(capsys, *words)

"""Nothing is written, made or tidied away through a link: whatever lies in a run's folder, what is outside stays.

What is tried is what a real run has left: a file that lockstep writes tomorrow is tried as well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from lockstep.checkpoint import Checkpoints
from lockstep.cli.main import main
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.errors import RequestError
from lockstep.launchers.rank import variables
from lockstep.monitor import failures, output
from lockstep.monitor.failures import Failure
from lockstep.runs import folders
from lockstep.verify import commands

from ..command import Ended, refusal, sentence

TRAIN = (
    *("train", "--data", f"{__name__}:data", "--model", "mlp", "--accelerator", "cpu", "--workers", 0, "--batch", 20),
    *("--precision", "fp32", "--log-every", 1, "--checkpoint-every", 1, "--ledger", "--output"),
)
FOLDERS = ("checkpoints", "failures", "output")


class _Scene:
    """What happens while a run goes on; the data set is where it comes by."""

    is_poisoned = False
    """Whether the loss is to be no number."""

    def __init__(self) -> None:
        self.happens: dict[str, Callable[[], None]] = {}

    def now(self, moment: str) -> None:
        """Have happen what is due at this moment."""
        self.happens.get(moment, lambda: None)()


scene = _Scene()


class _Samples(Dataset[tuple[torch.Tensor, int]]):
    classes = 4

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index:  # the first is looked at before the records are opened
            scene.now("under way")
        return torch.sin(torch.arange(8.0) * index) * (float("nan") if scene.is_poisoned else 1.0), index % 4


def data() -> tuple[_Samples, _Samples]:
    """Return the data of the runs here. The folder is the run's by now, and its records are about to be opened."""
    scene.now("as it begins")
    return _Samples(), _Samples()


def _resumed(folder: Path) -> int:
    return main([*map(str, TRAIN), str(folder), "--epochs", "2", "--resume", "auto"])


@pytest.fixture(autouse=True)
def _a_new_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "scene", _Scene())


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended well and then, taken up again, has failed."""
    folder = tmp_path_factory.mktemp("left") / "run"
    assert main([*map(str, TRAIN), str(folder), "--epochs", "1"]) == 0
    scene.is_poisoned = True
    assert _resumed(folder) == 1
    scene.is_poisoned = False
    assert {*FOLDERS, ".lock", "ledger.bin", "proof.md"} <= {path.name for path in folder.iterdir()}
    return folder


def _link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def _link_to_nothing(path: Path, outside: Path) -> None:
    path.symlink_to(outside.with_name("nothing"))


def _hard_link(path: Path, outside: Path) -> None:
    path.hardlink_to(outside)


def _pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


Plant = Callable[[Path, Path], None]


def _planted(path: Path, outside: Path, plant: Plant) -> None:
    """Put something else in the place of a file or folder; a copy of it is outside."""
    outside.mkdir()
    copy = outside / path.name
    if path.is_dir():
        shutil.copytree(path, copy, symlinks=True)
    else:
        shutil.copy2(path, copy)
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    plant(path, copy)


def _seen(folder: Path) -> dict[str, object]:
    """Return all that can be seen of what is in a folder, but for the number of a file's names."""
    found: dict[str, object] = {}
    for path in [folder, *folder.rglob("*")]:
        about = path.lstat()
        held = path.read_bytes() if path.is_file() else None
        found[str(path)] = (about.st_mode, about.st_uid, about.st_mtime_ns, held)
    return found


CASES = [
    *(("before", plant, False) for plant in (_link, _link_to_nothing, _hard_link, _pipe)),
    *(("as it begins", _link, True), ("as it begins", _hard_link, True), ("as it begins", _pipe, False)),
    ("under way", _link, False),
]


@pytest.mark.parametrize(
    ("moment", "plant", "ends_badly"), CASES, ids=[f"{moment}{plant.__name__}-{bad}" for moment, plant, bad in CASES]
)
def test_a_run_changes_nothing_outside_its_folder(
    moment: str, plant: Plant, ends_badly: bool, left: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, path in enumerate(sorted(left.rglob("*"))):
        name = path.relative_to(left)
        if len(name.parts) > 2 or (plant is _hard_link and path.is_dir()):  # of a checkpoint, which is replaced whole
            continue
        outside, run = (tmp_path / str(number) / folder for folder in ("outside", "run"))
        shutil.copytree(left, run, symlinks=True)
        before: dict[str, object] = {}

        def happens(path: Path = run / name, outside: Path = outside, before: dict[str, object] = before) -> None:
            if not before:
                _planted(path, outside, plant)
                before.update(_seen(outside))

        scene.is_poisoned = ends_badly
        scene.happens = {moment: happens}
        scene.now("before")
        code = _resumed(run)
        told = capsys.readouterr().err
        assert before, name
        assert _seen(outside) == before, name
        if moment == "before" and plant is not _hard_link and name.parent.name != "checkpoints":
            assert code == 2, (name, told)
            what = "pipe" if plant is _pipe else "link"
            assert f"{name} cannot be written: it is a {what}" in sentence(Ended(code, "", told)), name
            assert not (run / name).is_file() or (run / name).is_symlink(), name


def _output(folder: Path) -> None:
    with output.kept(folder / "output" / "rank_0.txt", shown=False):
        os.write(1, b"a word")


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "the lock": (".lock", lambda folder: folders._locked(folder).close()),
    "output": ("output/rank_0.txt", _output),
    "a failure": (
        "failures/rank_0.txt",
        lambda folder: failures.write(Failure(0, "", "words", "trace"), folder / "failures"),
    ),
    "a checkpoint": ("checkpoints/.saving-0", lambda folder: Checkpoints(folder / "checkpoints", warn=print)),
    "a log": ("a.log", lambda folder: commands.run("a", [("true",)], [folder / "a.log"])),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_opened_late_or_elsewhere_is_no_link_either(writer: str, tmp_path: Path) -> None:
    name, write = WRITERS[writer]
    places = [(plant, Path(name)) for plant in (_link, _link_to_nothing, _hard_link)]
    places += [(plant, folder) for plant in (_link, _link_to_nothing) for folder in Path(name).parents[:-1]]
    for number, (plant, place) in enumerate(places):
        run, outside = (tmp_path / str(number) / folder for folder in ("run", "outside"))
        (run / name).parent.mkdir(parents=True)
        (run / name).write_text("a file of somebody's")
        _planted(run / place, outside, plant)
        before = _seen(outside)
        with contextlib.suppress(OSError):
            write(run)
        assert _seen(outside) == before, (plant, place)


def test_a_proof_changes_nothing_outside_the_runs_folder(left: Path, tmp_path: Path) -> None:
    for number, plant in enumerate((_link, _link_to_nothing, _hard_link)):
        for name in ("summary.json", "proof.md"):
            outside, run = (tmp_path / f"{number}{name}" / folder for folder in ("outside", "run"))
            run.parent.mkdir()
            shutil.copytree(left, run, symlinks=True)
            _planted(run / name, outside, plant)
            before = _seen(outside)
            main(["verify", "run", str(run)])
            assert _seen(outside) == before, (plant, name)


def test_a_submitted_job_writes_through_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for program in ("sbatch", "scontrol"):  # which refuse whatever they are given
        (tmp_path / program).symlink_to("/bin/false")
    for name, words in (("submit.sh", "sbatch refused the job"), ("slurm-1.out", "it is a link")):
        run, outside = tmp_path / name, tmp_path / f"{name} outside"
        run.mkdir()
        (run / name).write_text("mine")
        _planted(run / name, outside, _link)
        before = _seen(outside)
        assert words in refusal(capsys, "submit", "slurm", "digits", "--output", run)
        assert _seen(outside) == before


def test_the_variants_of_a_curve_are_written_through_no_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("single", "single.log", "curve.toml"):
        (tmp_path / name / "out").mkdir(parents=True)
        (tmp_path / name / "out" / name).symlink_to(tmp_path)
        told = refusal(capsys, "verify", "curve", "digits", "--model", "mlp", "--output", tmp_path / name / "out")
        assert f"out/{name} cannot be written: it is a link" in told
        assert [path.name for path in (tmp_path / name / "out").iterdir()] == [name]


def test_the_folder_that_the_user_names_may_be_a_link(left: Path, tmp_path: Path) -> None:
    shutil.copytree(left, tmp_path / "elsewhere", symlinks=True)
    (tmp_path / "run").symlink_to("elsewhere")
    assert _resumed(tmp_path / "run") == 0
    assert "best" in {path.name for path in (tmp_path / "elsewhere" / "checkpoints").iterdir()}


def test_compiled_code_is_kept_where_nobody_else_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = override(RunConfig(), compile=True, accelerator="cpu")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"lockstep-{os.geteuid()}"
    for named in ("", "/a/folder"):  # the second is the user's own choice
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if named:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
        assert (os.environ | variables(config))["TORCHINDUCTOR_CACHE_DIR"] == (named or f"{own}/compiled")
    assert own.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    own.chmod(0o755)
    with pytest.raises(RequestError, match=rf"^--compile keeps its code in {own}, .*TORCHINDUCTOR_CACHE_DIR"):
        variables(config)
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(RequestError, match=r"^--compile keeps its code in "):
        variables(config)

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
from lockstep.record import checks
from lockstep.record.checks import Check
from lockstep.runs import folders
from lockstep.verify import commands

from ..command import refusal

TRAIN = (
    *("train", "--data", f"{__name__}:data", "--model", "mlp", "--accelerator", "cpu", "--workers", "0"),
    *("--batch", "20", "--precision", "fp32", "--log-every", "1", "--checkpoint-every", "1", "--ledger", "--output"),
)


under_way: Callable[[], None] | None = None
"""What happens while samples are read, once."""


class _Samples(Dataset[tuple[torch.Tensor, int]]):
    classes = 4

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        global under_way
        if index and under_way:  # the first sample is looked at before the records are opened
            under_way()
            under_way = None
        return torch.sin(torch.arange(8.0) * index), index % 4


def data() -> tuple[_Samples, _Samples]:
    return _Samples(), _Samples()


def _resumed(folder: Path) -> int:
    return main([*TRAIN, str(folder), "--epochs", "2", "--resume", "auto"])


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended well."""
    folder = tmp_path_factory.mktemp("left") / "run"
    assert main([*TRAIN, str(folder), "--epochs", "1"]) == 0
    assert {"checkpoints", "output", ".lock", "proof.md"} <= {path.name for path in folder.iterdir()}
    return folder


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, outside: path.symlink_to(outside),
    "link to nothing": lambda path, outside: path.symlink_to(outside.with_name("nothing")),
    "pipe": lambda path, outside: os.mkfifo(path),
}


def _planted(path: Path, outside: Path, plant: str) -> None:
    """Put something else in the place of a file or folder; a copy of it is outside."""
    outside.mkdir()
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.copytree(path, outside / path.name, symlinks=True) if path.is_dir() else shutil.copy2(path, outside)
    shutil.rmtree(path) if is_folder else path.unlink()
    PLANTS[plant](path, outside / path.name)


def _seen(folder: Path) -> dict[str, object]:
    """Return all that can be seen of what is in a folder, but for the number of a file's names."""
    found: dict[str, object] = {}
    for path in [folder, *folder.rglob("*")]:
        about = path.lstat()
        held = path.read_bytes() if path.is_file() else None
        found[str(path)] = (about.st_mode, about.st_uid, about.st_mtime_ns, held)
    return found


@pytest.mark.parametrize("plant", [*PLANTS, "link, under way"])
def test_a_run_changes_nothing_outside_its_folder(
    plant: str, left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, is_late = plant.partition(",")[0], "under way" in plant
    for number, path in enumerate(sorted(left.rglob("*"))):
        name = path.relative_to(left)
        if len(name.parts) > 2:  # of a checkpoint, which is replaced whole
            continue
        outside, run = (tmp_path / str(number) / folder for folder in ("outside", "run"))
        shutil.copytree(left, run, symlinks=True)
        before: dict[str, object] = {}

        def happens(path: Path = run / name, outside: Path = outside, before: dict[str, object] = before) -> None:
            _planted(path, outside, kind)
            before.update(_seen(outside))

        if is_late:
            monkeypatch.setitem(globals(), "under_way", happens)
        else:
            happens()
        code, told = _resumed(run), capsys.readouterr().err
        assert "Traceback" not in told
        assert before, name
        assert _seen(outside) == before, name
        if not is_late and len(name.parts) == 1:
            assert (code, f"{name} cannot be written: it is a {kind.split()[0]}" in told) == (2, True), (name, told)


def _output(folder: Path) -> None:
    with output.logged_to_file(folder / "output" / "rank_0.txt", shown=False):
        os.write(1, b"a word")


CHECK = Check(name="a", claim="A claim", outcome=Check.HOLDS)
WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "the lock": (".lock", lambda folder: folders._acquire_lock(folder).release()),
    "output": ("output/rank_0.txt", _output),
    "a failure": (
        "failures/rank_0.txt",
        lambda folder: failures.write(Failure(0, "", "words", "trace"), folder / "failures"),
    ),
    "a checkpoint": ("checkpoints/.saving-0", lambda folder: Checkpoints(folder / "checkpoints", warn=print)),
    "a log": ("a.log", lambda folder: commands.run("a", [("true",)], [folder / "a.log"])),
    "a summary": ("summary.json", lambda folder: checks.add(folder, [CHECK])),
    "a proof": ("proof.md", lambda folder: checks.add(folder, [CHECK])),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_opened_late_or_elsewhere_is_no_link_either(writer: str, tmp_path: Path) -> None:
    name, write = WRITERS[writer]
    places = [(plant, Path(name)) for plant in ("link", "link to nothing")]
    places += [(plant, folder) for plant in ("link", "link to nothing") for folder in Path(name).parents[:-1]]
    for number, (plant, place) in enumerate(places):
        run, outside = (tmp_path / str(number) / folder for folder in ("run", "outside"))
        (run / name).parent.mkdir(parents=True)
        (run / name).write_text("{}")
        _planted(run / place, outside, plant)
        before = _seen(outside)
        with contextlib.suppress(OSError):
            write(run)
        assert _seen(outside) == before, (plant, place)


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
        _planted(run / name, outside, "link")
        before = _seen(outside)
        assert words in refusal(capsys, "submit", "slurm", "digits", "--output", run)
        assert _seen(outside) == before


def test_the_variants_of_a_curve_are_written_through_no_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("single", "single.log"):
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

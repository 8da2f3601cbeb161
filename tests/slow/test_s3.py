"""A run's copy in S3: of a server of this host, through the command."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.runs.remote import Store

from ..command import command, end, events, losses, sentence, start, until
from ..needs import need
from ..ports import free_port

TRAIN = (
    *("train", "digits", "--model", "mlp", "--devices", "2", "--accelerator", "cpu", "--log-every", "1"),
    *("--checkpoint-every", "5"),
)
URL = "s3://bucket/some/run"


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    need([name for name in ("s3fs", "moto", "flask", "flask_cors") if importlib.util.find_spec(name) is None])
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        Store("s3://bucket").files.mkdir("")
        yield
    server.stop()


def test_a_killed_run_goes_on_from_s3_on_another_machine(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    store = Store(URL)
    with start(tmp_path / "a", *TRAIN, "--epochs", 1000, "--output", URL, "--keep", 3) as process:
        until(lambda: store.target("last") > "step-00000020")
        process.kill()
        end(process)
    step = int(store.target("last").removeprefix("step-"))
    names = [name for name in store.names("checkpoints") if name.startswith("step")]
    assert f"step-{step:08}" in names
    words = ("--epochs", 1000, "--max-steps", step + 7)
    ended = command(tmp_path / "b", *TRAIN, *words, "--resume", URL)
    assert ended.code == 0, ended.err
    assert command(tmp_path / "c", *TRAIN, *words, "--output", "run").code == 0
    there = tmp_path / "b" / "runs" / "s3.bucket.some.run"
    assert [row["first_step"] for row in events(there, "start")] == [0, step]
    assert losses(there) == losses(tmp_path / "c" / "run")
    assert store.target("last") == f"step-{step + 7:08}"
    assert store.files.cat_file("steps.jsonl") == (there / "steps.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("url", "env", "words"),
    [
        ("s3://no-bucket/run", {}, "s3://no-bucket/run cannot be used"),
        (URL, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}, f"{URL} cannot be used"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_refused(tmp_path: Path, url: str, env: dict[str, str], words: str) -> None:
    assert words in sentence(command(tmp_path, *TRAIN, "--output", url, **env))

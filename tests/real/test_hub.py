"""A run's folder for the Hugging Face Hub, and its upload to an endpoint on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import main
from lockstep.runs import hub

from ..command import ROOT
from ..needs import need

pytestmark = pytest.mark.slow
RUN = ROOT / "tests" / "golden" / "run"
STEP = 8
HUB, MODEL = "hub", "model.safetensors"
WEIGHTS = (RUN / "checkpoints" / "step-00000008" / "model.safetensors").read_bytes()


def setup_module() -> None:
    need([] if find_spec("huggingface_hub") else ["huggingface_hub"])


def test_a_folder_has_the_weights_and_a_card_that_the_hub_reads(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard
    from safetensors.torch import load_file

    hub.write_folder(RUN, tmp_path / "model", WEIGHTS, STEP)
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["README.md", "model.safetensors"]
    assert load_file(tmp_path / "model" / "model.safetensors")
    card = ModelCard.load(tmp_path / "model" / "README.md")
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    summary = json.loads((RUN / "summary.json").read_text())
    assert scores == {"accuracy": summary["test"]["top1"], "loss": summary["test"]["loss"]}
    assert "| 8 | 0.6111 | 0.9750 | 1.9088 | 360 |" in card.text
    assert "Each epoch and each evaluation held each sample exactly once | **holds**" in card.text
    assert 'optimizer = "sgd"' in card.text
    assert "data-dir" not in card.text  # nor any other path of this machine
    with pytest.raises(FileExistsError):
        hub.write_folder(RUN, tmp_path / "model", WEIGHTS, STEP)
    hub.write_folder(RUN, tmp_path / "other", WEIGHTS, STEP - 4)
    assert ModelCard.load(tmp_path / "other" / "README.md").data.eval_results is None  # of other weights


def test_a_run_is_exported_to_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    run = tmp_path / "run"
    words = ("train", "digits", "--model", "mlp", "--max-steps", "2", "--devices", "1", "--accelerator", "cpu")
    assert main([*words, "--quiet", "--output", str(run)]) == 0
    assert main(["export", str(run), "--to", "hub"]) == 0
    assert "largest difference from the model 0," in capsys.readouterr().out
    saved, exported = load_file(run / "checkpoints" / "last" / "model.safetensors"), load_file(run / HUB / MODEL)
    assert all((exported[name] == tensor).all() for name, tensor in saved.items())
    assert "The weights are those of step 2 of 2." in (run / HUB / "README.md").read_text()
    assert main(["export", str(run), "--to", "hub"]) == 2  # the folder is there


@contextmanager
def endpoint() -> Iterator[tuple[str, dict[str, bytes], list[Any]]]:
    """Yield an endpoint's URL, the files that are committed there, and the repositories that are made."""
    files: dict[str, bytes] = {}
    made: list[Any] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path.endswith("/repos/create"):
                made.append(json.loads(body))
                self.answer({"url": f"{url}/someone/digits"})
            elif "/preupload/" in self.path:
                names = [file["path"] for file in json.loads(body)["files"]]
                self.answer(
                    {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
                )
            elif "/commit/" in self.path:
                for value in (json.loads(line)["value"] for line in body.splitlines() if b'"file"' in line):
                    files[value["path"]] = base64.b64decode(value["content"])
                self.answer({"commitUrl": f"{url}/someone/digits/commit/1", "commitOid": "1"})
            else:
                self.answer({})

        def do_GET(self) -> None:
            self.answer({})

        def answer(self, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield url, files, made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_folder_is_pushed_to_the_endpoint_of_the_environment(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    hub.write_folder(RUN, folder, WEIGHTS, STEP)
    words = [sys.executable, "-c", f"from lockstep.runs import hub; print(hub.push({folder!r}, 'someone/digits'))"]
    words[2] = f"from pathlib import Path, PosixPath; {words[2]}"
    with endpoint() as (url, files, made):
        env = os.environ | {"HF_ENDPOINT": url, "HF_TOKEN": "a-token", "HF_HOME": str(tmp_path)}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.startswith(url)) == (0, True), done.stderr
    assert [(repo["name"], repo["organization"], repo["visibility"]) for repo in made] == [
        ("digits", "someone", "private")
    ]
    assert files == {file.name: file.read_bytes() for file in folder.iterdir()}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert "is written, and not pushed to someone/digits: " in done.stderr  # its server is gone

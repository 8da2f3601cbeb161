"""The ray launcher on a real cluster: nodes on loopback addresses of this host, each with a processor to give."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ..command import CODE, command, end, gone, losses, processes, refusal, sentence, start, until, weights
from ..ports import free_port

pytestmark = pytest.mark.long
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(
    not HAS_RAY and os.environ.get("CI") != "true", reason="Ray is not installed: pip install 'lockstep-torch[ray]'"
)
DIGITS = ("train", "digits", "--model", "resnet8", "--accelerator", "cpu", "--launcher", "ray", "--batch", 50)
_RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1", "--disable-usage-stats")
_MEMORY_BYTES = 100_000_000  # the least object store that Ray takes is 75 MB
_UP_S = 60.0
_LOST_S = 40.0  # Ray gives up a node whose processes are gone within seconds; a machine under load takes longer


@dataclass
class Cluster:
    """A head and further nodes, each a `ray start` with all that it started."""

    folder: Path
    port: int = field(default_factory=free_port)
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """What RAY_ADDRESS takes."""
        return f"127.0.0.2:{self.port}"

    def add(self) -> subprocess.Popen[bytes]:
        """Start one more node, at an address of its own."""
        address = f"127.0.0.{len(self.nodes) + 2}"
        head = ("--head", "--port", str(self.port), "--include-dashboard", "false", "--temp-dir", str(self.folder))
        joins = ("--address", self.address) if self.nodes else head
        ports = ("--min-worker-port", "0", "--max-worker-port", "0", "--ray-client-server-port", str(free_port()))
        words = (
            "--node-ip-address",
            address,
            "--object-store-memory",
            str(_MEMORY_BYTES),
            *ports[: None if not self.nodes else 4],
        )
        log = (self.folder / f"{address}.log").open("wb")
        with log:
            node = subprocess.Popen([*_RAY, *joins, *words], stdout=log, stderr=log, start_new_session=True)
        self.nodes.append(node)
        until(lambda: b"Ray runtime started" in Path(log.name).read_bytes() or node.poll() is not None, _UP_S)
        assert node.poll() is None, Path(log.name).read_text()
        return node

    def processes(self, node: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Return a node's processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(node.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def lose(self, node: subprocess.Popen[bytes]) -> None:
        """Kill all of a node at once."""
        for each in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        node.wait()

    def ranks(self, descriptors: int | None = None) -> list[psutil.Process]:
        """Return the processes of ranks; rank 0's has one descriptor more, the socket that it listens at."""
        found = []
        for each in (each for node in self.nodes for each in self.processes(node)):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = each.cmdline()
                if any("lockstep.launchers.ray_actor" in word for word in words):
                    found += [each] if descriptors in (None, len(words) - 3) else []
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes. Ray's sockets need a short path."""
    if not HAS_RAY:
        pytest.fail("Ray is not installed: pip install 'lockstep-torch[ray]'")
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    made = Cluster(folder)
    # Whether Ray asks for a token by itself differs between its versions, and between a head and those that join it.
    kept = pytest.MonkeyPatch()
    kept.setenv("RAY_AUTH_MODE", "token")
    kept.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        made.add()
        made.add()
        yield made
    finally:
        for node in made.nodes:
            made.lose(node)
        kept.undo()
        shutil.rmtree(folder, ignore_errors=True)


@needs_ray
def test_a_cluster_of_our_own_listens_on_loopback_alone(tmp_path: Path) -> None:
    """Before the tests' own cluster is there, which would be joined."""
    words = (*DIGITS, "--epochs", 1000, "--devices", 2, "--log-every", 1, "--output", "run")
    with start(tmp_path, *words, RAY_ADDRESS="") as driver:
        until(lambda: len(losses(tmp_path / "run")) > 1)
        found = processes(driver)
        assert {"gcs_server", "raylet"} <= {each.name() for each in found}
        listening = [held for each in found for held in each.net_connections("tcp") if held.status == "LISTEN"]
        assert {held.laddr.ip.removeprefix("::ffff:") for held in listening} == {"127.0.0.1"}
        driver.send_signal(signal.SIGTERM)
        ended = end(driver)
        until(lambda: gone(found), 10)
    assert ended.code == 75, ended.err


@needs_ray
def test_two_nodes_train_the_bits_that_two_processes_train(cluster: Cluster, tmp_path: Path) -> None:
    words = (*DIGITS, "--max-steps", 8, "--nodes", 2, "--devices", 1, "--output", "ray")
    ended = command(tmp_path, *words, RAY_ADDRESS=cluster.address)
    assert ended.code == 0, ended.err
    # Rank 0's output as it is, of no other rank, and nothing of Ray's.
    assert ended.out.startswith("global batch 50 = 2 ranks × 1 micro-batch × 25\nstrategy ddp, launcher ray, 2 × cpu")
    assert ended.out.count("global batch") == 1
    assert ended.err == ""
    here = (*DIGITS, "--max-steps", 8, "--launcher", "spawn", "--devices", 2, "--output", "spawn")
    assert command(tmp_path, *here).code == 0
    assert losses(tmp_path / "ray") == losses(tmp_path / "spawn")
    assert weights(tmp_path / "ray") == weights(tmp_path / "spawn")
    until(lambda: not cluster.ranks(), 10)


@needs_ray
@pytest.mark.parametrize("victim", ["rank", "actor"])
def test_a_rank_that_dies_is_named_with_its_node_and_nobody_is_left(
    cluster: Cluster, tmp_path: Path, victim: str
) -> None:
    words = (*DIGITS, "--epochs", 1000, "--nodes", 2, "--checkpoint-every", 5, "--output", "run")
    with start(tmp_path, *words, RAY_ADDRESS=cluster.address) as process:
        until(lambda: len(losses(tmp_path / "run")) > 10)
        (rank,) = cluster.ranks(descriptors=2)
        ranks = cluster.ranks()
        assert len(ranks) == 2
        killed_s = time.monotonic()
        (rank if victim == "rank" else psutil.Process(rank.ppid())).kill()
        ended = end(process, 60)
        took_s = time.monotonic() - killed_s
    how = "was killed by SIGKILL" if victim == "rank" else "died "
    told = sentence(ended, code=1)
    assert re.match(rf"Rank 1 on node 127\.0\.0\.[23] (\(\S+\) )?{how}", told), told
    assert told.endswith("continue with --resume auto.")
    assert took_s < 20
    until(lambda: gone(ranks), 5)
    again = command(tmp_path, *words, "--resume", "auto", "--max-steps", 40, RAY_ADDRESS=cluster.address)
    assert again.code == 0, again.err


@needs_ray
def test_a_stop_saves_and_leaves_nobody(cluster: Cluster, tmp_path: Path) -> None:
    words = (*DIGITS, "--epochs", 1000, "--nodes", 2, "--output", "run")
    with start(tmp_path, *words, RAY_ADDRESS=cluster.address) as process:
        until(lambda: len(losses(tmp_path / "run")) > 2)
        ranks = cluster.ranks()
        process.send_signal(signal.SIGTERM)
        ended = end(process, 60)
    assert re.match(r"Stopped on request at step \d+ of .* and saved; continue", sentence(ended, code=75))
    assert (tmp_path / "run" / "checkpoints" / "last").is_dir()
    until(lambda: gone(ranks), 5)


_BESIDE = """
import pathlib, subprocess, sys, time
from lockstep.config import RunConfig
from lockstep.launchers.table import launch
from lockstep.options import override

def entry(config, world):
    world.barrier()
    if world.rank == 1:
        raise ValueError("labels reach 10")
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(config.data.dir / "program").write_text(str(program.pid))
    time.sleep(600)

if __name__ == "__main__":
    launch(entry, override(RunConfig(), accelerator="cpu", launcher="ray", nodes=2, data_dir=pathlib.Path.cwd()))
"""


@needs_ray
def test_a_rank_that_does_not_answer_ends_with_the_program_that_it_has_started(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text(_BESIDE)
    env = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": CODE, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "beside.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert "labels reach 10" in ended.stderr
    program = int((tmp_path / "program").read_text())
    until(lambda: not psutil.pid_exists(program) or psutil.Process(program).status() == psutil.STATUS_ZOMBIE, 5)


@needs_ray
@pytest.mark.parametrize("asked", [("--nodes", 3), ("--devices", 2)])
def test_what_the_cluster_cannot_give_is_refused(cluster: Cluster, tmp_path: Path, asked: tuple[str, int]) -> None:
    ended = command(tmp_path, *DIGITS, *asked, "--timeout", 3, "--output", "run", RAY_ADDRESS=cluster.address)
    told = sentence(ended)
    assert "within --timeout 3 s; its cluster has 2 nodes (CPUs: 1, 1), and 2 CPUs are free" in told
    assert ("1 CPU on each of 3 nodes" if asked[0] == "--nodes" else "2 CPUs on 1 node") in told
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@needs_ray
def test_a_rank_of_several_devices_takes_as_many_processors(cluster: Cluster, tmp_path: Path) -> None:
    words = (*DIGITS, "--strategy", "hybrid", "--nodes", 2, "--devices", 1, "--max-steps", 2, "--output", "run")
    ended = command(tmp_path, *words, RAY_ADDRESS=cluster.address)
    assert ended.code == 0, ended.err
    assert "strategy hybrid, launcher ray, 2 × cpu" in ended.out
    refused = command(tmp_path, *words, "--devices", 2, "--timeout", 3, RAY_ADDRESS=cluster.address)
    assert "2 CPUs on each of 2 nodes" in sentence(refused)


@needs_ray
def test_ranks_on_two_nodes_are_examined(cluster: Cluster, tmp_path: Path) -> None:
    words = ("doctor", "--launcher", "ray", "--nodes", 2, "--devices", 1, "--json")
    ended = command(tmp_path, *words, RAY_ADDRESS=cluster.address)
    assert ended.code == 0, ended
    told = json.loads(ended.out)
    assert told["ranks"] == 2
    assert {each["name"]: each["state"] for each in told["findings"]}["rank to rank"] == "green"


@needs_ray
def test_a_node_that_is_lost_is_named(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.add()
    address = f"127.0.0.{len(cluster.nodes) + 1}"
    with start(
        tmp_path, *DIGITS, "--epochs", 1000, "--nodes", 3, "--output", "run", RAY_ADDRESS=cluster.address
    ) as process:
        until(lambda: len(losses(tmp_path / "run")) > 2)
        ranks = cluster.ranks()
        assert len(ranks) == 3
        cluster.lose(node)
        ended = end(process, _LOST_S)
    told = sentence(ended, code=1)
    assert re.match(rf"Rank \d on node {re.escape(address)} ", told), told
    until(lambda: gone(ranks), 10)


@needs_ray
@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        ((), {"RAY_ADDRESS": "127.0.0.1:1"}, "RAY_ADDRESS is 127.0.0.1:1, and no Ray cluster answers there"),
        ((), {"RAY_ADDRESS": "ray://127.0.0.1:10001"}, "takes HOST:PORT or auto"),
        ((), {"RANK": "0", "WORLD_SIZE": "2"}, "another program, such as torchrun, has started 2 ranks"),
        (("--world-size", 2), {}, "--launcher ray starts its ranks itself: --world-size 2 belongs to"),
        (("--strategy", "dp", "--devices", 2), {"RAY_ADDRESS": ""}, "--strategy dp is one process"),
    ],
)
def test_what_ray_cannot_honour_is_refused(
    tmp_path: Path, words: tuple[object, ...], env: dict[str, str], told: str, request: pytest.FixtureRequest
) -> None:
    if env == {"RAY_ADDRESS": ""}:  # one that needs the cluster to know
        env = {"RAY_ADDRESS": request.getfixturevalue("cluster").address}
    assert told in sentence(command(tmp_path, *DIGITS, *words, **env))


def test_where_ray_is_missing_its_installation_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    told = refusal(capsys, *DIGITS)
    assert told.endswith("install it on every node: pip install 'lockstep-torch[ray]'.")
    assert "Ray chooses each rank's GPUs" in refusal(capsys, "train", "digits", "--launcher", "ray", "--gpus", "0")

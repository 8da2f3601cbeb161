"""The ray launcher on a real cluster: nodes on loopback addresses of this host, each with a processor to give."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ..command import GATED, command, end, gone, losses, refusal, sentence, start, until, weights
from ..needs import need
from ..ports import free_port
from .test_script import are_alike, check_failed_once, looped

pytestmark = pytest.mark.long
RAY = (*GATED, "--launcher", "ray")
ENDLESS = ("--epochs", 10**6)
_START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1", "--disable-usage-stats")
_SMALL = ("--object-store-memory", "100000000", "--min-worker-port", "0", "--max-worker-port", "0")


def _tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    return []


@dataclass
class Cluster:
    """A head and further nodes, each a `ray start` with all that it started."""

    folder: Path
    port: int = field(default_factory=free_port)
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        return {"RAY_ADDRESS": f"127.0.0.2:{self.port}"}

    def add(self) -> subprocess.Popen[bytes]:
        """Start one more node, at an address of its own."""
        address = f"127.0.0.{len(self.nodes) + 2}"
        words = ["--node-ip-address", address, *_SMALL]
        if self.nodes:
            words += ["--address", self.env["RAY_ADDRESS"]]
        else:
            words += ["--head", "--port", str(self.port), "--include-dashboard", "false"]
            words += ["--temp-dir", str(self.folder), "--ray-client-server-port", str(free_port())]
        log = self.folder / f"{address}.log"
        with log.open("wb") as file:
            node = subprocess.Popen([*_START, *words], stdout=file, stderr=file, start_new_session=True)
        self.nodes.append(node)
        until(lambda: b"Ray runtime started" in log.read_bytes() or node.poll() is not None, 60)
        assert node.poll() is None, log.read_text()
        return node

    @staticmethod
    def lose(node: subprocess.Popen[bytes]) -> None:
        """Kill all of a node at once."""
        for each in _tree(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        node.wait()

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of ranks, rank 0 first."""
        found = {}
        for each in (each for node in self.nodes for each in _tree(node)):
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = each.parent()
                started_by = " ".join(parent.cmdline()) if parent is not None else ""
                if parent is not None and "launchers.ray" in started_by and "spawn_main" in " ".join(each.cmdline()):
                    found[each] = parent.create_time()
        return sorted(found, key=lambda each: found[each])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes."""
    need(["ray"] if importlib.util.find_spec("ray") is None else [])
    made = Cluster(Path(tempfile.mkdtemp(prefix="ray", dir="/tmp")))  # a short path, for Ray's sockets
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
        shutil.rmtree(made.folder, ignore_errors=True)


def test_two_nodes_train_the_bits_that_two_processes_train(cluster: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    ended = command(tmp_path, *RAY, "--nodes", 2, "--devices", 1, **cluster.env)
    assert ended.code == 0, ended.err
    # Rank 0's output as it is, of no other rank, and nothing of Ray's.
    assert ended.out.startswith("global batch 16 = 2 ranks × 1 micro-batch × 8\nstrategy ddp, launcher ray, 2 × cpu")
    assert (ended.out.count("global batch"), ended.err) == (1, "")
    assert losses(tmp_path / "run") == losses(undisturbed)
    assert weights(tmp_path / "run") == weights(undisturbed)
    until(lambda: not cluster.ranks(), 10)


def test_a_loop_of_the_users_own_is_one_model_and_tells_its_failure_once(cluster: Cluster, tmp_path: Path) -> None:
    path, alone = looped(tmp_path)
    ray = ("run", "--launcher", "ray", "--nodes", 2, "--devices", 1)
    ended = command(tmp_path, *ray, "train.py", "two", **cluster.env)
    assert ended.code == 0, ended.err
    assert are_alike(losses(tmp_path / "two"), alone)
    failed = command(tmp_path, *ray, "--output", "failed", "train.py", "-", "broken", **cluster.env)
    assert failed.code == 1
    check_failed_once(failed.err, path)


def test_a_driver_that_is_stopped_has_the_ranks_save(cluster: Cluster, tmp_path: Path) -> None:
    with start(tmp_path, *RAY, *ENDLESS, "--nodes", 2, **cluster.env) as driver:
        until(lambda: len(losses(tmp_path / "run")) > 1)
        driver.send_signal(signal.SIGTERM)
        told = sentence(end(driver), code=75)
    assert re.match(r"Stopped on request at step \d+ of .* and saved; continue", told)
    assert (tmp_path / "run" / "checkpoints" / "last").is_dir()
    until(lambda: not cluster.ranks(), 10)


def test_a_rank_that_is_killed_is_named_with_its_node_and_nobody_is_left(cluster: Cluster, tmp_path: Path) -> None:
    with start(tmp_path, *RAY, *ENDLESS, "--nodes", 2, "--workers", 1, **cluster.env) as process:
        until(lambda: len(losses(tmp_path / "run")) > 10)
        ranks = cluster.ranks()
        found = [each for one in ranks for each in (one, *one.children(recursive=True))]
        assert len(found) >= 4  # each has a data worker
        ranks[1].kill()
        told = sentence(end(process, 30), code=1)
    assert re.match(r"Rank \d on node 127\.0\.0\..* was killed by SIGKILL", told), told
    assert told.endswith('continue with --resume auto, or lockstep.session(…, resume="auto").')
    until(lambda: gone(found), 5)


def test_a_node_that_is_lost_is_named(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.add()
    address = f"127.0.0.{len(cluster.nodes) + 1}"
    with start(tmp_path, *RAY, *ENDLESS, "--nodes", 3, **cluster.env) as process:
        until(lambda: len(losses(tmp_path / "run")) > 2)
        ranks = cluster.ranks()
        assert len(ranks) == 3
        cluster.lose(node)
        # Ray gives up a node whose processes are gone within seconds; a machine under load takes longer.
        told = sentence(end(process, 40), code=1)
    assert re.match(rf"Rank \d on node {re.escape(address)} ", told), told
    until(lambda: gone(ranks), 10)


def test_what_the_cluster_cannot_give_is_refused_and_so_is_one_that_is_not_there(
    cluster: Cluster, tmp_path: Path
) -> None:
    told = sentence(command(tmp_path, *RAY, "--nodes", 4, "--timeout", 3, **cluster.env))
    assert "1 CPU on each of 4 nodes within --timeout 3 s" in told
    assert re.search(r"its cluster has \d nodes \(CPUs: 1, 1.*\), and \d CPUs are free", told)
    told = sentence(command(tmp_path, *RAY, RAY_ADDRESS="127.0.0.1:1"))
    assert "RAY_ADDRESS is 127.0.0.1:1, and no Ray cluster answers there" in told
    assert not (tmp_path / "run").exists()


def test_what_ray_cannot_honour_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refusal(capsys, *RAY).endswith("install it on every node: pip install 'lockstep-torch[ray]'.")
    assert "Ray chooses each rank's GPUs" in refusal(capsys, "train", "digits", "--launcher", "ray", "--gpus", "0")
    assert "--world-size 2 belongs to --launcher manual" in refusal(capsys, *RAY, "--world-size", 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "another program, such as torchrun, has started 2 ranks" in refusal(capsys, *RAY)

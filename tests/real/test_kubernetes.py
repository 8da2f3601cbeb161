"""The commands of a manifest's pods on hosts of their own, which get names as pods do: late, and first wrong ones."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli.main import main

from ..command import CODE, GATED, OPEN, Running, at, end, gate, until
from ..curves import apart, of_run
from .hosts import Host, hosts

NAME = "gated"
HOST = f"{NAME}-node-0-0.{NAME}"
GONE = "10.77.0.99"
"""The address of a pod that is no more."""


def _names(host: Host, address: str) -> None:
    """Have the host know the first pod by this address."""
    script = f"sed '/{HOST}/d' /etc/hosts > {host.name}.names && echo '{address} {HOST}' >> {host.name}.names"
    assert host.popen(["sh", "-c", f"{script} && cat {host.name}.names > /etc/hosts"], cwd=Path("/tmp")).wait() == 0


def _start(members: tuple[Host, ...], folder: Path, command: list[str]) -> list[Running]:
    assert command[0] == "lockstep"
    words = [sys.executable, "-m", "lockstep", *command[1:]]
    return [host.popen(words, {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": CODE}, cwd=folder) for host in members]


@pytest.mark.slow
def test_pods_find_each_other_save_when_one_is_evicted_and_continue(
    tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(CODE)
    job: tuple[Any, ...] = ("--kind", "jobset", "--job-name", NAME, "--nodes", 2, "--image", "it:1")
    words = (*job, "--volume", f"claim:{tmp_path}", *GATED[1:-1], tmp_path / "run")
    assert main(["submit", "kubernetes", *map(str, words)]) == 0
    (replicated,) = yaml.safe_load(capsys.readouterr().out)["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    gate(tmp_path, 10)
    with hosts(2) as pods:
        started = _start(pods, tmp_path, container["command"])
        time.sleep(4)
        for pod in pods:
            _names(pod, GONE)
        time.sleep(4)
        for pod in pods:
            _names(pod, pods[0].address)
        at(tmp_path, 10)
        os.kill(started[1].pid, signal.SIGTERM)
        gate(tmp_path, OPEN)
        stopped = [end(process) for process in started]
        assert [ended.code for ended in stopped] == [75, 75], stopped
        until(lambda: (tmp_path / "run" / "checkpoints" / "last").exists())
        finished = [end(process) for process in _start(pods, tmp_path, container["command"])]
    assert [ended.code for ended in finished] == [0, 0], finished
    assert apart(of_run(tmp_path / "run"), of_run(undisturbed)) < 1e-9

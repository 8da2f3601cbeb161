"""Hosts on one machine: network namespaces with names, addresses and networks of their own, joined by a switch.

    with hosts(3) as (a, b, c):
        training = b.lockstep(folder, "train", "digits")
        c.cut()

Each host has a name (a, b, c, …), an /etc/hosts, a boot id, one processor, and an interface `eth0` with the address
10.77.0.N (`eth1` with 10.77.1.N on a second network). Hosts share the machine's disk and see one another's processes,
which lockstep cannot use, since it compares boot ids. A host lives as long as its *keeper*, a shell that waits for this
process: when the `with` block ends, or this process is killed, it kills all processes of the host.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..command import CODE, Running
from ..needs import need

_OWN = ("--net", "--uts", "--mount")
_TOOLS = ("ip", "nft", "unshare", "nsenter", "taskset", "mount")
_KEEPER = r"""
set -e
cd /
hostname "$1"
ip link set lo up
if [ -n "$2" ]; then mount --bind "$2" /etc/hosts; mount --bind "$3" /proc/sys/kernel/random/boot_id; fi
echo ready
cat >/dev/null || true
here=$(readlink /proc/$$/ns/net)
for again in 1 2 3 4 5 6 7 8 9 10; do
  left=
  for process in /proc/[0-9]*; do
    id=${process#/proc/}
    if [ "$id" != $$ ] && [ "$(readlink $process/ns/net 2>/dev/null)" = "$here" ]; then
      kill -9 $id 2>/dev/null && left=1
    fi
  done
  [ -n "$left" ] || exit 0
  sleep 0.1
done
"""
"""Becomes the host. When its input ends, kills every process there, by id, until none is left."""


def missing() -> str:
    """Return why there can be no hosts here; "" where there can be."""
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not found (Debian: apt-get install iproute2 nftables util-linux)"
    return subprocess.run(["unshare", *_OWN, "true"], capture_output=True, text=True, check=False).stderr.strip()


@dataclass(frozen=True)
class _Namespace:
    """Namespaces of their own, and the keeper that holds them."""

    keeper: subprocess.Popen[str]

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in here, under the same process id."""
        return ["nsenter", f"--target={self.keeper.pid}", *_OWN, *command]

    def do(self, command: str) -> str:
        """Run a command of a few words to its end, and return its output; the command must not fail."""
        done = subprocess.run(self.inside(command.split()), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        """End all processes in here."""
        self.keeper.communicate("", timeout=20)


def _keeper(name: str, names: Path | None = None, boot: Path | None = None) -> subprocess.Popen[str]:
    """Return the keeper of new namespaces; the files stand in for /etc/hosts and the boot id."""
    words = ["unshare", *_OWN, "sh", "-c", _KEEPER, "keeper", name, str(names or ""), str(boot or "")]
    keeper = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "ready\n", f"{name}: its namespaces could not be made"
    return keeper


@dataclass(frozen=True)
class Host(_Namespace):
    """One host."""

    name: str
    address: str
    """On the first network."""
    processor: int
    switch: _Namespace
    started: list[Running] = field(default_factory=list)

    def popen(
        self, command: Sequence[object], env: Mapping[str, str] | None = None, *, cwd: Path, **options: Any
    ) -> Running:
        """Start a command here, with `env` added to this process's environment; its output goes to pipes."""
        where = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]
        bound = ["taskset", "--cpu-list", str(self.processor)]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        words = [*bound, *self.inside([*where, *map(str, command)])]
        process = Running(words, env={**os.environ, **(env or {})}, **{**piped, **options})
        self.started.append(process)
        return process

    def lockstep(self, folder: Path, *words: object) -> Running:
        """Start `python -m lockstep WORDS` here, on the CPU; all hosts share the folder."""
        command = [sys.executable, "-m", "lockstep", *words]
        return self.popen(command, {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": CODE}, cwd=folder)

    def cut(self) -> None:
        """Cut the host off from its first network: the interface stays, and nothing comes through."""
        self.switch.do(f"ip link set {self.name}0 nomaster")

    def filter(self, rule: str) -> None:
        """Add a firewall rule for incoming packets, in nft's words: `host.filter("tcp dport 29500 drop")`."""
        self.do("nft add table inet filter")
        self.do("nft add chain inet filter input { type filter hook input priority 0 ; }")
        self.do(f"nft add rule inet filter input {rule}")

    def sent_bytes(self, network: int) -> int:
        """Return how many bytes were sent through a network's interface."""
        lines = self.do("cat /proc/self/net/dev").splitlines()
        return next(int(line.split()[9]) for line in lines if line.split()[0] == f"eth{network}:")

    def close(self) -> None:
        """End all processes here, and the host."""
        super().close()
        for process in self.started:
            with process:  # which closes its pipes
                pass


@contextlib.contextmanager
def hosts(count: int, *, networks: int = 1) -> Iterator[tuple[Host, ...]]:
    """Make hosts that reach one another; end them, and all that was started there, when the block ends.

    Two programs may have hosts at once: their addresses are the same, and their switches know nothing of each other.
    """
    need([why] if (why := missing()) else [])
    names = [chr(ord("a") + number) for number in range(count)]
    processors = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as all_:
        switch = _Namespace(_keeper("switch"))
        all_.callback(switch.close)
        for network in range(networks):
            switch.do(f"ip link add net{network} type bridge")
            switch.do(f"ip link set net{network} up")
        made = []
        for number, name in enumerate(names, 1):
            known, boot = Path(folder) / f"{name}.hosts", Path(folder) / f"{name}.boot"
            # As Debian has it, a host's own name is an address of the loopback interface.
            lines = [f"10.77.0.{index} {other}\n" for index, other in enumerate(names, 1) if other != name]
            known.write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {name}\n{''.join(lines)}")
            boot.write_text(f"{uuid.uuid4()}\n")
            processor = processors[number % len(processors)]
            host = Host(_keeper(name, known, boot), name, f"10.77.0.{number}", processor, switch)
            all_.callback(host.close)
            made.append(host)
            for network in range(networks):
                card, port = f"eth{network}", f"{name}{network}"
                switch.do(f"ip link add {port} type veth peer name {card} netns {host.keeper.pid}")
                switch.do(f"ip link set {port} master net{network} up")
                host.do(f"ip address add 10.77.{network}.{number}/24 dev {card}")
                host.do(f"ip link set {card} up")
        yield tuple(made)

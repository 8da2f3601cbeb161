"""Hosts on one machine: network namespaces with names, addresses and networks of their own, joined by a switch.

    with hosts(3) as (a, b, c):
        a.run(["ping", "-c1", b.address])
        training = b.popen([sys.executable, "-m", "lockstep", "train", "digits"], cwd=folder)
        c.cut()

Each host has a hostname (a, b, c, …), an /etc/hosts, an identity of its boot, one processor, and an interface `eth0`
with the address 10.77.0.N (`eth1` with 10.77.1.N on a second network, and so on). They share the machine's disk and see
one another's processes, which lockstep cannot use: it compares boots. Nothing is made in the machine's own namespace,
and no packet leaves the switch.

A host lives as long as its *keeper*, a shell that waits for this process: when the `with` block ends, or this process
is killed, the keeper kills all that runs in the host, and the namespaces end with the last process in them.
"""

from __future__ import annotations

import contextlib
import functools
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

from ..command import Ended, Running, end

_TOOLS = ("ip", "tc", "nft", "unshare", "nsenter", "taskset", "mount")
_LIMIT_S = 120.0
_LEAVE_S = 20.0
_LOCALHOST = "127.0.0.1 localhost\n::1 localhost\n"
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
"""Becomes the host; when its input ends, ends whatever runs there, by id, until nothing does."""


@functools.cache
def missing() -> str:
    """Return why there can be no hosts here; "" where there can be."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not found (Debian: apt-get install iproute2 nftables util-linux)"
    tried = subprocess.run(["unshare", *_OWN, "true"], capture_output=True, text=True, check=False)
    return f"unshare: {tried.stderr.strip()}" if tried.returncode else ""


_OWN = ("--net", "--uts", "--mount")


@dataclass(frozen=True)
class _Namespace:
    """Namespaces of their own, and the keeper that holds them."""

    keeper: subprocess.Popen[str]

    @classmethod
    def named(cls, name: str, names: Path | None = None, boot: Path | None = None) -> _Namespace:
        """Return new namespaces with a hostname; the files stand in for /etc/hosts and the identity of the boot."""
        words = ["unshare", *_OWN, "sh", "-c", _KEEPER, "keeper", name, str(names or ""), str(boot or "")]
        keeper = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "ready\n", f"{name}: its namespaces could not be made"
        return cls(keeper)

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in here; the process is that command's own, so that ids hold."""
        return ["nsenter", f"--target={self.keeper.pid}", *_OWN, *command]

    def do(self, command: str) -> str:
        """Run a command to its end and return what it printed."""
        done = subprocess.run(self.inside(command.split()), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        """End all that runs in here."""
        self.keeper.communicate("", timeout=_LEAVE_S)


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host. Its first network is `eth0`, at `address`."""

    name: str
    number: int
    addresses: tuple[str, ...]
    """One for each network: eth0's, eth1's, …"""
    processor: int
    namespace: _Namespace
    switch: _Namespace
    names: Path
    """What stands for this host's /etc/hosts."""
    started: list[Running] = field(default_factory=list)
    wires: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def address(self) -> str:
        """The address of eth0."""
        return self.addresses[0]

    def popen(
        self,
        command: Sequence[object],
        env: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        **options: Any,
    ) -> Running:
        """Start a command here, with `env` added to this process's environment; its output goes to pipes."""
        where = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd or Path.cwd())]
        bound = ["taskset", "--cpu-list", str(self.processor)]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        process = Running(
            [*bound, *self.namespace.inside([*where, *map(str, command)])],
            env={**os.environ, **(env or {})},
            **{**piped, **options},
        )
        self.started.append(process)
        return process

    def run(
        self,
        command: Sequence[object],
        env: Mapping[str, str] | None = None,
        *,
        limit_s: float = _LIMIT_S,
        **options: Any,
    ) -> Ended:
        """Run a command here to its end."""
        return end(self.popen(command, env, **options), limit_s)

    def do(self, command: str) -> str:
        """Run a command of a few words, such as ip's, and return what it printed; it must not fail."""
        return self.namespace.do(command)

    def knows(self, **names: str) -> None:
        """Add lines to this host's /etc/hosts, before those that are there: `b.knows(master="127.0.1.1")`."""
        added = "".join(f"{address} {name}\n" for name, address in names.items())
        self.names.write_text(added + self.names.read_text())

    def cut(self, network: int = 0) -> None:
        """Part the host from a network, without a word: it still has its interface, and nothing comes through."""
        self.switch.do(f"ip link set {self._port(network)} nomaster")

    def join(self, network: int = 0) -> None:
        """Undo `cut`."""
        self.switch.do(f"ip link set {self._port(network)} master net{network}")

    def filter(self, rule: str) -> None:
        """Add a firewall's rule for what comes in, in nft's words: `host.filter("tcp dport 29500 drop")`."""
        self.do("nft add table inet filter")
        self.do("nft add chain inet filter input { type filter hook input priority 0 ; }")
        self.do(f"nft add rule inet filter input {rule}")

    def delay(self, ms: float, loss: float = 0.0, network: int = 0) -> None:
        """Hold back what leaves this host by `ms` milliseconds, and lose `loss` percent of it.

        The kernel's netem does it where it is built in or can be loaded; elsewhere a wire through this machine's user
        space, which is put in the place of the cable.
        """
        queue = f"tc qdisc replace dev eth{network} root netem delay {ms}ms loss {loss}%".split()
        tried = subprocess.run(self.namespace.inside(queue), capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return
        assert "kind is unknown" in tried.stderr, tried.stderr
        self.wires.enter_context(_wired(self, network, ms, loss))

    def sent_bytes(self, network: int = 0) -> int:
        """Return how many bytes have left by a network's interface."""
        lines = self.do("cat /proc/self/net/dev").splitlines()
        return next(int(line.split()[9]) for line in lines if line.split()[0] == f"eth{network}:")

    def close(self) -> None:
        """End all that runs here, and the host."""
        self.namespace.close()
        for process in self.started:
            with process:  # which takes leave of it and of its pipes
                pass
        self.wires.close()

    def _port(self, network: int) -> str:
        return f"{self.name}{network}"


@contextlib.contextmanager
def hosts(count: int, *, networks: int = 1) -> Iterator[tuple[Host, ...]]:
    """Make hosts that reach one another; end them, and all that was started there, when the block ends.

    Raises `RuntimeError` where there can be none (see `missing`). Two programs may have hosts at once: their addresses
    are the same, and their switches know nothing of each other.
    """
    if why := missing():
        raise RuntimeError(f"hosts: {why}")
    names = [chr(ord("a") + number) for number in range(count)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as all_:
        switch = _Namespace.named("switch")
        all_.callback(switch.close)
        for network in range(networks):
            switch.do(f"ip link add net{network} type bridge")
            switch.do(f"ip link set net{network} up")
        made = []
        for number in range(count):
            made.append(_host(Path(folder), switch, number, names, networks))
            all_.callback(made[-1].close)
        yield tuple(made)


def _host(folder: Path, switch: _Namespace, number: int, names: Sequence[str], networks: int) -> Host:
    name = names[number]
    lines, boot = folder / f"{name}.hosts", folder / f"{name}.boot"
    # Debian's habit, which every host here has: its own name is an address of the loopback interface.
    others = "".join(f"{_address(0, index)} {other}\n" for index, other in enumerate(names) if index != number)
    lines.write_text(f"{_LOCALHOST}127.0.1.1 {name}\n{others}")
    boot.write_text(f"{uuid.uuid4()}\n")
    processors = sorted(os.sched_getaffinity(0))
    host = Host(
        name=name,
        number=number,
        addresses=tuple(_address(network, number) for network in range(networks)),
        processor=processors[number % len(processors)],
        namespace=_Namespace.named(name, lines, boot),
        switch=switch,
        names=lines,
    )
    for network, address in enumerate(host.addresses):
        card, port = f"eth{network}", host._port(network)
        switch.do(f"ip link add {port} type veth peer name {card} netns {host.namespace.keeper.pid}")
        switch.do(f"ip link set {port} master net{network} up")
        host.do(f"ip address add {address}/24 dev {card}")
        host.do(f"ip link set {card} up")
    return host


def _address(network: int, number: int) -> str:
    return f"10.77.{network}.{number + 1}"


@contextlib.contextmanager
def _wired(host: Host, network: int, ms: float, loss: float) -> Iterator[None]:
    """Put a slow wire (see `wire.py`) between the host's interface and the switch; live connections go on over it."""
    card, port, address = f"eth{network}", host._port(network), host.addresses[network]
    wire = [sys.executable, str(Path(__file__).with_name("wire.py")), f"{ms}", f"{loss}"]
    process = subprocess.Popen(
        host.switch.inside(wire), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        near, far = process.stdout.readline().split()
        # The card keeps its hardware address, which the other hosts remember.
        known_by = host.do(f"ip -brief link show {card}").split()[2]
        host.switch.do(f"ip link delete {port}")
        host.switch.do(f"ip link set {near} netns {host.namespace.keeper.pid}")
        host.do(f"ip link set {near} name {card} address {known_by}")
        host.do(f"ip address add {address}/24 dev {card}")
        host.do(f"ip link set {card} up")
        host.switch.do(f"ip link set {far} name {port}")
        host.switch.do(f"ip link set {port} master net{network} up")
        yield
    finally:
        process.kill()
        process.communicate()

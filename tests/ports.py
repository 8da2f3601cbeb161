"""Ports for tests that have to name one before anybody listens there."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_port() -> int:
    """Return a port of the loopback interface on which nobody listens.

    It lies below those that the kernel hands out by itself, to whoever asks for any port or connects to another: so
    nobody gets it before the test does, and no client that tries it early is connected to itself. Each worker of
    pytest-xdist draws from ports of its own.
    """
    above = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.SystemRandom().randrange(_LOWEST + worker % workers, above, workers)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port

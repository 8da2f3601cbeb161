"""What all tests share: the tiers that the folders are, and how workers divide them."""

from __future__ import annotations

import os
import re
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from . import warm
from .command import GATED, command
from .pool import RankPool

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # threads that wait leave the cores to others; before torch is imported

# Whoever starts the tests in the background, or under nohup, has them and the commands they start ignore these.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

# No stall of a busy machine is a failure. What is drawn is the same in every run, or, with --hypothesis-profile slow,
# something new in each: a failure prints how to have it again.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", _PATIENT, derandomize=True, max_examples=30)
settings.register_profile("slow", _PATIENT, derandomize=False, print_blob=True)
settings.load_profile("steady")

_ALONE = ("test_slurm", "test_ray")
"""Files whose tests run on one worker, in their order: a second cluster beside theirs would be joined or disturb it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what CI asks for."""
    parser.addoption("--slice", metavar="K/N", type=_slice, help="of the slow tests, only the K-th part of N, from 0")


def _slice(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError(text)
    return int(found[1]), int(found[2])


def pytest_configure(config: pytest.Config) -> None:
    """Start ranks from a warm server; have the workers, which share the cores, compute in one thread each."""
    if sys.platform == "linux":
        warm.spawn_from(warm.server)
        config.add_cleanup(warm.close)
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before the workers' names of the groups are told
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the slice, and keep together what uses the same daemons."""
    for item in items:
        if item.nodeid.startswith("tests/slow/"):
            item.add_marker(pytest.mark.slow)
    if part := config.getoption("slice"):
        number, count = part  # by its name alone, so that a test stays in its slice whatever is added
        slow = [item for item in items if item.get_closest_marker("slow")]
        left_out = [item for item in slow if zlib.crc32(item.nodeid.encode()) % count != number]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.path.stem in _ALONE:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail where pytest-xdist loses the groups, as 3.8 does under pytest 9.2: two clusters would disturb each other."""
    if session.config.getoption("loadgroup", default=False):
        lost = [item.nodeid for item in session.items if item.get_closest_marker("xdist_group")]
        assert all("@" in nodeid for nodeid in lost), "pytest-xdist does not keep groups of tests on one worker"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the slice."""
    if part := config.getoption("slice"):
        terminalreporter.write_line(f"slow tests: slice {part[0]} of {part[1]}, from 0")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Rank processes for `pool.run(size, function, *args)`."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a gated run of two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = command(folder, *GATED, "--devices", 2)
    assert ended.code == 0, ended.err
    return folder / "run"

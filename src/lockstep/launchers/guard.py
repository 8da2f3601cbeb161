"""What a rank does about the others while it trains: watch over them, and say which one it has lost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import bounded, failures, said, stacks
from ..config import RunConfig
from ..errors import RunError
from ..failures import Failure, RankLostError
from ..pulse import Pulse
from ..watch import MISSED_BEATS, Watch, last_heard, waits_in
from .claims import Claim
from .peers import Peers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BEATS_S = (0.1, 1.0)
_BEATS_KEPT_S = (1.0, 60.0)  # where each one makes a file longer
_BEATS_IN_MEMORY_S = (0.1, 10.0)  # which each one makes fuller
_LOOK_S = 0.05
_FLUSH_S = 0.5
_WRITE_S = 2.0
_FIND_S = 5.0  # for the rank to be found that was lost


def watch(config: RunConfig, peers: Peers, pulse: Pulse, tell: Callable[[Failure], None]) -> Watch:
    """Return a watch over the peers of a world; `tell` passes on why this process is about to end.

    Raises `RankLostError` where the store has gone.
    """
    hosts = [claim.host for claim in peers.claims]
    meeting = peers.meeting
    between_s = _BEATS_KEPT_S if meeting.file else _BEATS_IN_MEMORY_S if meeting.memory else _BEATS_S
    try:
        return _watch(
            config,
            pulse,
            tell,
            peers.watch_store,
            peers.mine.rank,
            hosts,
            server=peers.server,
            between_s=between_s,
            claims=peers.claims,
            dead=functools.partial(_dead, peers),
        )
    except RuntimeError as error:  # the store's own: its server has gone
        raise peers.server_lost() from error


@contextlib.contextmanager
def watched_alone(config: RunConfig, pulse: Pulse, tell: Callable[[Failure], None]) -> Iterator[None]:
    """Watch over the one rank of a world of one while the block runs; `tell` is as in `watch`."""
    # An interactive session's process is the user's, who sees that nothing moves; so is that of other threads.
    if hasattr(sys, "ps1") or threading.current_thread() is not threading.main_thread():
        yield
        return
    from torch._C._distributed_c10d import HashStore

    watch = _watch(config, pulse, tell, HashStore, 0, [socket.gethostname()])
    try:
        yield
    except BaseException:
        watch.give_way()
        raise
    finally:
        watch.close()


def _watch(
    config: RunConfig,
    pulse: Pulse,
    tell: Callable[[Failure], None],
    opens: Callable[[], Store],
    rank: int,
    hosts: list[str],
    *,
    server: int | None = None,
    between_s: tuple[float, float] = _BEATS_S,
    claims: Sequence[Claim] = (),
    dead: Callable[[], Mapping[int, str]] = dict,
) -> Watch:
    """Return a watch over the ranks on `hosts`, with at least and at most `between_s` seconds between its beats."""
    stall_timeout_s = config.parallel.stall_timeout
    return Watch(
        pulse,
        opens,
        rank=rank,
        nodes=hosts,
        server=server,
        stall_timeout_s=stall_timeout_s,
        beat_s=min(max(stall_timeout_s / 10, between_s[0]), between_s[1]),
        ends=_ends(config, pulse, claims, tell),
        dead=dead,
    )


def _dead(peers: Peers) -> dict[int, str]:
    """Return the processes, in words by their rank, that have ended on this host without having left."""
    if not any(claim.is_dead() for claim in peers.claims):  # without the store, as a rule
        return {}
    return {claim.rank: claim.who for claim in peers.dead(aside=True)}


def _ends(
    config: RunConfig, pulse: Pulse, claims: Sequence[Claim], tell: Callable[[Failure], None]
) -> Callable[[Watch, Failure], None]:
    """Return what ends this process once the watch knows why."""

    def end(watch: Watch, failure: Failure) -> None:
        told = dataclasses.replace(failure, sentence=f"{failure.sentence}; {_again(config, pulse)}.")
        try:
            if pulse.folder is not None:
                keep = functools.partial(_keep, watch, told, claims, pulse.folder)
                with contextlib.suppress(OSError, bounded.Late):  # where it is the disk that hangs
                    bounded.within(_WRITE_S, keep, "failures")
            tell(told)
            watch.let_others_hear()
            with contextlib.suppress(bounded.Late):
                bounded.within(_FLUSH_S, said.flush, "last words")
            for child in multiprocessing.active_children():  # data workers, which would look for us for seconds
                child.kill()
        finally:
            os._exit(RunError.exit_code)

    return end


def lost(error: BaseException, config: RunConfig, peers: Peers, pulse: Pulse, watch: Watch) -> RankLostError | None:
    """Return the error that names the rank which `error` is an echo of; None if it is none, or nobody is found.

    A process of this host is seen to have ended; one of another host is missed by its beats.
    """
    if not isinstance(error, Exception) or not failures.is_echo(error):
        return None
    if peers.meeting.is_open() and (sentence := watch.sentence()):
        return RankLostError(f"{sentence}; {_again(config, pulse)}.")
    watch.hurry()
    deadline = time.monotonic() + min((MISSED_BEATS + 1) * watch.beat_s, _FIND_S)
    while not (gone := peers.dead() or _silent(peers, watch)):
        left = len(peers.here()) < len(peers.claims)  # of its own accord, with a message of its own
        if left or time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_S)
    seen, rank = watch.seen(), peers.mine.rank
    claim = gone[0]
    where = last_heard(claim.rank, seen)
    return RankLostError(
        f"Rank {claim.rank} ({claim.who}) died or was cut off{where}, and rank {rank} waited for it in "
        f"{waits_in(seen[rank])}: its own message, if it could leave one, says why; {_again(config, pulse)}."
    )


def _again(config: RunConfig, pulse: Pulse) -> str:
    has_folder = pulse.folder is not None or config.record.output is not None
    return failures.again(config, has_folder=has_folder)


def _silent(peers: Peers, watch: Watch) -> list[Claim]:
    silent = [rank for rank, each in watch.seen().items() if each.silent_s > MISSED_BEATS * watch.beat_s]
    return [claim for claim in peers.here() if claim.rank in silent]


def _keep(watch: Watch, told: Failure, claims: Sequence[Claim], folder: Path) -> None:
    """Write down this rank's stacks, and those of ranks of this host which cannot do so themselves."""
    failures.write(told, folder / "failures")
    silent = {rank for rank, each in watch.seen().items() if each.silent_s > MISSED_BEATS * watch.beat_s}
    asked = {claim.pid: claim.rank for claim in claims if claim.rank in silent and claim.is_dead() is False}
    for process, trace in stacks.of_processes(asked).items():
        failures.write(dataclasses.replace(told, rank=asked[process], trace=trace), folder / "failures")

"""What a rank does about the others while it trains: watch over them, and say which one it has lost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ..config.schema import RunConfig
from ..errors import RunError
from ..monitor import bounded, failures, output, tracebacks
from ..monitor.failures import Failure, RankLostError
from ..monitor.progress import Pulse
from ..monitor.watchdog import MISSED_BEATS, Watch
from .rollcall import Claim, Peers, server_lost

_BEATS_S = (0.1, 1.0)
_BEATS_IN_MEMORY_S = (0.1, 10.0)  # each of which makes it fuller
_FLUSH_S = 0.5
_WRITE_S = 2.0
_FIND_S = 5.0  # for the rank to be found that was lost


def watch(config: RunConfig, peers: Peers, pulse: Pulse, tell: Callable[[Failure], None]) -> Watch:
    """Return a watch over the peers of a world; `tell` passes on why this process is about to end.

    Raises `RankLostError` where the store has gone.
    """
    stall_s, mine = config.parallel.stall_timeout, peers.mine
    least_s, most_s = _BEATS_IN_MEMORY_S if peers.meeting.outlives and not peers.meeting.port else _BEATS_S
    try:
        return Watch(
            pulse,
            peers.beats,
            rank=mine.rank,
            nodes=[claim.host for claim in peers.claims],
            server=peers.server,
            stall_timeout_s=stall_s,
            beat_s=min(max(stall_s / 10, least_s), most_s),
            ends=_ends(config, pulse, peers.claims, tell) if mine.size > 1 or _is_ours() else lambda watch, failure: None,
            dead=lambda: {claim.rank: claim.who for claim in peers.dead()},
        )
    except RuntimeError as error:  # the store's own: its server has gone
        raise server_lost(peers.meeting, mine.rank) from error


def _is_ours() -> bool:
    """Whether a process that is alone may be ended where nothing moves.

    An interactive session's is the user's, who sees that; so is that of other threads.
    """
    return not hasattr(sys, "ps1") and threading.current_thread() is threading.main_thread()


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
                bounded.within(_FLUSH_S, output.flush, "last words")
            for child in multiprocessing.active_children():  # data workers, which would look for us for seconds
                child.kill()
        finally:
            os._exit(RunError.exit_code)

    return end


def lost(error: BaseException, config: RunConfig, peers: Peers, pulse: Pulse, watch: Watch) -> RankLostError | None:
    """Return the error that names the rank which `error` is an echo of; None if it is none, or nobody is found."""
    if not isinstance(error, Exception) or not failures.is_echo(error):
        return None
    # A process of this host is seen to have ended; one of another host is missed by its beats.
    sentence = watch.lost(min((MISSED_BEATS + 1) * watch.beat_s, _FIND_S), peers.has_one_left)
    return RankLostError(f"{sentence}; {_again(config, pulse)}.") if sentence else None


def _again(config: RunConfig, pulse: Pulse) -> str:
    has_folder = pulse.folder is not None or config.record.output is not None
    return failures.again(config, has_folder=has_folder)


def _keep(watch: Watch, told: Failure, claims: Sequence[Claim], folder: Path) -> None:
    """Write down this rank's stacks, and those of ranks of this host which cannot do so themselves."""
    failures.write(told, folder / "failures")
    silent = {rank for rank, each in watch.seen().items() if each.silent_s > MISSED_BEATS * watch.beat_s}
    asked = {claim.pid: claim.rank for claim in claims if claim.rank in silent and claim.is_here}
    for process, trace in tracebacks.of_processes(asked).items():
        failures.write(dataclasses.replace(told, rank=asked[process], trace=trace), folder / "failures")

"""A failure as one sentence: which rank, where, why; the whole trace goes to a file.

When one rank of many fails, the others fail too, a moment later, because their neighbour is gone. Such an *echo*
is recognised by what torch raises when a peer is lost, so that the first cause is told and not the loudest. Its own
trace explains nothing, and is kept in the file alone.
"""

from __future__ import annotations

import contextlib
import re
import runpy
import sysconfig
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ..config.schema import RunConfig
from ..errors import AbsentError, LockstepError, ProofError, RequestError, RunError, Stopped, UnmatchedError
from ..files import ours, own_folder, read
from ..printable import visible

_CLASSES: dict[str, type[LockstepError]] = {
    kind.__name__: kind for kind in (AbsentError, ProofError, RequestError, Stopped)
}
_LONGEST_REASON = 400
_RESUME = "continue with --resume auto"
_ECHO_MARK = "(an echo: this rank ended only because it had lost another one)"
_PACKAGE = str(Path(__file__).parent)
_RUNNERS = (_PACKAGE, runpy.__file__, "<frozen runpy>")
"""Whose frames may come before the first one of a script, or of a function of the user's."""
_EXCHANGES = tuple(
    str(Path(__file__).with_name(name))
    for name in (
        "world.py",
        "shared_memory.py",
        "nn",
        "gradients.py",
        "sessions.py",
        "watch.py",
        "beats.py",
        "pulse.py",
    )
)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# Classes by name, since this module runs where torch is not imported. gloo raises plain RuntimeErrors, whose text
# begins with a place in its own sources.
_NETWORK_CLASSES = frozenset({"DistNetworkError", "DistBackendError", "DistStoreError", "PeerLostError"})
_GLOO = re.compile(r"\bgloo/\S+:\d+\]")
_WAITED = re.compile(r"(?:after|waiting|ran for) \d+ ?(ms|milliseconds)")
_LOST = re.compile(
    r"Connection (was likely )?(closed|reset|refused)( by peer)?|Broken pipe|Socket closed|[Tt]imed out|"
    r"Socket Timeout|Connect timeout|wait timeout|remote process exited|network error|NCCL communicator was aborted"
)
_ADDRESS = re.compile(r"\[(?P<host>[\w.:]+)\]:\d+")
_WORKER = re.compile(
    r"DataLoader worker \((pid(?:\(s\))? [\d, ]+)\) ((?:is killed by signal: [^.]+|exited unexpectedly)"
    r"(?: with exit code \d+)?)"
)
WORKER_HINT = (
    "if the host ran out of memory, use fewer --workers; with --workers 0 the rank reads by itself, and says more"
)
"""What may help where a data worker has died."""
_CPP_FRAMES = "Exception raised from"
_WORKER_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


@dataclass(frozen=True)
class Failure:
    """What one rank says of its end."""

    rank: int
    kind: str
    """The error's class: RequestError, ProofError, Stopped, RunError, or the name of whatever else was raised."""
    sentence: str
    trace: str
    time: float = field(default_factory=time.time)
    """Seconds since the epoch, by the clock of the rank's host."""
    is_echo: bool = False
    """Whether the rank failed only because it lost another one."""

    def error(self) -> LockstepError:
        """Return the error to raise for this failure in the process that speaks to the user."""
        known = _CLASSES.get(self.kind)
        # What lockstep raises on purpose is told by its sentence; its trace is for the file.
        told = self.is_echo or self.kind == RunError.__name__
        return known(self.sentence) if known else RunError(self.sentence, trace="" if told else self.trace)


class RankLostError(RunError):
    """This rank ends only because another one went away."""


def describe(error: BaseException, rank: int, again: str = _RESUME) -> Failure:
    """Return the failure of `rank` that `error` stands for; `again` says how to go on after one that is an echo.

    lockstep's own errors keep their sentence. Of any other, the sentence names the deepest frame that is the user's
    code or lockstep's: the frames below it belong to libraries, and seldom to the cause.
    """
    entered = below_runners(error.__traceback__)
    is_own = entered is not None and not is_library(entered.tb_frame.f_code.co_filename)
    trace = "".join(traceback.format_exception(type(error), error, entered if is_own else error.__traceback__))
    if isinstance(error, UnmatchedError):
        return Failure(rank, RunError.__name__, f"Rank {rank} failed{place(error)}: {error}", trace)
    if isinstance(error, LockstepError):
        trace = getattr(error, "trace", "") or trace
        return Failure(rank, type(error).__name__, str(error), trace, is_echo=isinstance(error, RankLostError))
    if died := _WORKER.search(words(error)) if isinstance(error, RuntimeError) else None:
        # Of a class of ours, whose sentence is enough: torch raises it wherever the rank is at that moment.
        return Failure(rank, RunError.__name__, _worker_death(died, rank, again), trace)
    if is_echo(error):
        return Failure(rank, type(error).__name__, _loss(error, rank, again), trace, is_echo=True)
    notes = "".join(f" ({_short(note)})" for note in getattr(error, "__notes__", ()))
    return Failure(rank, type(error).__name__, f"Rank {rank} failed{place(error)}: {one_line(error)}{notes}", trace)


def again(config: RunConfig, *, has_folder: bool = True) -> str:
    """Return how to take up again what was lost through no fault of the request.

    Before the run `has_folder`, --resume auto might find an earlier one.
    """
    return _RESUME if has_folder and not config.checkpoint.resume else "start the same command again"


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that the others follow from: the earliest that is not an echo, else the earliest."""
    return min(failures, key=lambda failure: (failure.is_echo, failure.time))


def account(error: BaseException, rank: int, config: RunConfig) -> Failure:
    """Return the failure that `error` is on this rank; its trace is written to the run's folder, if there is one."""
    failure = describe(error, rank, again(config))
    output = config.record.output
    if output is None or isinstance(error, Stopped | RequestError):
        return failure
    # An echo comes last: the folder of a run that another rank has refused is gone by then, and stays so.
    if output.is_dir() or not failure.is_echo:
        with contextlib.suppress(OSError):  # a full disk must not hide why the rank failed
            write(failure, output / "failures")
    return failure


def write(failure: Failure, folder: Path) -> Path:
    """Write the failure with its whole trace to `folder`/rank_N.txt and return that path."""
    own_folder(folder)
    path = folder / f"rank_{failure.rank}.txt"
    marked = f"{_ECHO_MARK}\n" if failure.is_echo else ""
    with open(path, "w", encoding="utf-8", errors="backslashreplace", opener=ours) as file:
        file.write(visible(f"{' '.join(failure.sentence.split())}\n{marked}\n{failure.trace}"))
    return path


def cause_in(folder: Path, *, since_s: float) -> str:
    """Return the sentence of the first failure written to `folder` since then that is no echo; "" for none.

    A rank writes its own before it lets go of the others, so that whoever has lost it finds the cause here, where
    they share a disk. `since_s` is in seconds since the epoch.
    """
    with contextlib.suppress(OSError):
        for time_s, path in sorted((path.stat().st_mtime, path) for path in folder.glob("rank_*.txt")):
            sentence, mark, *_ = [*read(path).decode(errors="replace").splitlines(), "", ""]
            if time_s >= since_s and mark != _ECHO_MARK:
                return sentence
    return ""


def is_echo(error: BaseException) -> bool:
    """Return whether `error` is what torch raises on a rank that has lost another one.

    Other errors of the network's libraries, such as collectives that do not match, are causes.
    """
    if not isinstance(error, RuntimeError):
        return False
    text = _first_words(error)
    from_network = type(error).__name__ in _NETWORK_CLASSES or bool(_GLOO.search(text))
    return from_network and bool(_LOST.search(text) or _WAITED.search(text))


def _loss(error: BaseException, rank: int, again: str) -> str:
    """Return the sentence of a rank that another one left alone."""
    text = _first_words(error)
    found, where = _LOST.search(text), _ADDRESS.search(text)
    how = (found[0] if found else "") + (f" at {where['host']}" if where else "")
    return (
        f"Rank {rank} lost another rank while it waited for it in a collective ({how}): "
        f"that rank's own message, if it could leave one, says why; {again}."
    )


def _worker_death(found: re.Match[str], rank: int, again: str) -> str:
    hint = WORKER_HINT
    if "Bus error" in found[2]:
        hint = "/dev/shm is full: give a container more of it (docker run --shm-size), or use fewer --workers"
    how = found[2].replace("is killed by signal: Killed", "was killed by SIGKILL").replace("exited", "ended")
    return f"Rank {rank}: a data worker ({found[1]}) {how}: {hint}; {again}."


def _first_words(error: BaseException) -> str:
    return words(error).partition(_CPP_FRAMES)[0]


def place(error: BaseException) -> str:
    """Return " at FILE:LINE" of the deepest frame that `error` came through which says most, "" for none."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    # A DataLoader's worker sends its traceback as text within the message; those frames are deeper than ours.
    for line in words(error).splitlines():
        if found := _WORKER_FRAME.match(line):
            frames.append((found["file"], int(found["line"])))
    own = [frame for frame in frames if not is_machinery(frame[0])] or frames
    return f" at {own[-1][0]}:{own[-1][1]}" if own else ""


def below_runners(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` from the first frame that is neither ours nor runpy's; None where there is no such frame."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_RUNNERS):
        trace = trace.tb_next
    return trace


def is_library(file: str) -> bool:
    """Return whether a frame of `file` is Python's or an installed package's, and so neither ours nor the user's."""
    if file.startswith(_PACKAGE):
        return False
    return file.startswith("<") or file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file


def is_machinery(file: str) -> bool:
    """Return whether a frame of `file` says less than its caller's: a library's, or one that exchanges for another."""
    return is_library(file) or file.startswith(_EXCHANGES)


def one_line(error: BaseException) -> str:
    """Return the class and the words of `error` in one line, without a trace that another process has put into them."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}) before it was done"
    text = words(error)
    if "Original Traceback" in text:
        return _short(text.strip().splitlines()[-1])
    return _short(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def words(error: BaseException) -> str:
    """Return the words of `error`; "" for one of the user's own that cannot say them."""
    try:
        return str(error)
    except Exception:
        return ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} …"

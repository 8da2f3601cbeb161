"""A failure as one sentence: which rank, where, why.

Its trace goes to a file. When one rank fails, the others fail a moment later because they have lost it. torch's error
for a lost peer marks such an *echo*: the first cause is reported, and an echo's trace is in the file alone.
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
from ..files import own_folder, read, shown, write_whole
from ..printable import visible

_KINDS: dict[str, type[LockstepError]] = {
    kind.__name__: kind for kind in (AbsentError, ProofError, RequestError, Stopped)
}
_RESUME = 'continue with --resume auto, or lockstep.session(…, resume="auto")'
_ECHO_MARK = "(reported by another rank first)"
_LONGEST_REASON = 400
_LOCKSTEP = Path(__file__).parents[1]
_RUNNERS = (f"{_LOCKSTEP}/", runpy.__file__, "<frozen runpy>")
"""Frames that may come before the first one of a script, or of a function of the user's."""
_EXCHANGES = tuple(
    str(_LOCKSTEP / name) for name in ("exchange/", "monitor/", "nn/", "sessions/", "training/draw", "world/")
)
"""Frames that exchange for their caller, whose line is reported instead."""
_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")

# Classes by name: this module runs where torch is not imported. gloo and NCCL also raise plain RuntimeErrors: gloo's
# text begins with a place in its own sources, NCCL's has its name.
_NETWORK_CLASSES = frozenset({"DistNetworkError", "DistBackendError", "DistStoreError", "PeerLostError"})
_LIBRARY_TEXT = re.compile(r"\bgloo/\S+:\d+\]|NCCL")
_LOST = re.compile(
    r"Connection (was likely )?(closed|reset|refused)( by peer)?|Broken pipe|Socket closed|[Tt]imed out|"
    r"Socket Timeout|Connect timeout|wait timeout|remote process exited|network error|NCCL communicator was aborted|"
    r"(after|waiting|ran for) \d+ ?(ms|milliseconds)"
)
_NO_DETERMINISM = re.compile(r"^(\S.*?) does not have a deterministic implementation, but you set")
_ADDRESS = re.compile(r"\[(?P<host>[\w.:]+)\]:\d+")
_WORKER_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in ', re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """The reason for a rank's end."""

    rank: int
    kind: str
    """The error's class: RequestError, ProofError, Stopped, RunError, or the name of another one."""
    sentence: str
    trace: str
    time: float = field(default_factory=time.time)
    """Seconds since the epoch, by the clock of the rank's host."""
    is_echo: bool = False
    """Whether the rank ends only because another one failed."""

    def error(self) -> LockstepError:
        """Return the error to raise for the user."""
        if self.kind in _KINDS:
            return _KINDS[self.kind](self.sentence)
        # The sentence of an error that lockstep raises on purpose needs no trace.
        is_clear = self.is_echo or self.kind == RunError.__name__
        return RunError(self.sentence, trace="" if is_clear else self.trace)


class RankLostError(RunError):
    """This rank ends only because another one failed."""


def describe(error: BaseException, rank: int, hint: str = _RESUME) -> Failure:
    """Return the failure for `error` on `rank`.

    lockstep's own errors keep their sentence; that of any other error names the deepest frame of the user's code or of
    lockstep. `hint` is the advice after an echo.
    """
    entered = below_runners(error.__traceback__)
    is_own = entered is not None and not is_library(entered.tb_frame.f_code.co_filename)
    trace = "".join(traceback.format_exception(type(error), error, entered if is_own else error.__traceback__))
    if isinstance(error, UnmatchedError):
        return Failure(rank, RunError.__name__, f"Rank {rank} failed{place(error)}: {error}", trace)
    kind = type(error).__name__
    if isinstance(error, LockstepError):
        trace = getattr(error, "trace", "") or trace
        return Failure(rank, kind, str(error), trace, is_echo=isinstance(error, RankLostError))
    if is_echo(error):
        text = _first_words(error)
        match, peer = _LOST.search(text), _ADDRESS.search(text)
        reason = (match[0] if match else "") + (f" at {peer['host']}" if peer else "")
        event = f"lost another rank while it waited for it in a collective ({reason}): see that rank's own message"
        return Failure(rank, kind, f"Rank {rank} {event}; {hint}.", trace, is_echo=True)
    if operation := _NO_DETERMINISM.search(text := _words(error)):
        reason = (
            f"{operation[1]} has no deterministic implementation on this device, and deterministic algorithms are "
            "required; leave --deterministic (deterministic=True) out, or use another operation"
        )
        return Failure(rank, RequestError.__name__, f"Rank {rank} failed{place(error)}: {reason}.", trace)
    notes = "".join(f" ({_short(note)})" for note in getattr(error, "__notes__", ()))
    # torch raises for a dead data worker at the line that the rank happens to be in.
    line = "" if "DataLoader worker (pid" in text else place(error)
    return Failure(rank, kind, f"Rank {rank} failed{line}: {one_line(error)}{notes}", trace)


def resume_hint(config: RunConfig) -> str:
    """Return the advice for continuing after a loss."""
    return "start the same command again" if config.checkpoint.resume else _RESUME


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the earliest failure that is not an echo, else the earliest."""
    return min(failures, key=lambda failure: (failure.is_echo, failure.time))


def account(error: BaseException, rank: int, config: RunConfig) -> Failure:
    """Return the failure for `error`; write that to the run's folder."""
    failure, output = describe(error, rank, resume_hint(config)), config.record.output
    if output is None or isinstance(error, Stopped | RequestError):
        return failure
    if output.is_dir() or not failure.is_echo:  # an echo may follow a refusal, which has removed the folder
        with contextlib.suppress(OSError):  # a full disk must not hide why the rank failed
            write(failure, output / "failures")
    return failure


def write(failure: Failure, folder: Path) -> None:
    """Write the failure with its trace to `folder`/rank_N.txt."""
    own_folder(folder)
    path = folder / f"rank_{failure.rank}.txt"
    if failure.is_echo and path.exists():
        return  # an earlier start's cause stays
    mark = f"{_ECHO_MARK}\n" if failure.is_echo else ""
    text = visible(f"{' '.join(failure.sentence.split())}\n{mark}\n{failure.trace}")
    write_whole(path, text.encode(errors="backslashreplace"))  # another rank may read it at this moment


def cause_in(folder: Path, *, since_s: float) -> str:
    """Return the sentence of the first non-echo failure in `folder` since `since_s`, or "".

    A rank writes its failure before it leaves the others, so that they find it on a shared disk.
    """
    with contextlib.suppress(OSError):
        for time_s, path in sorted((path.stat().st_mtime, path) for path in folder.glob("rank_*.txt")):
            sentence, mark, *_ = [*read(path).decode(errors="replace").splitlines(), "", ""]
            if time_s >= since_s and mark != _ECHO_MARK:
                return sentence
    return ""


def is_echo(error: BaseException) -> bool:
    """Return whether torch raises `error` on a rank that has lost another.

    Other errors of the same libraries, such as mismatched collectives, are causes.
    """
    text = _first_words(error)
    from_network = type(error).__name__ in _NETWORK_CLASSES or bool(_LIBRARY_TEXT.search(text))
    return isinstance(error, RuntimeError) and from_network and bool(_LOST.search(text))


def place(error: BaseException) -> str:
    """Return " at FILE:LINE" of the innermost frame that is no machinery, or ""."""
    frames = [f"{frame.filename}:{frame.lineno or 0}" for frame in traceback.extract_tb(error.__traceback__)]
    # A DataLoader's worker sends its traceback as text within the message.
    frames += map(":".join, _WORKER_FRAME.findall(_words(error)))
    candidates = [frame for frame in frames if not is_machinery(frame)] or frames
    return f" at {candidates[-1]}" if candidates else ""


def users_place(error: BaseException) -> str:
    """Return FILE:LINE of the innermost frame of the user's code, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_library(frame.filename) and not frame.filename.startswith(f"{_LOCKSTEP}/"):
            return f"{shown(Path(frame.filename))}:{frame.lineno}"
    return ""


def below_runners(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` from the first frame that is neither lockstep's nor runpy's."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_RUNNERS):
        trace = trace.tb_next
    return trace


def is_library(file: str) -> bool:
    """Return whether `file` is neither lockstep's nor the user's."""
    is_foreign = file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
    return is_foreign and not file.startswith(f"{_LOCKSTEP}/")


def is_machinery(file: str) -> bool:
    """Return whether a frame of `file` works for its caller."""
    return is_library(file) or file.startswith(_EXCHANGES)


def one_line(error: BaseException) -> str:
    """Return the class and message of `error` in one line."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}) before it was done"
    text = _words(error)
    if "Original Traceback" in text:
        return _short(text.strip().splitlines()[-1])
    return _short(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's error class may fail here
        return ""


def _first_words(error: BaseException) -> str:
    return _words(error).partition("Exception raised from")[0]  # C++ frames follow


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} …"

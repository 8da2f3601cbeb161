"""A failure as one sentence: which rank, where, why; the whole trace goes to a file.

When one rank of many fails, the others fail too, a moment later, because their neighbour is gone. Such an *echo*
is recognised by what torch raises when a peer is lost, so that the first cause is told and not the loudest.
"""

from __future__ import annotations

import re
import sysconfig
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .errors import LockstepError, ProofError, RequestError, RunError, Stopped

_CLASSES: dict[str, type[LockstepError]] = {kind.__name__: kind for kind in (ProofError, RequestError, Stopped)}
_LONGEST_REASON = 400
_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# Classes by name, since this module runs where torch is not imported.
_ECHO_CLASSES = frozenset({"DistNetworkError", "DistBackendError", "DistStoreError"})
# gloo raises plain RuntimeErrors: a path in its own sources, then "Connection closed by peer", "Timed out waiting".
_ECHO_MESSAGE = re.compile(
    r"gloo/|Connection (closed|reset|refused)|Broken pipe|Socket (closed|Timeout)|[Tt]imed out|NCCL (comm|error)"
)
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
        return known(self.sentence) if known else RunError(self.sentence, trace=self.trace)


def describe(error: BaseException, rank: int) -> Failure:
    """Return the failure of `rank` that `error` stands for.

    lockstep's own errors keep their sentence. Of any other, the sentence names the deepest frame that is the user's
    code or lockstep's: the frames below it belong to libraries, and seldom to the cause.
    """
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, LockstepError):
        return Failure(rank, type(error).__name__, str(error), getattr(error, "trace", "") or trace)
    is_echo = _is_echo(error)
    verb = "lost another rank" if is_echo else "failed"
    sentence = f"Rank {rank} {verb}{_place(error)}: {_reason(error)}"
    return Failure(rank, type(error).__name__, sentence, trace, is_echo=is_echo)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that the others follow from: the earliest that is not an echo, else the earliest."""
    return min(failures, key=lambda failure: (failure.is_echo, failure.time))


def write(failure: Failure, folder: Path) -> Path:
    """Write the failure with its whole trace to `folder`/rank_N.txt and return that path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{failure.rank}.txt"
    path.write_text(f"{failure.sentence}\n\n{failure.trace}", encoding="utf-8")
    return path


def _is_echo(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    return type(error).__name__ in _ECHO_CLASSES or bool(_ECHO_MESSAGE.search(str(error)))


def _place(error: BaseException) -> str:
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    # A DataLoader's worker sends its traceback as text within the message; those frames are deeper than ours.
    for line in str(error).splitlines():
        if found := _WORKER_FRAME.match(line):
            frames.append((found["file"], int(found["line"])))
    own = [frame for frame in frames if not _is_library(frame[0])] or frames
    return f" at {own[-1][0]}:{own[-1][1]}" if own else ""


def _is_library(file: str) -> bool:
    if file.startswith(_PACKAGE):
        return False
    return file.startswith("<") or file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}) before it was done"
    text = str(error)
    if "Original Traceback" in text:
        return _short(text.strip().splitlines()[-1])
    return _short(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} …"

"""User scripts as rank programs: start, session lookup, errors, exit.

Under `lockstep run [flags] train.py`, `Script` is a launcher's entry, and `take` returns the started world. Under
`torchrun … train.py` or `python train.py`, without a launcher of ours, `own_process` joins the other ranks, reports
errors at the top of the script by `sys.excepthook`, and leaves the world when the session is closed, or else when the
process ends. The rank of the root cause reports a script's error, with the script's frames alone. Python does not say
with which code a process exits: ranks that do not end their scripts together are refused as any that make other calls.
"""

from __future__ import annotations

import atexit
import multiprocessing
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ..config.options import left_to_command, override
from ..config.schema import DataConfig, ModelConfig, RunConfig
from ..errors import LockstepError, RequestError, RunError, UnmatchedError, unknown
from ..launchers import start
from ..monitor import bounded, failures
from ..monitor.progress import SETUP
from ..printable import told, visible
from .hooks import NO_HOOKS, Hooks

if TYPE_CHECKING:
    from ..world.world import World  # which imports torch; the command that starts a script does not
T = TypeVar("T")


class ScriptError(RunError):
    """Error raised by the script; `trace` begins at the script's first frame."""


@dataclass(frozen=True)
class Started:
    """Context that `lockstep.session()` finds: config, world, flags, closing callbacks."""

    config: RunConfig
    world: World
    given: frozenset[str] = frozenset()
    """The names, without dashes, of the flags that `lockstep run` was given."""
    hooks: Hooks = NO_HOOKS
    closing: list[Callable[[BaseException | None], None]] = field(default_factory=list)
    """Callbacks after the script's end, before leaving the world: last one first, with the script's error or None."""

    def end(self, error: BaseException | None) -> tuple[BaseException | None, BaseException | None]:
        """Close the script's resources; return its error, and the error to raise.

        A lone rank's SystemExit is left to Python.
        """
        if isinstance(error, SystemExit) and not _status(error):
            error = None
        for close in reversed(self.closing):
            try:
                close(error)
            except BaseException as late:
                error = late if error is None else error
        if error is None or (isinstance(error, SystemExit) and self.world.size == 1):
            return error, error
        return error, _raised(error, self.world.rank)


_started: Started | None = None
_taken = False
_own: _OwnProcess | None = None


def take() -> Started | None:
    """Return the context that `lockstep run` started. None without `lockstep run`; call `own_process` then."""
    global _taken
    if _taken:
        raise RequestError("lockstep.session() was called twice: a process has one session; keep it and pass it on.")
    _taken = True
    return _started


def own_process(config: RunConfig) -> Started:
    """Join the world as a rank until this process ends (*collective*). Call after `take`."""
    global _own
    _own = _OwnProcess()
    return _own.join(config)


def closed() -> None:
    """Leave the world that `own_process` has joined, once its session is closed."""
    global _own
    if _own is not None:
        own, _own = _own, None
        own.leave()


@dataclass(frozen=True)
class Script:
    """Launcher entry: each rank runs the script as `python SCRIPT ARGUMENTS`."""

    name: str
    """The script's path or, with -m, its module's name."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    given: frozenset[str] = frozenset()

    def __call__(self, config: RunConfig, world: World, hooks: Hooks = NO_HOOKS) -> int:
        """Run the script; return its exit code, 0 with several ranks. `hooks` follow its session."""
        try:
            _ranked(self.name, self._run, Started(config, world, self.given, hooks))
        except SystemExit as end:
            if not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            return _status(end)
        return 0

    def _run(self) -> None:
        sys.argv, path = [self.name, *self.arguments], Path(self.name).absolute()
        sys.path.insert(0, str(Path.cwd() if self.is_module else path.parent))
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(path), run_name="__main__")


@dataclass(frozen=True)
class _Function:
    """Launcher entry: each rank calls the user's function. The function calls `lockstep.session()`."""

    function: Callable[[], Any]
    given: frozenset[str]

    def __call__(self, config: RunConfig, world: World) -> Any:
        return _ranked(self.function.__qualname__, self.function, Started(config, world, self.given))


@overload
def launch(entry: Callable[[RunConfig, World], T], config: RunConfig) -> T | None: ...
@overload
def launch(
    entry: Callable[[], T],
    *,
    devices: int | None = None,
    gpus: str = "",
    accelerator: Literal["auto", "cpu", "cuda"] = "auto",
    max_restarts: int = 0,
    **options: Any,
) -> T | None: ...
def launch(entry: Callable[..., Any], config: RunConfig | None = None, **options: Any) -> Any:
    """Run a function on every rank; return rank 0's result. Processes of other ranks return None.

    With a `config`, `entry(config, world)` is called. Without one, `entry()` is called and calls `lockstep.session()`,
    on `devices` ranks of this machine (by default one for each GPU, or one on a CPU), on chosen `gpus` such as "0,1",
    started again `max_restarts` times after a loss. Further `options` are the other flags of `lockstep run` by their
    names, those of `lockstep.session` among them. A function that processes cannot import by name, such as one of a
    notebook, is sent to them by cloudpickle, with the globals that it uses. Raises `RequestError` for options that
    cannot be honoured, and a `LockstepError` for a failure in any rank, whose `exit_code` is that of the command; a
    note has the trace of the rank that failed first.
    """
    if not callable(entry):
        raise RequestError(f"launch takes a function that each rank calls; found {entry!r}.")
    name = getattr(entry, "__name__", "function")
    try:
        if config is not None:
            return start.launch(entry, config)
        for option in options:
            if option.replace("_", "-") not in (known := left_to_command()):
                raise unknown("option of lockstep.launch", option, known, "lockstep run --help lists all.")
        wanted = override(RunConfig(model=ModelConfig(name=name), data=DataConfig(name="")), **options)
        return start.launch(_Function(entry, frozenset(key.replace("_", "-") for key in options)), wanted)
    except RunError as error:
        if error.trace:
            error.add_note(visible(error.trace))
        raise


def _ranked(name: str, run: Callable[[], Any], started: Started) -> Any:
    """Run the script as a rank; return its result. Raises the error to report, and SystemExit of a lone rank."""
    global _started, _taken
    before, (_started, _taken) = (_started, _taken), (started, False)
    started.world.progress.enter(SETUP)  # until the script's loop has begun
    error: BaseException | None = None
    found = None
    try:
        found = run()
        if not _taken:
            size = started.world.size
            how = f"each of {size} processes ran it for itself" if size > 1 else "python would do as well"
            raise RequestError(
                f"{name} never calls lockstep.session(), so that {how}; call it before the model is made, or start "
                "the script with python."
            )
    except BaseException as raised:
        error = raised
    error, raises = started.end(error)
    _started, _taken = before
    if raises is None:
        return found
    if error is not None and raises is not error:
        traceback.clear_frames(error.__traceback__)  # frees data workers, which then end in order
    raise raises


def _status(end: SystemExit) -> int:
    return (end.code or 0) & 0xFF if isinstance(end.code, int | None) else 1


def _raised(error: BaseException, rank: int) -> BaseException:
    """Return the error to raise for a script's error. It has the script's frames; other errors stay as they are."""
    raises: BaseException
    if isinstance(error, UnmatchedError):
        raises = RunError(failures.describe(error, rank).sentence)
    elif isinstance(error, LockstepError) or not isinstance(error, Exception | SystemExit):
        return error
    else:
        trace = failures.below_runners(error.__traceback__)
        error.__traceback__ = trace or error.__traceback__
        failure = failures.describe(error, rank)
        if failure.is_echo or failure.kind == RunError.__name__:
            return error
        has_frames = trace is not None and not isinstance(error, SystemExit)
        raises = ScriptError(failure.sentence, trace=failure.trace) if has_frames else RunError(failure.sentence)
    raises.__cause__ = error  # whose trace goes to the run's folder
    return raises


class _OwnProcess:
    """Process started with the script: joining, error reports and exit."""

    def __init__(self) -> None:
        self._kept = ExitStack()
        self._started: Started | None = None
        self._code = 0
        self._seen = getattr(sys, "last_value", None)
        self._hook = sys.excepthook
        if not hasattr(sys, "ps1"):  # an error at a prompt ends nothing
            sys.excepthook = self._fail

    def join(self, config: RunConfig) -> Started:
        """Join the world until the process ends."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RequestError(
                "A process that the script has started, such as a data worker, imports the script and would run it "
                'anew; put what the script does under `if __name__ == "__main__":`.'
            )
        self._started = Started(*self._kept.enter_context(start.joined(config)))
        self._started.world.progress.enter(SETUP)  # until the script's loop has begun
        atexit.register(self._end)
        return self._started

    def leave(self) -> None:
        """Leave the world before the process ends. Python reports later errors."""
        self._restore()
        self._kept.close()

    def _restore(self) -> None:
        atexit.unregister(self._end)
        if sys.excepthook == self._fail:
            sys.excepthook = self._hook

    def _fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report an uncaught error, as `sys.excepthook`."""
        self._code = self._leave(error)
        if not isinstance(error, KeyboardInterrupt):  # by whose signal Python ends the process
            atexit.register(self._exit)  # once the hooks that called this one have returned

    def _exit(self) -> None:
        atexit.unregister(self._exit)
        bounded.leave(self._code)

    def _end(self) -> None:
        """Leave the world at process exit. Python's exit code stays, unless leaving fails."""
        # Where another excepthook has taken the place of ours, Python keeps the error that was told there.
        error = getattr(sys, "last_value", None)
        if code := self._leave(None if error is self._seen else error):
            bounded.leave(code)

    def _leave(self, error: BaseException | None) -> int:
        """Close, leave the world, report the error; return the exit code."""
        global _own
        _own = None
        self._restore()
        size, raises = 1, error
        if self._started is not None:
            size = self._started.world.size
            error, raises = self._started.end(error)
        elif error is not None:
            raises = _raised(error, 0)
        try:
            self._kept.__exit__(None if raises is None else type(raises), raises, None)
        except BaseException as last:
            raises = last
        if raises is None:
            return 0
        is_own = isinstance(raises, ScriptError) or not isinstance(raises, LockstepError)
        if error is not None and (is_own or self._hook is not sys.__excepthook__):
            self._hook(type(error), error, error.__traceback__)
        if isinstance(raises, LockstepError) and not (is_own and size == 1):
            sys.stderr.write(told(str(raises)))
        return raises.exit_code if isinstance(raises, LockstepError) else 1

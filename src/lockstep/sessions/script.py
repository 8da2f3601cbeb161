"""User scripts as rank programs: start, session lookup, errors, exit.

Under `lockstep run [flags] train.py`, `Script` is a launcher's entry, and `take` returns the started world. Under
`torchrun … train.py` or `python train.py`, without a launcher of ours, `own_process` joins the other ranks, reports
errors at the top of the script by `sys.excepthook`, and leaves the world when the session is closed, or else when the
process ends. The rank of the root cause reports a script's error, with the script's frames alone. Python does not
reveal a process's exit code: ranks that do not end their scripts together raise the error of mismatched calls.
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
from ..printable import format_message, visible
from ..user_code import name_of
from .hooks import NO_HOOKS, Hooks

if TYPE_CHECKING:
    from ..world.world import World  # imports torch; the command that starts a script does not
T = TypeVar("T")


class ScriptError(RunError):
    """Error raised by the script; `trace` begins at the script's first frame."""


@dataclass(frozen=True)
class Started:
    """Context of `lockstep.session()`: config, world, flags, closing callbacks."""

    config: RunConfig
    world: World
    flags: frozenset[str] = frozenset()
    """Names, without dashes, of the flags of this `lockstep run`."""
    hooks: Hooks = NO_HOOKS
    closing: list[Callable[[BaseException | None], None]] = field(default_factory=list)
    """Callbacks after the script's end, before leaving the world: last one first, with the script's error or None."""

    def end(self, error: BaseException | None) -> tuple[BaseException | None, BaseException | None]:
        """Close the script's resources; return (the script's error, the error to raise).

        Python handles the SystemExit of a single rank.
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
        return error, _error_to_raise(error, self.world.rank)


_started: Started | None = None
_has_session = False
_process: _ScriptProcess | None = None


def take() -> Started | None:
    """Return the context of `lockstep run`, or None without it; then call `own_process`."""
    global _has_session
    if _has_session:
        raise RequestError("lockstep.session() was called twice: a process has one session; keep it and pass it on.")
    _has_session = True
    return _started


def own_process(config: RunConfig) -> Started:
    """Join the world as a rank until this process ends (*collective*). Call after `take`."""
    global _process
    _process = _ScriptProcess()
    return _process.join(config)


def leave() -> None:
    """Leave the world that `own_process` has joined, after its session is closed."""
    global _process
    if _process is not None:
        process, _process = _process, None
        process.leave()


@dataclass(frozen=True)
class Script:
    """Launcher entry: each rank runs the script as `python SCRIPT ARGUMENTS`."""

    name: str
    """Path of the script or, with -m, name of its module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    flags: frozenset[str] = frozenset()

    def __call__(self, config: RunConfig, world: World, hooks: Hooks = NO_HOOKS) -> int:
        """Run the script; return its exit code, 0 with several ranks. `hooks` follow its session."""
        try:
            _run_as_rank(self.name, self._run, Started(config, world, self.flags, hooks))
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
    flags: frozenset[str]

    def __call__(self, config: RunConfig, world: World) -> Any:
        return _run_as_rank(name_of(self.function), self.function, Started(config, world, self.flags))


@overload
def launch(entry: Callable[[RunConfig, World], T], config: RunConfig) -> T | None: ...
@overload
def launch(
    entry: Callable[[], T],
    *,
    devices: int | None = None,
    gpus: str = "",
    accelerator: Literal["auto", "cpu", "cuda", "xpu", "npu", "mps"] = "auto",
    max_restarts: int = 0,
    **options: Any,
) -> T | None: ...
def launch(entry: Callable[..., Any], config: RunConfig | None = None, **options: Any) -> Any:
    """Run a function on every rank; return rank 0's result. Processes of other ranks return None.

    With a `config`, each rank calls `entry(config, world)`. Without one, it calls `entry()`, which calls
    `lockstep.session()`, on `devices` ranks of this machine (default: one per GPU, or one on a CPU), on chosen `gpus`
    such as "0,1", with `max_restarts` restarts after a loss. Further `options` are the other flags of `lockstep run`,
    including those of `lockstep.session`. cloudpickle sends a function without an importable name, such as one of a
    notebook, to the processes with the globals that it uses. Raises `RequestError` for options that cannot be honoured,
    and a `LockstepError` for a failure in any rank; its `exit_code` is that of the command, and a note has the
    traceback of the rank that failed first.
    """
    if not callable(entry):
        raise RequestError(f"launch takes a function that each rank calls; found {entry!r}.")
    if config is not None and not isinstance(config, RunConfig):
        raise RequestError(
            f"launch takes a function without arguments, and options by name, such as devices=2; found {config!r}: "
            "give functools.partial(function, argument)."
        )
    name = name_of(entry).rpartition(".")[2]
    try:
        if config is not None:
            return start.launch(entry, config)
        for option in options:
            if option.replace("_", "-") not in (names := left_to_command()):
                raise unknown("option of lockstep.launch", option, names, "lockstep run --help lists all.")
        config = override(RunConfig(model=ModelConfig(name=name), data=DataConfig(name="")), **options)
        return start.launch(_Function(entry, frozenset(key.replace("_", "-") for key in options)), config)
    except RunError as error:
        if error.trace:
            error.add_note(visible(error.trace))
        raise


def _run_as_rank(name: str, run: Callable[[], Any], started: Started) -> Any:
    """Run the script as a rank; return its result. Raises the error to report, and a single rank's SystemExit."""
    global _started, _has_session
    outer, (_started, _has_session) = (_started, _has_session), (started, False)
    started.world.progress.enter(SETUP)  # until the script's loop has begun
    error: BaseException | None = None
    result = None
    try:
        result = run()
        if not _has_session:
            size = started.world.size
            effect = f"each of {size} processes ran it separately" if size > 1 else "python would do as well"
            raise RequestError(
                f"{name} never calls lockstep.session(), so that {effect}; call it before the model is made, or start "
                "the script with python."
            )
    except BaseException as raised:
        error = raised
    error, raises = started.end(error)
    _started, _has_session = outer
    if raises is None:
        return result
    if error is not None and raises is not error:
        traceback.clear_frames(error.__traceback__)  # frees data workers, which then end in order
    raise raises


def _status(end: SystemExit) -> int:
    return (end.code or 0) & 0xFF if isinstance(end.code, int | None) else 1


def _error_to_raise(error: BaseException, rank: int) -> BaseException:
    """Return the error to raise for a script's error, with the script's frames; other errors stay unchanged."""
    raises: BaseException
    if isinstance(error, UnmatchedError):
        raises = RunError(failures.describe(error, rank).sentence)
    elif type(error) is RequestError and (place := failures.users_place(error)):
        raises = RequestError(f"{error} The call is at {place}.")
    elif isinstance(error, LockstepError) or not isinstance(error, Exception | SystemExit):
        return error
    else:
        trace = failures.below_runners(error.__traceback__)
        error.__traceback__ = trace or error.__traceback__
        failure = failures.describe(error, rank)
        if failure.is_echo or failure.kind == RunError.__name__:
            return error
        if failure.kind == RequestError.__name__:
            return failure.error()
        has_frames = trace is not None and not isinstance(error, SystemExit)
        raises = ScriptError(failure.sentence, trace=failure.trace) if has_frames else RunError(failure.sentence)
    raises.__cause__ = error  # its traceback goes to the run's folder
    return raises


class _ScriptProcess:
    """Process that runs the script without a launcher of ours: joining, error reports and exit."""

    def __init__(self) -> None:
        self._resources = ExitStack()
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
                'anew; put the script\'s code under `if __name__ == "__main__":`.'
            )
        self._started = Started(*self._resources.enter_context(start.joined(config)))
        self._started.world.progress.enter(SETUP)  # until the script's loop has begun
        atexit.register(self._end)
        return self._started

    def leave(self) -> None:
        """Leave the world before the process ends. Python reports later errors."""
        self._restore()
        self._resources.close()

    def _restore(self) -> None:
        atexit.unregister(self._end)
        if sys.excepthook == self._fail:
            sys.excepthook = self._hook

    def _fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report an uncaught error, as `sys.excepthook`."""
        self._code = self._leave(error)
        if not isinstance(error, KeyboardInterrupt):  # Python ends the process by its signal
            atexit.register(self._exit)  # after the hooks that called this one have returned

    def _exit(self) -> None:
        atexit.unregister(self._exit)
        bounded.leave(self._code)

    def _end(self) -> None:
        """Leave the world at process exit. Python's exit code stays, unless leaving fails."""
        # If another excepthook has replaced ours, Python keeps the error that it reported.
        error = getattr(sys, "last_value", None)
        if code := self._leave(None if error is self._seen else error):
            bounded.leave(code)

    def _leave(self, error: BaseException | None) -> int:
        """Close, leave the world, report the error; return the exit code."""
        global _process
        _process = None
        self._restore()
        size, raises = 1, error
        if self._started is not None:
            size = self._started.world.size
            error, raises = self._started.end(error)
        elif error is not None:
            raises = _error_to_raise(error, 0)
        try:
            self._resources.__exit__(None if raises is None else type(raises), raises, None)
        except BaseException as last:
            raises = last
        if raises is None:
            return 0
        is_own = isinstance(raises, ScriptError) or not isinstance(raises, LockstepError)
        if error is not None and (is_own or self._hook is not sys.__excepthook__):
            self._hook(type(error), error, error.__traceback__)
        if isinstance(raises, LockstepError) and not (is_own and size == 1):
            sys.stderr.write(format_message(str(raises)))
        return raises.exit_code if isinstance(raises, LockstepError) else 1

"""Processes of Python that have imported torch already: forked from a server, each as if it had just been started.

    Server().start(["-m", "lockstep", "train", "digits"], cwd=folder, env=env, files={0: 0, 1: out, 2: err})

The server imports what ranks import, computes nothing, and forks what it is asked for. Whoever asks becomes the parent,
as of a process that it had started itself: it waits for it, and finds it among its children. Such a process keeps a
server of its own, a fork of itself from before anything ran, for the ranks that multiprocessing spawns there. What a
cold start would read before torch is imported has to be the same here; see `Server.has`.

What a warm process cannot show: a seed of its own for the hashes of strings, what is imported when and what that costs.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import inspect
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
SOURCE = os.environ.get("LOCKSTEP_TEST_SOURCE", str(ROOT / "src"))  # another one where a mutant is tested
CODE = os.pathsep.join([str(ROOT), SOURCE])
"""The code beside the tests, whichever is installed."""

_PRELOADED = (
    "lockstep.trainer",
    "lockstep.cli.train",
    "lockstep.launchers.rank",
    "lockstep.launchers.supervisor",
    "lockstep.launchers.start",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.utils.tensorboard",
)
_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "TZ")
"""Variables, by how they begin, that are read at the start of Python, of a library, or by an import."""
_LATE = (
    "PYTHONSAFEPATH",  # multiprocessing hands its own path over
    *("TORCHELASTIC_", "TORCH_DISTRIBUTED_", "TORCH_DISABLE_SHARE_RDZV", "TORCH_NCCL_", "TORCH_CPP_LOG_LEVEL"),
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it in a process that trains, such as that of the tests
)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LONGEST = 1 << 20
_ROOM = 1 << 14  # for a command line
_SPAWNED = "from multiprocessing.spawn import spawn_main"
_HANDLED = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True)
class _Asked:
    """A process to be."""

    words: list[str]
    """What follows `python`: -m or -c, its argument, and what it finds in sys.argv."""
    cwd: str
    env: dict[str, str]
    files: list[int]
    """The numbers of its files, in the order in which they are handed over."""
    session: bool
    """Whether it leads a new session."""
    blocked: Sequence[int]
    ignored: Sequence[int]


class Server:
    """A warm process, from the side of whoever asks it for others."""

    def __init__(self, channel: socket.socket | None = None) -> None:
        self._lock = threading.Lock()
        self._env = dict(os.environ)
        self._affinity = os.sched_getaffinity(0)
        if channel is not None:
            self._channel = channel
            return
        self._env |= {"PYTHONPATH": CODE}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno()), "resource_tracker".ljust(_ROOM)],
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.PIPE,  # pipes, as commands have them, whose streams the forks keep
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )

    def has(self, words: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether the process would be the same if it were started cold."""
        if "LOCKSTEP_TEST_COLD" in os.environ:
            return False
        names = {name for name in (*env, *self._env) if name.startswith(_EARLY) and not name.startswith(_LATE)}
        if words[0] != "-m":
            names -= {"PYTHONPATH"}  # whoever spawns hands its own path over
        hides_gpus = not Path("/dev/nvidiactl").exists() or env.get("CUDA_VISIBLE_DEVICES") == ""
        same = all(env.get(name) == self._env.get(name) for name in names)
        return same and hides_gpus and os.sched_getaffinity(0) == self._affinity

    def start(
        self, words: Sequence[str], *, cwd: str, env: Mapping[str, str], files: Mapping[int, int], session: bool
    ) -> int:
        """Start `python WORDS` with these files, by the numbers that it knows them by; return its id."""
        ignored = [number for number in _HANDLED if signal.getsignal(number) is signal.SIG_IGN]
        blocked = list(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        asked = _Asked(list(words), cwd, dict(env), list(files), session, blocked, [*ignored])
        with self._lock:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the server's grandchild, whose parent has ended, becomes our child
            try:
                socket.send_fds(self._channel, [json.dumps(asdict(asked)).encode()], list(files.values()))
                return int(self._channel.recv(64))
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        """End the server; what it has forked lives on."""
        self._channel.close()
        self._process.communicate()


class Warm(subprocess.Popen[str]):
    """`subprocess.Popen([sys.executable, …], …)` by the server of this process."""

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = {number: number if end == -1 else end for number, end in enumerate(ends)}
        cwd, env = str(asked["cwd"] or Path.cwd()), asked["env"] or os.environ
        self.pid = server().start(asked["args"][1:], cwd=cwd, env=env, files=files, session=asked["start_new_session"])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


@functools.cache
def server() -> Server:
    """Return the server of this process of tests."""
    return Server()


def has(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether that server has such a process."""
    return sys.platform == "linux" and server().has(words, env)


def close() -> None:
    """End that server, if there is one."""
    if server.cache_info().currsize:
        server().close()
        server.cache_clear()


def spawn_from(server: Callable[[], Server]) -> None:
    """Have the ranks that multiprocessing spawns in this process come from the server, where it has the like."""
    cold = multiprocessing.util.spawnv_passfds

    def spawn(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
        words = list(args[args.index("-c") :])
        if words[1].startswith(_SPAWNED) and server().has(words, os.environ):
            files = {number: number for number in (0, 1, 2, *passfds)}
            with suppress(OSError, ValueError):
                return server().start(words, cwd=str(Path.cwd()), env=os.environ, files=files, session=False)
        return int(cold(path, args, passfds))

    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]


def _serve(channel: socket.socket) -> _Asked:
    """Fork what is asked for as long as there is anybody to ask; return in each fork, as what it is to be."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _LONGEST, 64)
        if not message:
            os._exit(0)
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
        (tells, told), (goes, holds) = os.pipe(), os.pipe()
        middle = os.fork()
        if not middle:
            child = os.fork()
            if child:
                os.write(told, str(child).encode())
                os._exit(0)
            os.close(holds)
            os.read(goes, 1)  # until whoever asked is our parent, and knows
            asked = _Asked(**json.loads(message))
            channel.detach()  # whose number may be another file's from now on
            _take(dict(zip(asked.files, descriptors, strict=True)))
            return asked
        os.waitpid(middle, 0)
        channel.send(os.read(tells, 64))
        for number in (tells, told, goes, holds, *descriptors):
            os.close(number)


def _take(files: Mapping[int, int]) -> None:
    """Have these files, by number, and no others."""
    above = 1 + max(*files, *files.values())
    high = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in files.items()}
    for number, file in high.items():
        os.dup2(file, number)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number not in files:
            with suppress(OSError):
                os.close(number)


def _become(asked: _Asked) -> None:
    """Take on all that a process has from its start."""
    if asked.session:
        os.setsid()
    os.chdir(asked.cwd)
    os.environ.clear()
    os.environ.update(asked.env)
    for number in asked.ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked.blocked)
    option, _, *words = asked.words
    sys.orig_argv = [sys.executable, *asked.words]
    sys.argv = [option, *words]
    sys.path[0] = asked.cwd if option == "-m" else ""
    _call_ourselves(sys.orig_argv)
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        ctypes.CDLL(str(Path(str(torch.__file__)).parent / "lib" / "libc10.so"))._ZN3c1011initLoggingEv()
    torch.default_generator.seed()  # as those of each process, which differ
    numpy.random.seed()


def _call_ourselves(words: Sequence[str]) -> None:
    """Have our command line be this one, as `ps` shows it."""
    first, last = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: last - first]
    ctypes.memmove(first, text.ljust(last - first, b"\0"), last - first)


def _keeps_server() -> socket.socket | None:
    """Leave a server beside this process for the ranks that it spawns; return the server's channel in the server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        own = Server(ours)
        spawn_from(lambda: own)
        return None
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    ours.close()
    _take({number: os.open(os.devnull, os.O_RDWR) for number in range(3)} | {theirs.fileno(): theirs.fileno()})
    signal.pthread_sigmask(signal.SIG_SETMASK, _HANDLED)
    _call_ourselves([sys.executable, "resource_tracker of warm ranks"])
    return theirs


def _main() -> None:
    """Serve; in each process that is forked, run what was asked for, whose end is the process's."""
    channel: socket.socket | None = socket.socket(fileno=int(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_SETMASK, _HANDLED)
    for name in _PRELOADED:
        __import__(name)
    if not os.fork():
        os._exit(0)  # libraries that keep threads for computing end those before a fork
    os.wait()
    gc.collect()
    gc.freeze()  # forks share what they need not look at
    while channel is not None:
        asked = _serve(channel)
        _become(asked)
        channel = _keeps_server() if not asked.words[1].startswith(_SPAWNED) else None
    what = asked.words[1]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    try:
        if asked.words[0] == "-m":
            runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        else:
            exec(compile(what, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _leave(end.code or 0)
        raise
    finally:
        gc.unfreeze()


def _leave(code: int) -> NoReturn:
    """End as Python does, but for taking all modules apart, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except Exception:
        sys.exit(code)
    os._exit(code & 255)


if __name__ == "__main__":
    _main()

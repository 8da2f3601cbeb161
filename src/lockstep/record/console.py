"""What a person sees: a calm bar on a terminal, plain lines in a log file.

On a terminal one line at the bottom moves, and results scroll by above it:

    epoch  2/10 ━━━━╸━━━━━━━━━━━━━ 392/1,960  loss 1.5541  train 78.4%  5,512 images/s  2 min 52 s left

The bar goes to stderr, results to stdout, so that `lockstep train … > results.txt` keeps the results and still shows
the bar. Without a terminal there is no bar and no control code, but a line at most every few seconds, and one for the
end of each epoch.

The bar is drawn on `log` events alone: a thread that redraws ten times a second would take its time from the training.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from ..errors import counted
from ..files import shown
from ..screen import Screen, line
from .checks import Check

PLAIN_EVERY_S = 5.0
"""Least seconds between two lines where there is no terminal: a day's run stays readable."""
DRAW_EVERY_S = 0.1
"""Least seconds between two drawings of the bar: one takes about a millisecond."""
LEAST_BAR = 12
"""Columns that are kept for the bar itself; on a narrow terminal numbers make room for it."""
_FILES = (
    *("summary.json", "proof.md", "steps.jsonl", "ledger.bin"),
    *("checkpoints/last", "checkpoints/best", "manifest.json", "config.toml"),
)
_WEIGHTS = {"test": "last weights", "test_best": "best weights"}


class Notices:
    """Shows of a user's own script what it does not say itself: how its batches are shared out, warnings, its end.

    With --quiet only the last two of any run, whose end goes to `out`.
    """

    def __init__(self, out: Screen | None = None, *, quiet: bool = False) -> None:
        self._err = Screen(stderr=True)
        self._out = out or self._err
        self._quiet = quiet

    def __str__(self) -> str:
        return "The terminal"

    def record(self, event: str, **fields: Any) -> None:
        """Show the event, if it is one of these."""
        if event == "start" and not self._quiet:
            for text in fields["lines"]:
                self._err.say((text, "bright_black"))
        elif event == "warning":
            self._err.say((f"warning: {fields['text']}", "yellow"))
        elif event == "finish":
            self._out.say((_ended(fields), "bright_black"))

    def close(self) -> None:
        """Do nothing."""


class Terminal:
    """Shows the run to a person.

    `out` takes results, `err` warnings; the bar, where `live`, is on `err`. Where both are the same terminal they
    must be the same console, or the bar and the results would draw over each other. `clock` gives seconds.
    """

    def __init__(self, out: Screen, err: Screen, *, live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._err, self._live, self._clock = out, err, live, clock
        self._start_of_run: dict[str, Any] = {}
        self._unit = "sample"
        self._bar: Progress | None = None
        self._shown_s = -float("inf")
        self._held: dict[str, Any] | None = None
        self._numbers = ""  # what stands right of the bar
        self._lost = ""  # why results cannot be written any more

    @classmethod
    def detect(cls) -> Terminal:
        """Return the terminal of this process: a bar where stderr can move, plain lines elsewhere."""
        err = Screen(stderr=True)
        shared = err.is_interactive and sys.stdout.isatty()
        return cls(err if shared else Screen(), err, live=err.is_interactive)

    def __str__(self) -> str:
        return "The terminal"

    def record(self, event: str, **fields: Any) -> None:
        """Show the event, if it is one that people look at."""
        acts: dict[str, Callable[[dict[str, Any]], None]] = {
            "start": self._start,
            "log": self._log,
            "evaluate": self._evaluate,
            "eval": self._eval,
            "epoch": self._release,
            "warning": self._warning,
            "finish": self._finish,
        }
        if event not in acts or self._lost == "its reader has gone":
            return
        try:
            acts[event](fields)
        except BrokenPipeError:
            self._lost = "its reader has gone"
            raise
        except OSError as error:
            if not self._lost:
                self._lost = str(error.strerror)
                text = f"warning: results cannot be written to the output ({error.strerror}); training goes on"
                self._err.say((text, "yellow"))
            raise

    def close(self) -> None:
        """Show the last line that was held back, and leave the bar where it is."""
        if not self._lost:
            self._release()
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _print(self, *lines: Text) -> None:
        for each in lines:
            self._out.print(each, soft_wrap=True)

    def _warning(self, fields: dict[str, Any]) -> None:
        self._err.say((f"warning: {fields['text']}", "yellow"))

    def _start(self, fields: dict[str, Any]) -> None:
        self._start_of_run = {"epochs": 0, "steps_per_epoch": 0, "first_step": 0} | fields
        self._unit = "image" if len(fields.get("shape", ())) == 3 else "sample"
        self._print(*(line((text, "" if index else "bold")) for index, text in enumerate(fields.get("lines", ()))))
        if self._live and self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}", style="bold"),
                BarColumn(bar_width=None, style="bright_black", complete_style="cyan", finished_style="green"),
                TextColumn("{task.fields[numbers]}"),
                console=self._err,
                auto_refresh=False,
                expand=True,
                redirect_stdout=self._out is self._err,
            )
            begun = {"total": fields["total_steps"], "completed": self._start_of_run["first_step"]}
            self._bar.add_task("starting", **begun, numbers="first steps …")
            self._bar.start()
            self._bar.refresh()

    def _log(self, fields: dict[str, Any]) -> None:
        now_s, steps = self._clock(), self._start_of_run["steps_per_epoch"]
        due = now_s - self._shown_s >= (DRAW_EVERY_S if self._bar else PLAIN_EVERY_S)
        self._held = fields
        if due or (steps and fields["step"] % steps == 0):
            self._release()
            self._shown_s = now_s

    def _release(self, _: object = None) -> None:
        """Show the newest `log` event, if it was not shown yet."""
        fields, self._held = self._held, None
        if fields is None:
            return
        parts = [f"loss {fields['loss']:.4f}"]
        if fields.get("top1") is not None:
            parts.append(f"train {fields['top1']:.1%}")
        parts.append(f"{fields['samples_per_s']:,.0f} {self._unit}s/s")
        if fields.get("eta_s"):  # nothing at the last step
            parts.append(f"{duration(fields['eta_s'])} left")
        epoch = self._epoch(fields)
        if self._bar is None:
            self._print(Text("  ".join([f"{epoch}  {self._step(fields)}", *parts, f"lr {fields['lr']:.4g}"])))
        else:
            count = f"{self._step(fields).removeprefix('step ')}/{self._start_of_run['total_steps']:,}"
            self._numbers = _fit(count, parts, self._err.width - len(epoch) - LEAST_BAR)
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=fields["step"], description=epoch, numbers=self._numbers)
            self._bar.refresh()

    def _epoch(self, fields: dict[str, Any]) -> str:
        epochs = self._start_of_run["epochs"]
        return f"epoch {fields['epoch'] + 1:>{len(str(epochs))}}/{epochs}"

    def _step(self, fields: dict[str, Any]) -> str:
        width = len(f"{self._start_of_run['total_steps']:,}")
        return f"step {fields['step']:>{width},}"

    def _evaluate(self, fields: dict[str, Any]) -> None:
        self._release()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], numbers=f"evaluating {counted(fields['samples'], self._unit)} …")
            self._bar.refresh()

    def _eval(self, fields: dict[str, Any]) -> None:
        self._release()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], numbers=self._numbers)
        told = Text(f"{self._epoch(fields)}  " if "epoch" in fields else "").append(f"{self._step(fields)}  ")
        told.append(f"{fields.get('on', 'test set').removesuffix(' set')} {fields['top1']:7.2%}", "bold green")
        told.append(self._top5(fields, width=7)).append(f"  loss {fields['loss']:.4f}")
        if "samples" in fields:
            told.append(f"  {counted(fields['samples'], self._unit)}", "bright_black")
        self._print(told)

    def _top5(self, fields: dict[str, Any], *, width: int = 0) -> str:
        """Return nothing of five classes or fewer, where it is 100 % whatever the model does."""
        is_told = self._start_of_run.get("classes", 6) > 5 and fields.get("top5") is not None
        return f"  top-5 {fields['top5']:{width or ''}.2%}" if is_told else ""

    def _finish(self, fields: dict[str, Any]) -> None:
        self.close()
        epochs_s = fields.get("epoch_s") or []
        done = Text("\n").append("done" if not fields.get("exit") else "stopped", "bold").append(" ")
        done.append(f"after {counted(fields['steps'], 'step')}")
        if epochs_s:
            done.append(f" and {duration(sum(epochs_s))} in {counted(len(epochs_s), 'epoch')}")
        if rate := fields.get("samples_per_s") or fields.get("images_per_s"):
            done.append(f", {rate:,.0f} {self._unit}s/s")
        self._print(done)
        if fields.get("stopped"):
            self._print(Text(f"stopped early: {fields['stopped']}"))
        if fields.get("top1") is not None:
            on = fields.get("best_on", "test set")
            score = Text(f"{on.removesuffix(' set')} accuracy ").append(f"{fields['top1']:.2%}", "bold green")
            if fields.get("best_top1") is not None:
                score.append(f"  best {fields['best_top1']:.2%} (chosen on the {on})")
            self._print(score.append(self._top5(fields)))
            if on != "test set":
                told = [f"{fields[name]['top1']:.2%} ({words})" for name, words in _WEIGHTS.items() if fields.get(name)]
                self._print(Text("test accuracy ").append("  ".join(told), "bold green"))
        if proved := _proved(fields.get("proof") or {}):
            self._print(Text(f"proved {proved}"))
        if fields.get("output"):
            folder, start = Path(fields["output"]), self._start_of_run
            written = ", ".join(_written(folder))
            self._print(line("written to ", (str(folder), "cyan"), (f": {written}", "bright_black")))
            if self._live and not fields.get("exit") and "classes" in start:
                self._print(*_next(folder, start["chosen"]["devices"]))


def _ended(fields: dict[str, Any]) -> str:
    """Return in one line how a run has ended."""
    told = f"done after {counted(fields['steps'], 'step')}"
    if fields.get("top1") is not None:
        told += f"; {fields.get('best_on', 'test set').removesuffix(' set')} accuracy {fields['top1']:.2%}"
    if proved := _proved(fields.get("proof") or {}):
        told += f"; proved: {proved}"
    return f"{told}; written to {fields['output']}" if fields["output"] else told


def _next(run: Path, devices: int) -> Iterator[Text]:
    """Yield three commands that are worth a try after a run, with what each is for."""
    program = "" if shutil.which("lockstep") else f"{shown(Path(sys.executable).parent)}/"
    more = ("lockstep train … --devices 2", "the same model on two devices")
    again = (f"lockstep eval {shlex.quote(str(run))}", "its exact scores, on any devices")
    commands = (
        (f"lockstep verify run {shlex.quote(str(run))}", "judge it by its records alone"),
        more if devices == 1 else again,
        (f"tensorboard --logdir {shlex.quote(str(run.parent if run.parent.name else run))}", "its curves"),
    )
    width = max(len(command) for command, _ in commands)
    for command, what in commands:
        yield line(("  ", ""), (program + command.ljust(width), "cyan"), (f"  {what}", "bright_black"))


def _proved(proof: dict[str, dict[str, Any]]) -> str:
    """Return in a phrase what holds: `the replicas at 12 checks, the ledger at 3`."""
    times = {name: check["times"] for name, check in proof.items() if check["outcome"] == Check.HOLDS}
    return ", ".join(f"{name} at {counted(number, 'check')}" for name, number in times.items())


def _written(folder: Path) -> list[str]:
    """Return what a run has left in its folder."""
    found = [name for name in _FILES if (folder / name).exists()]
    return [*found, "TensorBoard events"] if any(folder.glob("events.out.tfevents.*")) else found


def _fit(count: str, parts: list[str], width: int) -> str:
    """Return the line of `parts` with the step `count` before it, leaving out what does not fit into `width` columns.

    The count goes first, since the bar says the same; then the loss's neighbours, and the time left last.
    """
    for some in ([count, *parts], parts, [parts[0], *parts[2:]], [parts[0], parts[-1]]):
        text = "  ".join(some)
        if len(text) <= width:
            return text
    return parts[0]


def duration(seconds: float) -> str:
    """Return `seconds` as a person would say it: 4.2 s, 3 min 12 s, 5 h 04 min, 2 d 3 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"

"""What a person sees: a calm bar on a terminal, plain lines in a log file.

On a terminal one line at the bottom moves, and results scroll by above it:

    epoch  2/10 ━━━━╸━━━━━━━━━━━━━ 392/1,960  loss 1.5541  train 78.4%  5,512 images/s  2 min 52 s left

The bar goes to stderr, results to stdout, so that `lockstep train … > results.txt` keeps the results and still shows
the bar. Without a terminal there is no bar and no control code, but a line at most every few seconds, and one for the
end of each epoch.

The bar is drawn on `log` events alone: a thread that redraws ten times a second would take its time from the training.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ..errors import counted
from ..proof import Check

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


class Screen(Console):
    """A rich console that raises where its reader has gone (`| head`), instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Pass the BrokenPipeError on."""
        raise


class Terminal:
    """Shows the run to a person.

    `out` takes results, `err` warnings; the bar, where `live`, is on `err`. Where both are the same terminal they
    must be the same console, or the bar and the results would draw over each other. `clock` gives seconds.
    """

    def __init__(self, out: Console, err: Console, *, live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._err = err
        self._live = live
        self._clock = clock
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._epochs = 0
        self._steps_per_epoch = 0
        self._step_width = 0
        self._shown_s = -float("inf")
        self._held: dict[str, Any] | None = None
        self._reader_gone = False
        self._told = False  # that results cannot be written
        self._numbers = ""  # what stands right of the bar
        self._evaluating_since_s = 0.0
        self._evaluation_s = float("inf")  # the last one's; nobody knows how long the first takes
        self._acts: dict[str, Callable[[dict[str, Any]], None]] = {
            "start": self._start,
            "log": self._log,
            "evaluate": self._evaluate,
            "eval": self._eval,
            "epoch": lambda fields: self._release(),
            "warning": lambda fields: self._err.print(Text(f"warning: {fields['text']}", "yellow"), soft_wrap=True),
            "finish": self._finish,
        }

    @classmethod
    def detect(cls) -> Terminal:
        """Return the terminal of this process: a bar where stderr can move, plain lines elsewhere."""
        err = Screen(stderr=True, highlight=False)
        shared = err.is_interactive and sys.stdout.isatty()
        return cls(err if shared else Screen(highlight=False), err, live=err.is_interactive)

    def __str__(self) -> str:
        return "The terminal"

    def record(self, event: str, **fields: Any) -> None:
        """Show the event, if it is one that people look at."""
        act = self._acts.get(event)
        if act is None or self._reader_gone:
            return
        try:
            act(fields)
        except BrokenPipeError:
            self._reader_gone = True
            raise
        except OSError as error:
            if not self._told:
                self._told = True
                text = f"warning: results cannot be written to the output ({error.strerror}); training goes on"
                self._err.print(Text(text, "yellow"), soft_wrap=True)
            raise

    def close(self) -> None:
        """Show the last line that was held back, and leave the bar where it is."""
        if self._reader_gone:
            return
        self._release()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, *lines: Text) -> None:
        for line in lines:
            self._out.print(line, soft_wrap=True)

    def _start(self, fields: dict[str, Any]) -> None:
        self._epochs = fields.get("epochs", 0)
        self._steps_per_epoch = fields.get("steps_per_epoch", 0)
        self._step_width = len(f"{fields['total_steps']:,}")
        self._print(*(Text(line, "bold" if not index else "") for index, line in enumerate(fields.get("lines", ()))))
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
            self._task = self._bar.add_task(
                "starting", total=fields["total_steps"], completed=fields.get("first_step", 0), numbers="first steps …"
            )
            self._bar.start()
            self._bar.refresh()

    def _log(self, fields: dict[str, Any]) -> None:
        now_s = self._clock()
        ends_epoch = bool(self._steps_per_epoch) and fields["step"] % self._steps_per_epoch == 0
        due = now_s - self._shown_s >= (DRAW_EVERY_S if self._bar else PLAIN_EVERY_S)
        self._held = fields
        if due or ends_epoch:
            self._release()
            self._shown_s = now_s

    def _release(self) -> None:
        """Show the newest `log` event, if it was not shown yet."""
        fields, self._held = self._held, None
        if fields is None:
            return
        epoch = f"epoch {fields['epoch'] + 1:>{len(str(self._epochs))}}/{self._epochs}"
        if self._bar is None:
            parts = _parts(fields)
            parts.insert(0, f"{epoch}  step {fields['step']:>{self._step_width},}")
            parts.append(f"lr {fields['lr']:.4g}")
            self._print(Text("  ".join(parts)))
        else:
            total = self._bar.tasks[0].total or 0
            count = f"{fields['step']:>{self._step_width},}/{total:,.0f}"
            numbers = _fit(count, _parts(fields), self._err.width - len(epoch) - LEAST_BAR)
            self._numbers = numbers
            self._bar.update(self._task, completed=fields["step"], description=epoch, numbers=numbers)
            self._bar.refresh()

    def _evaluate(self, fields: dict[str, Any]) -> None:
        self._release()
        self._evaluating_since_s = self._clock()
        text = f"evaluating {counted(fields['samples'], 'image')} …"
        if self._bar is not None:
            self._bar.update(self._task, numbers=text)
            self._bar.refresh()
        elif self._evaluation_s > PLAIN_EVERY_S:
            self._print(Text(text, "bright_black"))

    def _eval(self, fields: dict[str, Any]) -> None:
        self._release()
        self._evaluation_s = self._clock() - self._evaluating_since_s
        if self._bar is not None:
            self._bar.update(self._task, numbers=self._numbers)
        line = Text()
        if "epoch" in fields:
            line.append(f"epoch {fields['epoch'] + 1:>{len(str(self._epochs))}}/{self._epochs}  ")
        line.append(f"step {fields['step']:>{self._step_width},}  ").append(f"test {fields['top1']:7.2%}", "bold green")
        if fields.get("top5") is not None:
            line.append(f"  top-5 {fields['top5']:7.2%}")
        line.append(f"  loss {fields['loss']:.4f}")
        if "samples" in fields:
            line.append(f"  {counted(fields['samples'], 'image')}", "bright_black")
        self._print(line)

    def _finish(self, fields: dict[str, Any]) -> None:
        self.close()
        epochs_s = fields.get("epoch_s") or []
        done = Text("\n").append("done" if not fields.get("exit") else "stopped", "bold").append(" ")
        done.append(f"after {counted(fields['steps'], 'step')}")
        if epochs_s:
            done.append(f" and {_duration(sum(epochs_s))} in {counted(len(epochs_s), 'epoch')}")
        if fields.get("images_per_s"):
            done.append(f", {fields['images_per_s']:,.0f} images/s")
        self._print(done)
        if fields.get("top1") is not None:
            score = Text("test accuracy ").append(f"{fields['top1']:.2%}", "bold green")
            if fields.get("best_top1") is not None:
                score.append(f"  best {fields['best_top1']:.2%}")
            if fields.get("top5") is not None:
                score.append(f"  top-5 {fields['top5']:.2%}")
            self._print(score)
        if proved := _proved(fields.get("proof") or {}):
            self._print(Text("proved ").append(proved))
        if fields.get("output"):
            written = ", ".join(_written(Path(fields["output"])))
            self._print(
                Text("written to ").append(str(fields["output"]), "cyan").append(f": {written}", "bright_black")
            )


def _proved(proof: dict[str, dict[str, Any]]) -> str:
    """Return in a phrase what holds: `the replicas at 12 checks, the ledger at 3`."""
    times = {name: check["times"] for name, check in proof.items() if check["outcome"] == Check.HOLDS}
    return ", ".join(f"{name} at {counted(number, 'check')}" for name, number in times.items())


def _written(folder: Path) -> list[str]:
    """Return what a run has left in its folder."""
    found = [name for name in _FILES if (folder / name).exists()]
    return [*found, "TensorBoard events"] if any(folder.glob("events.out.tfevents.*")) else found


def _parts(fields: dict[str, Any]) -> list[str]:
    """Return the measured parts of a `log` line."""
    parts = [f"loss {fields['loss']:.4f}"]
    if fields.get("top1") is not None:
        parts.append(f"train {fields['top1']:.1%}")
    parts.append(f"{fields['images_per_s']:,.0f} images/s")
    if fields.get("eta_s"):  # nothing at the last step
        parts.append(f"{_duration(fields['eta_s'])} left")
    return parts


def _fit(count: str, parts: list[str], width: int) -> str:
    """Return the line of `parts` with the step `count` before it, leaving out what does not fit into `width` columns.

    The count goes first, since the bar says the same; then the loss's neighbours, and the time left last.
    """
    for line in ([count, *parts], parts, [parts[0], *parts[2:]], [parts[0], parts[-1]]):
        text = "  ".join(line)
        if len(text) <= width:
            return text
    return parts[0]


def _duration(seconds: float) -> str:
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

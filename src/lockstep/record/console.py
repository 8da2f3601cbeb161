"""Console output: a bar on a terminal, plain lines elsewhere.

On a terminal one line at the bottom moves, and results scroll by above it:

    epoch  2/10 ━━━━╸━━━━━━━━━━━━━━━━━━━━ loss 1.5541  train 78.4%  5,512 images/s  2 min 52 s left

The bar goes to stderr, results to stdout. Without a terminal, the output has no control codes: a line at most every few
seconds, and at the end of each epoch. Only `log` events redraw the bar: a thread would take time from training.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from ..errors import counted
from ..screen import Part, Screen, line
from .base import Recorder
from .checks import Check

PLAIN_EVERY_S = 5.0  # at least, between two lines without a terminal: a day's run stays readable
_DRAW_EVERY_S = 0.1  # one drawing of the bar takes about a millisecond


class Notices(Recorder):
    """Shows batch shares, warnings, and the end, for a script that prints the rest itself.

    With --quiet shows only warnings and the end, of any run; the end goes to `out`.
    """

    def __init__(self, out: Screen | None = None, *, quiet: bool = False) -> None:
        self._err = Screen(stderr=True)
        self._out = out or self._err
        self._quiet = quiet
        self._run: dict[str, Any] = {}
        """The fields of the start event."""

    def __str__(self) -> str:
        return "The terminal"

    def record(self, event: str, **fields: Any) -> None:
        """Show the event, if it has a display."""
        show: Callable[[dict[str, Any]], None] | None = getattr(self, f"_show_{event}", None)
        if show is not None:
            with contextlib.suppress(BrokenPipeError):  # the reader, such as `head`, has closed the pipe
                show(fields)

    def _show_start(self, fields: dict[str, Any]) -> None:
        self._run = fields
        for text in () if self._quiet else fields["lines"]:
            self._err.say((text, "bright_black"))

    def _show_warning(self, fields: dict[str, Any]) -> None:
        self._err.say((f"warning: {fields['text']}", "yellow"))

    def _show_profile(self, fields: dict[str, Any]) -> None:
        for text in profile_lines(fields):
            self._err.say((text, "bright_black"))

    def _show_upload(self, fields: dict[str, Any]) -> None:
        self._err.say((fields["text"], "bright_black"))

    def _show_finish(self, fields: dict[str, Any]) -> None:
        self._out.say(("; ".join(line(*parts).plain for parts in _ended(fields, self._run)), "bright_black"))


class Terminal(Notices):
    """Shows a run: results on `out`, warnings and, if `live`, a bar on `err`.

    For one terminal, both must be the same console, or bar and results would overwrite each other.
    """

    def __init__(self, out: Screen, err: Screen, *, live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(out)
        self._err, self._live, self._clock = err, live, clock
        self._bar: Progress | None = None
        self._shown_s = -float("inf")
        self._numbers = ""  # the text right of the bar

    @classmethod
    def detect(cls) -> Terminal:
        """Return the terminal of this process, with a bar if stderr is interactive."""
        err = Screen(stderr=True)
        shared = err.is_interactive and sys.stdout.isatty()
        return cls(err if shared else Screen(), err, live=err.is_interactive)

    def close(self) -> None:
        """Stop the bar and leave it on screen."""
        if self._bar is not None:
            with contextlib.suppress(BrokenPipeError):
                self._bar.stop()
            self._bar = None

    def _show_start(self, fields: dict[str, Any]) -> None:
        self._run = fields
        for index, text in enumerate(fields["lines"]):
            self._out.say((text, "" if index else "bold"))
        if self._live:
            self._bar = Progress(
                TextColumn("{task.description}", style="bold"),
                BarColumn(None, "bright_black", "cyan", "green"),
                TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
                console=self._err,
                auto_refresh=False,
                expand=True,
                redirect_stdout=self._out is self._err,
            )
            begun = {"total": fields["total_steps"] or None, "completed": fields["first_step"]}
            self._bar.add_task("starting", **begun, numbers="first steps …")
            self._bar.start()
            self._bar.refresh()

    def _draw(self, **fields: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], **fields)
            self._bar.refresh()

    def _show_log(self, fields: dict[str, Any]) -> None:
        now_s, steps = self._clock(), self._run["steps_per_epoch"]
        is_last = steps and fields["step"] % steps == 0
        if now_s - self._shown_s < (_DRAW_EVERY_S if self._bar else PLAIN_EVERY_S) and not is_last:
            return
        self._shown_s = now_s
        parts = [f"loss {fields['loss']:.4f}"]
        if fields.get("top1") is not None:
            parts.append(f"train {fields['top1']:.1%}")
        parts.append(f"{fields['samples_per_s']:,.0f} {_unit(self._run)}s/s")
        if fields.get("eta_s"):  # absent at the last step, and if the length is unknown
            parts.append(f"{duration(fields['eta_s'])} left")
        epoch = self._epoch(fields)
        if self._bar is None:
            self._out.say("  ".join([epoch, self._step(fields), *parts, f"lr {fields['lr']:.4g}"]))
        else:
            count = [] if self._run["total_steps"] else [f"{fields['step']:,}"]  # else the bar shows it
            self._numbers = "  ".join([*count, *parts])
            self._draw(completed=fields["step"], description=epoch, numbers=self._numbers)

    def _epoch(self, fields: Mapping[str, Any]) -> str:
        epochs = self._run["epochs"]
        return f"epoch {fields['epoch'] + 1:>{len(str(epochs))}}/{epochs}"

    def _step(self, fields: Mapping[str, Any]) -> str:
        width = len(f"{self._run['total_steps']:,}")
        return f"step {fields['step']:>{width},}"

    def _show_evaluate(self, fields: dict[str, Any]) -> None:
        self._draw(numbers=f"evaluating {counted(fields['samples'], _unit(self._run))} …")

    def _show_eval(self, fields: dict[str, Any]) -> None:
        self._draw(numbers=self._numbers)
        if not {"top1", "loss", "samples"} <= fields.keys():  # a script's own scores
            numbers = {name: value for name, value in fields.items() if name not in ("step", "epoch", "on", "time")}
            scores = "  ".join(f"{name} {value:.6g}" for name, value in numbers.items() if value is not None)
            self._out.say(f"{self._epoch(fields)}  {self._step(fields)}  {fields['on']}  {scores}".rstrip())
            return
        self._out.say(
            f"{self._epoch(fields)}  {self._step(fields)}  ",
            (f"{fields['on'].removesuffix(' set')} {fields['top1']:7.2%}", "bold green"),
            f"{_top5(fields, self._run)}  loss {fields['loss']:.4f}",
            (f"  {counted(fields['samples'], _unit(self._run))}", "bright_black"),
        )

    def _show_finish(self, fields: dict[str, Any]) -> None:
        self.close()
        self._out.say()
        for parts in _ended(fields, self._run):
            self._out.say(*parts)


def _unit(run: Mapping[str, Any]) -> str:
    return "image" if len(run.get("shape", ())) == 3 else "sample"


def _top5(fields: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    # With five classes or fewer it is always 100 %.
    return f"  top-5 {fields['top5']:.2%}" if run.get("classes", 6) > 5 and fields.get("top5") is not None else ""


def _ended(fields: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[tuple[Part, ...]]:
    """Yield the final lines of a run: steps, scores, proofs, files."""
    done = f" after {counted(fields['steps'], 'step')}"
    if epochs_s := fields["epoch_s"]:
        done += f" and {duration(sum(epochs_s))} in {counted(len(epochs_s), 'epoch')}"
    if rate := fields.get("samples_per_s") or fields.get("images_per_s"):
        done += f", {rate:,.0f} {_unit(run)}s/s"
    yield ("done", "bold"), done
    if fields.get("stopped"):
        yield (f"stopped early: {fields['stopped']}",)
    if fields.get("top1") is not None:
        on = fields["best_on"]
        best = f"  best {fields['best_top1']:.2%} (chosen on the {on}){_top5(fields, run)}"
        yield f"{on.removesuffix(' set')} accuracy ", (f"{fields['top1']:.2%}", "bold green"), best
        tests = {"last weights": fields.get("test"), "best weights": fields.get("test_best")}
        scores_by_weights = [f"{scores['top1']:.2%} ({weights})" for weights, scores in tests.items() if scores]
        if on != "test set":
            yield "test accuracy ", ("  ".join(scores_by_weights), "bold green")
    counts = {name: check["times"] for name, check in fields["proof"].items() if check["outcome"] == Check.HOLDS}
    if counts:
        yield ("proved: " + ", ".join(f"{name} ({counted(times, 'check')})" for name, times in counts.items()),)
    if fields["output"]:
        yield "written to ", (fields["output"], "cyan")


def profile_lines(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the summary of a trace: operations of rank 0, and the ranks' waits for each other."""
    step_s, wait_s = fields["step_s"], fields["wait_s"]
    yield f"profile of steps {fields['first_step']:,} to {fields['step']:,}, ms a step; traces in {fields['folder']}"
    for item in fields["operations"]:
        yield f"  {item['self_s'] * 1000:9.3f}  {item['share']:6.1%}  {item['name']}"
    if len(wait_s) > 1:
        waits = ", ".join(f"{seconds * 1000:.3f}" for seconds in wait_s)
        gap_s = max(wait_s) - min(wait_s)
        yield (
            f"  waiting in exchanges, by rank: {waits} of {max(step_s) * 1000:.3f}; rank {fields['slowest']} is the "
            f"slowest, and others wait up to {gap_s * 1000:.3f} for it"
        )


def duration(seconds: float) -> str:
    """Return `seconds` in readable units: 4.2 s, 3 min 12 s, 5 h 04 min, 2 d 3 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h} h"
    if hours:
        return f"{hours} h {m:02} min"
    return f"{minutes} min {s:02} s" if minutes else f"{s} s"

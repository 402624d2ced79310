"""Progress bars on the user's terminal, from rank 0; silence anywhere else."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from launchers.rank import console_stream

if TYPE_CHECKING:
    from rich.progress import Progress

Unit = Literal["steps", "frames", "bytes"]


class Bar(Protocol):
    def advance(self, n: float = 1) -> None:
        """`n` more of the total are done."""


class _SilentBar:
    def advance(self, n: float = 1) -> None:
        pass


class _RichBar:
    def __init__(self, display: "Progress", task: Any) -> None:
        self._display, self._task = display, task

    def advance(self, n: float = 1) -> None:
        self._display.advance(self._task, n)


# rich shows one live display at a time, so bars that overlap are rows of one; it lives while it has bars.
_display: "Progress | None" = None
_open_bars = 0


@contextlib.contextmanager
def progress(description: str, total: float | None, unit: Unit = "steps") -> Iterator[Bar]:
    """A bar with rate and time left while the body runs; `total` None is of unknown length.

    A terminal that breaks ends the bars, never the run.
    """
    global _open_bars
    display = _display or _start_display()
    if display is None:
        yield _SilentBar()
        return
    _open_bars += 1
    try:
        yield _RichBar(display, display.add_task(description, total=total, unit=unit))
    finally:
        _open_bars -= 1
        if _open_bars == 0:
            _stop_display(display)


def _start_display() -> "Progress | None":
    global _display
    stream = console_stream()
    if stream is None:
        return None
    _display = _make_display(stream)
    _display.start()
    return _display


def _stop_display(display: "Progress") -> None:
    global _display
    _display = None
    display.stop()


class _Unbreakable:
    """A stream that goes silent instead of raising once its terminal is gone."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def write(self, text: str) -> int:
        try:
            if self._stream is not None:
                self._stream.write(text)
        except (OSError, ValueError):
            self._stream = None
        return len(text)

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def isatty(self) -> bool:
        return True


def _make_display(stream: TextIO) -> "Progress":
    # rich is imported only where something is shown.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Done(ProgressColumn):
        def render(self, task: Task) -> Text:
            in_bytes = task.fields["unit"] == "bytes"
            parts = [part for part in (task.completed, task.total) if part is not None]
            return Text("/".join(f"{part / 2**30:.2f}" if in_bytes else f"{part:g}" for part in parts))

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            if not speed:
                return Text("")
            if task.fields["unit"] == "bytes":
                return Text(f"{speed / 2**30:.2f} GiB/s")
            return Text(f"{speed:.2f} it/s" if speed >= 1 else f"{1 / speed:.2f} s/it")

    # The stream is a pipe under a supervisor, with the terminal's width in COLUMNS.
    columns = os.environ.get("COLUMNS", "")
    console = Console(
        file=_Unbreakable(stream),  # type: ignore[arg-type]
        force_terminal=True,
        width=int(columns) if columns.isdigit() else None,
    )
    name, left = TextColumn("{task.description:<12}"), TimeRemainingColumn(elapsed_when_finished=True)
    return Progress(
        name, BarColumn(None), Done(), Rate(), left, console=console, redirect_stdout=False, redirect_stderr=False,
        expand=True,
    )  # fmt: skip

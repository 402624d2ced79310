"""Copies what the ranks write to their log files, the console and a callback, whatever happens to those."""

import contextlib
import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

log = logging.getLogger(__name__)

TAIL_BYTES = 16384
DRAIN_S = 2.0  # for the rest of a pipe after the end of its rank; more is not waited for
_IDLE_MS = 200

# Control sequences (ECMA-48 CSI), and all that a carriage return writes over.
_OVERWRITTEN = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[^\n]*\r(?!\n|$)")


class Sink(Protocol):
    """Takes bytes as they come; never raises."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class LogFile:
    """One rank's log. Its end is kept in memory too: it is wanted most when the disk is full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._tail = b""
        self._lost = 0

    def write(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._lost += len(rest)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        if self._lost:
            log.warning("%s lacks %d bytes that could not be written: is the disk full?", self.path, self._lost)

    def tail(self) -> str:
        """The last `TAIL_BYTES`, as a terminal would show them: no control codes, no overwritten text."""
        return _OVERWRITTEN.sub("", self._tail.decode("utf-8", errors="replace")).rstrip()


class Console:
    """The user's stream, raw; given up when it breaks, because a closed terminal must not end the job."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream: BinaryIO | None = stream

    def write(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(data)
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def close(self) -> None:
        """The stream is the caller's."""


class Lines:
    """Calls back with each line; a carriage return ends a line too. A callback that raises is not called again."""

    def __init__(self, rank: int, on_line: Callable[[int, str], None]) -> None:
        self._rank = rank
        self._on_line: Callable[[int, str], None] | None = on_line
        self._rest = b""

    def write(self, data: bytes) -> None:
        *lines, self._rest = re.split(rb"[\r\n]+", self._rest + data)
        for line in lines:
            self._call(line)

    def close(self) -> None:
        self._call(self._rest)

    def _call(self, line: bytes) -> None:
        if not line or self._on_line is None:
            return
        try:
            self._on_line(self._rank, line.decode("utf-8", errors="replace"))
        except Exception:
            log.exception("on_line failed for rank %d and is not called again", self._rank)
            self._on_line = None


class Pump(threading.Thread):
    """Empties one pipe into its sinks until the pipe ends, or soon after `finish` when another process holds it."""

    def __init__(self, name: str, source: BinaryIO, sinks: Sequence[Sink]) -> None:
        super().__init__(name=name, daemon=True)
        self.ended_at: float | None = None  # unix seconds at which the last writer was gone
        self._source = source
        self._sinks = sinks
        self._finish_by: float | None = None

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._source, select.POLLIN)
        with self._source:
            while True:
                ready = bool(poller.poll(_IDLE_MS))
                if ready and not self._copy():
                    self.ended_at = time.time()
                    break
                if self._finish_by is not None and (not ready or time.monotonic() > self._finish_by):
                    break
        for sink in self._sinks:
            sink.close()

    def finish(self) -> None:
        self._finish_by = time.monotonic() + DRAIN_S

    def _copy(self) -> bool:
        data = os.read(self._source.fileno(), 65536)
        for sink in self._sinks:
            sink.write(data)
        return bool(data)


@dataclass(frozen=True)
class Show:
    """Where output goes besides the logs: `console` shows global rank 0, what it prints too if `echo`."""

    console: BinaryIO | None = None
    echo: bool = True
    on_line: Callable[[int, str], None] | None = None


class RankOutput:
    """All output of one rank: its log, and for rank 0 on a terminal a second pipe that reaches nothing but the screen.

    The process to be started gets `variables` and `child_fds`.
    """

    def __init__(self, rank: int, path: Path, show: Show) -> None:
        self.log = LogFile(path)
        self.variables: dict[str, str] = {}
        self.child_fds: tuple[int, ...] = ()
        self._rank = rank
        self._show = show
        self._console = show.console if rank == 0 else None
        self._terminal: BinaryIO | None = None
        self._pumps: list[Pump] = []
        if self._console is not None and self._console.isatty():
            read_end, write_end = os.pipe()
            self._terminal = os.fdopen(read_end, "rb", buffering=0)
            self.child_fds = (write_end,)
            self.variables = {"VGEN_TERMINAL": "1", "VGEN_CONSOLE_FD": str(write_end)} | _size(self._console)

    @property
    def ended_at(self) -> float | None:
        """Unix seconds at which the rank and all that shared its output were gone; None as long as they are not."""
        return self._pumps[0].ended_at if self._pumps else None

    def attach(self, source: BinaryIO) -> None:
        """Starts to copy what comes from `source`, the output of the started process."""
        self._close_child_fds()
        sinks: list[Sink] = [self.log]
        if self._console is not None and self._show.echo:
            sinks.append(Console(self._console))
        if self._show.on_line is not None:
            sinks.append(Lines(self._rank, self._show.on_line))
        self._pumps.append(Pump(f"output of rank {self._rank}", source, sinks))
        if self._terminal is not None and self._console is not None:
            self._pumps.append(Pump("progress of rank 0", self._terminal, [Console(self._console)]))
        for pump in self._pumps:
            pump.start()

    def finish(self) -> None:
        """Ends the copying soon, now that the process is gone."""
        for pump in self._pumps:
            pump.finish()

    def close(self) -> None:
        """Waits a bounded time for the rest to be copied: a stopped terminal can hold a thread in a write."""
        self._close_child_fds()
        if not self._pumps:
            self.log.close()
            if self._terminal is not None:
                self._terminal.close()
        for pump in self._pumps:
            pump.join(DRAIN_S + 1.0)
            if pump.is_alive():
                log.warning("%s is stuck in a write and is left behind", pump.name)

    def _close_child_fds(self) -> None:
        for descriptor in self.child_fds:
            os.close(descriptor)
        self.child_fds = ()


def _size(stream: BinaryIO) -> dict[str, str]:
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:
        return {}
    return {"COLUMNS": str(size.columns), "LINES": str(size.lines)} if size.columns else {}

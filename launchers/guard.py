"""A small process beside a supervisor that kills the ranks' process groups if the supervisor dies without doing so.

PR_SET_PDEATHSIG ends a rank but not the rank's own children, and not a command that never asked for it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

_DONE = b"done"
_CHECK_S = 1.0


class Guard:
    """Runs this file as a process for as long as the `with` block lasts; `watch` adds a process group."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid())]
        # A session of its own: what a terminal or `kill -- -group` sends to the supervisor must not end the guard.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def __enter__(self) -> "Guard":
        return self

    def watch(self, group: int) -> None:
        self._send(b"%d" % group)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(_DONE)
        with contextlib.suppress(OSError):
            self._pipe.close()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _send(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # a guard that somebody killed must not end the job
            self._pipe.write(word + b"\n")


def _read_until_gone(parent: int) -> bytes:
    """All that the supervisor wrote until it closed the pipe or died; a fork of it may hold the pipe open."""
    text = b""
    while True:
        gone = os.getppid() != parent
        ready = bool(select.select([0], [], [], 0 if gone else _CHECK_S)[0])
        data = os.read(0, 65536) if ready else b""
        text += data
        if (ready and not data) or (gone and not ready):
            return text


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # SLURM signals every process of a job; this one is needed to the end
    words = _read_until_gone(int(sys.argv[1])).split()
    for group in [] if _DONE in words else words:
        with contextlib.suppress(OSError):
            os.killpg(int(group), signal.SIGKILL)


if __name__ == "__main__":
    main()

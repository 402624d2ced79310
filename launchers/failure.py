"""Which rank of a job failed first, and what it has to say."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGABRT, SIGKILL, Signals
from typing import Any

# A rank without an error file is noticed when it is gone. Its peers may have seen its sockets close long before, in the
# destructors of libtorch or in the kernel, and have left error files about it.
NOTICE_S = 1.0
# libtorch aborts a rank whose peer is gone: an abort after a peer's error is a consequence. A peer's error can only be
# one of the abort if it comes at the same moment, since an abort runs no destructors.
ABORT_NOTICE_S = 0.05
LAST_LINES = 15

_TRACEBACK_HEADER = "Traceback (most recent call last):"
_EXCEPTION_LINE = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
_OWN_KINDS = ("RankExited", "RankKilled", "RankLost")


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first.

    With an error file `kind`, `message`, `stage`, `traceback` are the file's. Without one, `traceback` is the Python
    traceback at the end of the log or else its last 15 lines, and `kind` the Python error's or one of RankExited,
    RankKilled, RankLost. `exit_code` and `signal` are both None when the supervisor ended the rank, because it hung
    after reporting its error, and when its exit status got lost.
    """

    rank: int
    exit_code: int | None
    signal: int | None
    log: Path
    traceback: str | None
    message: str | None
    kind: str | None
    stage: str | None

    def __str__(self) -> str:
        message = " ".join((self.message or "").split())
        if self.kind in _OWN_KINDS:
            return f"Rank {self.rank} {message} (log: {self.log})"
        where = f" in stage {self.stage}" if self.stage else ""
        what = ": ".join(part for part in (self.kind or "an unknown error", message) if part)
        return f"Rank {self.rank} failed{where} with {what} (log: {self.log})"


@dataclass(frozen=True)
class Ending:
    """How one rank ended. `status` is its exit code, minus its signal, or None if unknown; times are unix seconds."""

    rank: int
    status: int | None
    ended_at: float
    log: Path
    tail: str = ""  # the end of the log
    error: Mapping[str, Any] | None = None  # the error file
    terminated_at: float = math.inf  # our SIGTERM, if the rank was running then
    killed: bool = False  # by our SIGKILL


def read_error(path: Path) -> dict[str, Any] | None:
    """The error file of a rank; `time` is the file's own if it does not say it, and all there is if it is damaged."""
    try:
        written_at, text = path.stat().st_mtime, path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    error = dict(content) if isinstance(content, dict) else {}
    if not isinstance(error.get("time"), int | float):
        error["time"] = written_at
    return error


def first_failure(endings: Sequence[Ending]) -> RankFailure:
    """The failure that the others follow from.

    1. A rank that somebody else killed with SIGKILL (the out-of-memory killer): no exception of a peer does that, but
       it makes peers raise, and they may leave an error file before the killed process is taken apart.
    2. Else the oldest failure: by the time in the error file, without one by the end of the rank less a margin.

    A rank that the supervisor had to end counts only by its error file.

    Raises:
        ValueError: none of them failed.
    """
    suspects = [(blame, ending.rank, ending) for ending in endings if (blame := _blame(ending)) is not None]
    if not suspects:
        raise ValueError(f"none of the {len(endings)} ranks failed")
    return _describe(min(suspects, key=lambda suspect: suspect[:2])[2])


def _blame(ending: Ending) -> tuple[int, float] | None:
    """Sort key, smallest first; None for a rank that did not fail by itself."""
    if ending.error is not None:
        return (1, float(ending.error["time"]))
    if ending.status == -SIGKILL and not ending.killed:
        return (0, ending.ended_at)
    if ending.status == 0 or ending.terminated_at < math.inf:
        return None
    return (1, ending.ended_at - (ABORT_NOTICE_S if ending.status == -SIGABRT else NOTICE_S))


def _describe(ending: Ending) -> RankFailure:
    hung = ending.error is not None and ending.terminated_at < math.inf
    status = None if hung else ending.status
    words = ending.error if ending.error is not None else _from_log(ending)
    kind, message, stage, traceback = (
        None if words.get(name) is None else str(words[name]) for name in ("kind", "message", "stage", "traceback")
    )
    return RankFailure(
        rank=ending.rank,
        exit_code=status if status is not None and status >= 0 else None,
        signal=-status if status is not None and status < 0 else None,
        log=ending.log,
        traceback=traceback or "\n".join(ending.tail.splitlines()[-LAST_LINES:]) or None,
        message=message,
        kind=kind,
        stage=stage,
    )


def _from_log(ending: Ending) -> dict[str, str]:
    """What a rank without an error file died of: its last Python traceback, or its exit status."""
    status = ending.status
    if status is None:
        return {"kind": "RankLost", "message": "ended, but its exit status was taken by another part of the program"}
    if status < 0:
        hint = ", often the kernel's out-of-memory killer" if status == -SIGKILL else ""
        return {"kind": "RankKilled", "message": f"was ended by {_signal_name(-status)}{hint}"}
    _, header, block = ending.tail.rpartition(_TRACEBACK_HEADER)
    if status == 1 and header:  # 1 is Python's code for an exception that nobody caught
        for line in block.splitlines():
            if found := _EXCEPTION_LINE.match(line):
                return {"kind": found[1], "message": found[2] or "", "traceback": header + block}
    return {"kind": "RankExited", "message": f"exited with code {status}"}


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
